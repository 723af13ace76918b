"""The order of the tokens after each block of a model: row by row, or that of windows, as in Hiera."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from graticule.external.flow import Flow
from graticule.external.images import call
from graticule.external.view import evaluating
from graticule.position.grid import Grid


def token_orders(
    model: nn.Module,
    images: Tensor,
    flow: Flow,
    cut: Tensor | None,
    blocks: Sequence[str],
    grids: Sequence[Grid],
) -> tuple[Tensor | None, ...]:
    """Return the index of the token of each patch after each block, (H * W,); None where they are row by row.

    The map that the images are cut into is replaced, and attention is silenced, so that a token depends only on the
    patches in its place. For each binary digit of their rows and columns, one map changes the patches with a one,
    another those with a zero. Only the first digits are tried, unless these show another order, as of Hiera, whose
    tokens are in the order of its windows.
    """
    shape = grids[0].shape
    if cut is None or cut.shape[2:] != shape or len(images) < 2 or flow.called[blocks[0]].ndim != 3:
        return (None,) * len(blocks)
    at = next(index for index, (_, x, _) in enumerate(flow.maps) if x is cut)
    noise = torch.randn(cut.shape[1:], generator=torch.Generator().manual_seed(0)).to(cut)

    def places(digits: Sequence[Sequence[int]]) -> list[Tensor | None]:
        return _places_by(model, images, (at, noise), blocks, grids, digits)

    digits = [range(max(1, (side - 1).bit_length())) for side in shape]
    if all(one is None for one in places([each[-1:] for each in digits])):
        return (None,) * len(blocks)
    found = places(digits)
    return tuple(None if one is None or len(one.unique()) < len(one) else one.argsort() for one in found)


def _places_by(
    model: nn.Module,
    images: Tensor,
    stem: tuple[int, Tensor],
    blocks: Sequence[str],
    grids: Sequence[Grid],
    digits: Sequence[Sequence[int]],
) -> list[Tensor | None]:
    """Return the place of each token in the grid after each block, (H * W,), by some digits of rows and columns.

    None where tokens are row by row or a map, or the grid is not the first one after halving its sides.
    """
    at, noise = stem
    height, width = grids[0].shape
    place = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))  # (2, H, W)
    ones = torch.stack([place[axis] >> digit & 1 for axis in (0, 1) for digit in digits[axis]]).bool()
    masks = torch.cat([ones[:1] & False, ones, ~ones]).to(noise)[:, None]
    given = images[:1].expand(len(masks), -1, -1, -1)
    flow = Flow(model, stem=(at, noise * (1 + masks)))
    with evaluating(model), flow.following(given):
        call(model, given)
    found: list[Tensor | None] = []
    for name, grid in zip(blocks, grids, strict=True):
        x, halvings = flow.called[name], (height // grid.height).bit_length() - 1
        if x.ndim != 3 or (grid.height << halvings, grid.width << halvings) != (height, width):
            found.append(None)
            continue
        of_ones, of_zeros = (x[1:] - x[:1])[:, grid.prefix :].norm(dim=-1).cpu().chunk(2)  # (digits, N) each
        scales = [
            scale * (1 << digit >> halvings) for scale, of in zip((grid.width, 1), digits, strict=True) for digit in of
        ]
        step = 1 << halvings
        both = torch.stack([(of_ones > of_zeros).long(), ones[:, ::step, ::step].flatten(1).long()])
        places, by_rows = (both * torch.tensor(scales)[:, None]).sum(1)
        found.append(None if torch.equal(places, by_rows) else places)
    return found
