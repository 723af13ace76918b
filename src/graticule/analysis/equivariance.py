"""Translation equivariance of a model, measured: shifted features against features of the shifted image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from graticule.analysis.similarity import Array, format_number
from graticule.external.images import Size
from graticule.external.traced_model import view_of
from graticule.position.grid import Grid
from graticule.position.places import by
from graticule.registry.checks import checked
from graticule.system.files import write_arrays
from graticule.system.tables import PrintedTable

Shift = tuple[int, ...]

#: Columns of `Translation.summary()`.
COLUMNS = ("layer", "grid", "inside", "border", "all patches", "prefix tokens")


@dataclass(frozen=True, eq=False, repr=False)
class Translation(PrintedTable):
    r"""The translation error of the features of every layer, when the image is shifted by whole patches.

    .. math:: e_l = \sqrt{\frac{E\, \|F_l(T x) - T F_l(x)\|^2}{E\, \|F_l(x) - E F_l(x)\|^2}}

    over images, shifts T and tokens: 0 if the layer is equivariant, 1 if the difference is as large as the
    features' own spread over tokens and images, :math:`\sqrt 2` if the two are unrelated.

    Layers are indexed from 0.

    Args:
        grids: of every layer.
        inside: e_l over the tokens that are not on the border, (L,); NaN if all are. A token is on the border if it is
            at an edge before or after the shift.
        at_border: e_l over the tokens on the border, (L,).
        all_patches: e_l over all patches, (L,).
        prefix: the same root as e_l for the prefix tokens, which should not change; NaN without prefix tokens.
        logits: the same for the logits, whose spread is that over images; NaN for a model without a head.
        flips: share of images whose top-1 class changes, mean over shifts; NaN for a model without a head.
        shifts: in patches of the coarsest grid, (down, right), or of all axes of a video.
        images: number of images.
    """

    grids: tuple[Grid, ...]
    inside: Array
    at_border: Array
    all_patches: Array
    prefix: Array
    logits: float
    flips: float
    shifts: tuple[Shift, ...]
    images: int

    def summary(self) -> list[tuple[str, ...]]:
        """Return rows for a table: `COLUMNS`, then every layer."""
        rows: list[tuple[str, ...]] = [COLUMNS]
        for layer, grid in enumerate(self.grids):
            numbers = (self.inside[layer], self.at_border[layer], self.all_patches[layer], self.prefix[layer])
            rows.append(
                (str(layer), "x".join(map(str, grid.shape)), *(format_number(number, ".3f") for number in numbers))
            )
        return rows

    @property
    def heading(self) -> str:
        if np.isnan(self.logits):
            return "the model has no head, so there are no logits."
        return f"logits {self.logits:.3f} of their spread over images; top-1 changes for {100 * self.flips:.1f} %."

    def save(self, path: str | Path) -> Path:
        """Write all numbers to `path` as .npz, completely or not at all; returns the path."""
        arrays = {
            "grids": np.array([[*grid.shape, grid.prefix] for grid in self.grids]),
            "border": self.at_border,
            "shifts": np.array(self.shifts),
            **{name: getattr(self, name) for name in ("inside", "all_patches", "prefix", "logits", "flips", "images")},
        }
        return write_arrays(path, arrays)


@checked
def translation_error(model: nn.Module, images: Tensor, shifts: Sequence[Shift] | None = None) -> Translation:
    """Measure the error of translation equivariance of each layer of `model`, and of invariance of its logits.

    The image is rolled: patches that leave it on one side enter on the other. So both images consist of the same
    patches, and only position information can distinguish them. That holds if the sides are multiples of the coarsest
    patch; others, which Swin and CCT pad, are refused, because no shift moves all patches.
    An encoding that is equivariant on an infinite image is not exactly so here: for a relative one, two patches on
    either side of the seam change their offset. Edges are the image's before and after the shift, where zero padding
    has an effect; the seam is one of them.

    Reference: CPVT (Chu et al., 2023), appendix A, which argues it without a measurement.

    Args:
        model: one of our backbones, or another model of images, as of timm or transformers; not changed,
            and measured in evaluation mode.
        images: (B, C, height, width), real images, or videos with a depth; at least two, for their spread. Sides are
            multiples of the model's coarsest patch.
        shifts: (down, right), in patches of the model's coarsest grid; negative values shift up or left. By default
            one patch down, one to the right, and both; for a video one patch along each axis, and along all.

    Raises:
        ValueError: if `images` are not at least two, their sides are not whole patches, a shift moves nothing, or a
            size does not fit the model.
    """
    if images.ndim not in (4, 5) or len(images) < 2:
        raise ValueError(
            "`images` must be (B, C, height, width), or videos with a depth before the height, with B at least 2, got "
            f"{tuple(images.shape)}."
        )
    axes = images.ndim - 2
    if shifts is None:
        shifts = [*map(tuple, np.eye(axes, dtype=int).tolist()), (1,) * axes]
    if not shifts:
        raise ValueError("`shifts` must be at least one, got none.")
    view = view_of(model, tuple(images.shape[2:]))
    coarsest = whole_patches(model, view.img_size)
    for shift in shifts:
        if len(shift) != axes or not any(np.mod(shift, coarsest.shape)):
            raise ValueError(
                f"`shifts` must move the image along its {axes} axes, got {shift} on a grid of {by(coarsest.shape)}."
            )
    dims = tuple(range(-axes, 0))
    first = view.run(images)
    before, logits = first.layers, first.logits
    sums, counts = np.zeros((2, len(before), 2))  # of the tokens inside and on the border
    prefix = np.array([0.0 if grid.prefix else np.nan for _, grid in before])
    change = flips = 0.0 if logits is not None else float("nan")
    for shift in shifts:
        moved_by = [move % side for move, side in zip(shift, coarsest.shape, strict=True)]
        rolled = images.roll([move * side for move, side in zip(moved_by, view.coarsest_patch, strict=True)], dims)
        second = view.run(rolled)
        for layer, ((old, grid), (new, _)) in enumerate(zip(before, second.layers, strict=True)):
            sides = zip(moved_by, grid.shape, coarsest.shape, strict=True)
            step = tuple(move * side // coarse for move, side, coarse in sides)
            errors = (grid.to_map(new) - grid.to_map(old).roll(step, dims)).double().square().sum(1)
            spread = _spread(grid.split(old)[1].flatten(0, 1))
            border = _border(grid, step)
            for place, chosen in enumerate((errors[:, ~border], errors[:, border])):
                sums[layer, place] += float(chosen.mean(0).sum() / spread)
                counts[layer, place] += chosen.shape[1]
            if grid.prefix:
                still, now = grid.split(old)[0].flatten(1), grid.split(new)[0].flatten(1)
                prefix[layer] += float((now - still).double().square().sum(1).mean() / _spread(still))
        if logits is not None and second.logits is not None:
            change += float((second.logits - logits).double().square().sum(1).mean() / _spread(logits))
            flips += float((second.logits.argmax(1) != logits.argmax(1)).double().mean())
    with np.errstate(invalid="ignore"):
        inside, at_border = np.sqrt(sums / counts).T
    return Translation(
        grids=tuple(grid for _, grid in before),
        inside=inside,
        at_border=at_border,
        all_patches=np.sqrt(sums.sum(1) / counts.sum(1)),
        prefix=np.sqrt(prefix / len(shifts)),
        logits=float(np.sqrt(change / len(shifts))),
        flips=flips / len(shifts),
        shifts=tuple(shifts),
        images=len(images),
    )


def whole_patches(model: nn.Module, image: Size) -> Grid:
    """Return the coarsest grid of `image`, such as (height, width) in pixels, which must be whole patches of it.

    Raises:
        ValueError: if a side is not a multiple of the coarsest patch, so that the model would pad or crop it.
    """
    patch = view_of(model, image).coarsest_patch
    if any(np.mod(image, patch)):
        raise ValueError(
            f"`img_size` must be a multiple of the coarsest patch of {type(model).__name__}, {by(patch)} "
            f"pixels, to be shifted by whole patches, got {by(image)}."
        )
    return Grid(*(side // step for side, step in zip(image, patch, strict=True)))


def _spread(features: Tensor) -> Tensor:
    """Return the mean square distance of the rows of (n, D) from their mean: a scalar, positive to divide by it."""
    features = features.double()
    return (features - features.mean(0)).square().sum(1).mean().clamp_min(torch.finfo(torch.float64).tiny)


def _border(grid: Grid, step: Shift) -> Tensor:
    """Return whether each token of the shifted image is at an edge, after or before the shift, (H, W)."""
    at_edge = []
    for side, move in zip(grid.shape, step, strict=True):
        place = torch.arange(side)
        at_edge.append(torch.isin(torch.stack([place, (place - move) % side]), torch.tensor([0, side - 1])).any(0))
    return torch.stack(torch.meshgrid(*at_edge, indexing="ij")).any(0)
