"""Start an attached position from the module's own position embedding, by the fits of `surgery.fits`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.encodings.forms.absolute import JoinedPosition
from graticule.encodings.learnable import Learnable
from graticule.external.images import call
from graticule.external.view import evaluating
from graticule.layers.attention import Attention
from graticule.position.grid import Grid
from graticule.position.joining import Default
from graticule.position.position import NoPosition, Position
from graticule.surgery.attach_attention import Survey, Ways, first_tensor, put_back, take_out
from graticule.surgery.change import Certificate
from graticule.surgery.fits.contributions import record_contributions
from graticule.surgery.fits.measure import measure
from graticule.surgery.fits.registry import Before, fit_position

Example = Tensor | Mapping[str, Any]


def start_position(
    position: Position, module: nn.Module, own: Sequence[str], found: Survey, ways: Ways, grid: Grid, example: Example
) -> tuple[Certificate, list[Tensor]]:
    """Fit a position to the module's own embedding, and report what it keeps; also return the tokens after each block.

    The table w of the embedding is what it adds to the input of the first block: the difference that zeros in its stead
    make there. The values of the embedding are used where they agree. If a norm follows the embedding, the difference
    depends on the image; then w is its mean, and the shares count only what is the same for all images.

    Args:
        position: the new position, which is changed.
        module: the module, with its own embedding.
        own: the names of the embedding, one parameter or several; may be empty.
        found: the survey of the module.
        ways: the access to its attention.
        grid: the grid of its tokens.
        example: input on which the contributions of w to the layers are measured.
    """
    tokens: list[Tensor] = []
    with evaluating(module):
        table, constant = _own_table(module, own, found, grid, example) if own else (None, 1.0)
        old: Position = NoPosition(len(found.blocks))
        layers: list[Any] = [None] * len(found.blocks)
        if table is not None and table.any():
            learnable = Learnable(grid, found.dim).to(table)
            learnable.pos_embed.copy_(table)
            old = JoinedPosition([learnable], Default(len(found.blocks)))
            blocks = [module.get_submodule(name) for name in found.blocks]
            layers = [(table, block.get_submodule(found.norm), _attention(block, ways, found)) for block in blocks]
        with tokens_after(module, found) as tokens:
            contributions = record_contributions(layers, lambda: call(module, example), int(found.sequence_first))
        before = Before(grid, old(grid), contributions)
        fits = fit_position(position, old, [before])
        shares = measure(before, position(grid))
    scaled = (share._replace(kept=None if share.kept is None else share.kept * constant) for share in shares)
    return Certificate(tuple(fits), tuple(scaled)), tokens


@contextmanager
def tokens_after(module: nn.Module, found: Survey) -> Iterator[list[Tensor]]:
    """Yield a list that the calls of the module add the tokens after each block to, (B, N, D) each."""
    tokens: list[Tensor] = []

    def keep(block: nn.Module, args: object, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        tokens.append(output.detach().transpose(0, int(found.sequence_first)))

    with ExitStack() as stack:
        for name in found.blocks:
            stack.callback(module.get_submodule(name).register_forward_hook(keep).remove)
        yield tokens


def _own_table(
    module: nn.Module, own: Sequence[str], found: Survey, grid: Grid, example: Example
) -> tuple[Tensor, float]:
    """Return the table w, (N, D), and the share of its effect on the first block that is the same for all images."""
    if isinstance(example, Tensor) and example.is_floating_point() and not example.any():
        noise = torch.empty(example.shape[1:]).normal_(generator=torch.Generator().manual_seed(0))
        example = torch.cat([example[:1], noise[None].to(example)])  # of another image, to see whether it matters
    with_it = _entering(module, found, example)
    removed = [take_out(module, name) for name in own]
    try:
        added = (with_it - _entering(module, found, example)).double()
    finally:
        for each in removed:
            put_back(module, each)
    table = added.mean(0)
    whole = float(added.square().sum())
    constant = float(table.square().sum()) * len(added) / whole if whole else 1.0
    if len(own) == 1 and removed[0].value.numel() in (table.numel(), grid.patches * found.dim):
        stored = removed[0].value.detach().reshape(-1, found.dim)
        stored = F.pad(stored, (0, 0, len(table) - len(stored), 0)).to(with_it)
        if float((stored - added).square().sum()) <= 0.01 * whole:  # the rest is rounding
            return stored, 1.0
    return table.to(with_it.dtype), constant


class _Entered(Exception):
    """Raised when the first block is called, whose input is all that is asked for."""


def _entering(module: nn.Module, found: Survey, example: Example) -> Tensor:
    """Return the input of the first block, (B, N, D)."""
    seen: list[Tensor] = []

    def stop(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = first_tensor(args, kwargs)
        assert tokens is not None
        seen.append(tokens.transpose(0, int(found.sequence_first)))
        raise _Entered

    handle = module.get_submodule(found.blocks[0]).register_forward_pre_hook(stop, with_kwargs=True)
    try:
        call(module, example)
    except _Entered:
        pass
    finally:
        handle.remove()
    return seen[0]


def _attention(block: nn.Module, ways: Ways, found: Survey) -> nn.Module:
    """Return attention of ours with the projections of a block, or the block if its logits are computed otherwise."""
    if ways.attention is None or ways.num_heads is None or found.dim % ways.num_heads:
        return block
    theirs: Any = block.get_submodule(ways.attention)
    if any(not isinstance(getattr(theirs, name, None), nn.Identity | None) for name in ("q_norm", "k_norm", "q_bias")):
        return block
    if ways.multihead:
        weights, biases = [theirs.in_proj_weight], [theirs.in_proj_bias]
    else:
        names = (ways.fused,) if ways.queries_keys is None else (*ways.queries_keys, ways.queries_keys[1])
        linear: list[Any] = [block.get_submodule(name) for name in names if name]
        weights, biases = (
            [getattr(one, "weight", None) for one in linear],
            [getattr(one, "bias", None) for one in linear],
        )
    if not weights or any(weight is None for weight in weights) or sum(map(len, weights)) != 3 * found.dim:
        return block
    biased = all(bias is not None for bias in biases)
    qkv = nn.Linear(found.dim, 3 * found.dim, bias=biased).to(weights[0])
    qkv.weight.copy_(torch.cat(weights))
    if biased:
        qkv.bias.copy_(torch.cat(biases))
    return Attention(found.dim, ways.num_heads, qkv=qkv)
