"""Remove position from the features of a model, and certify what is left of it and what is lost of content."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from graticule.analysis.probe import labels_of
from graticule.analysis.share import Estimate, ShareSums, additive_basis, check_images, mean_estimate
from graticule.external.debiased import FEATURES, Debiased, Eraser, Subtraction, layer_patches
from graticule.external.images import Size
from graticule.external.open_view import view_of
from graticule.external.view import evaluating, split_features, unpooled
from graticule.position.grid import Grid
from graticule.registry.checks import checked

Array = NDArray[np.float64]
Method = Literal["mean", "rows_columns", "leace", "blank"]
METHODS: tuple[Method, ...] = ("mean", "rows_columns", "leace", "blank")

#: Every third image is held out for the certificate; the fewest images, and the folds that choose the components.
_HELD, _LEAST, _FOLDS = 3, 9, 4
#: Neighbors of the probes, and the largest number of patches of an image among which they are searched.
_NEIGHBORS, _PATCHES = 10, 400
#: A match is correct within this share of the longer side of the grid (PCK@0.10), and at the nearest patch.
_TOLERANCE, _NEAREST = 0.1, 0.75
#: The side of a crop, as a share of the image.
_CROP = 0.75
#: Content-free images of each kind for 'blank': the level of the colors, and the number of noise images.
_LEVEL, _NOISES = 1.5, 8


@dataclass(frozen=True, eq=False)
class DebiasCertificate:
    """Report of a removal, measured on images that it was not fitted on; pairs are (before, after).

    Intervals are of 95 % over images. All numbers are of the model's features.

    method: the method.
    components: the number of directions that are removed ('leace', 'blank'), or of the low-rank part of the table that
        is subtracted, in addition to rows and columns ('mean'); None if nothing is removed.
    images: number of images.
    share: the share of the variance that position explains (`position_share`).
    place: R2 of row and column that are predicted by the mean place of the 10 nearest patches of other images (at
        most a quarter of them), in cosine; `place_chance` is that of random patches.
    match: the share of patches whose nearest patch in a shifted or cropped copy of their image is the true one (within
        a tenth of the longer side); `match_chance` is that of random patches, `match_change` is after minus before.
    content: the variance that position does not explain, after as a share of that before.
    labels: accuracy of the 10 nearest images, or patches of other images, of their labels; None without labels.
    """

    method: str
    components: int | None
    images: int
    share: tuple[Estimate, Estimate]
    place: tuple[Estimate, Estimate]
    place_chance: float
    match: tuple[Estimate, Estimate]
    match_change: Estimate
    match_chance: float
    content: Estimate
    labels: tuple[Estimate, Estimate] | None = None

    @property
    def nothing(self) -> bool:
        """True if there was nothing to remove."""
        return self.components is None

    def rows(self) -> list[tuple[str, ...]]:
        """Return rows for a table: a header, then every measure."""
        pairs = [
            ("share of position (%)", self.share, 100, "0"),
            ("place by neighbors (R2)", self.place, 1, f"{self.place_chance:.2f}"),
            ("true matches (%)", self.match, 100, f"{100 * self.match_chance:.1f}"),
        ]
        if self.labels is not None:
            pairs.append(("labels by neighbors (%)", self.labels, 100, ""))
        rows: list[tuple[str, ...]] = [("measure", "before", "after", "chance")]
        for name, (before, after), scale, chance in pairs:
            decimals = 1 if scale == 100 else 2
            rows.append((name, *(one.text(None, scale, decimals) for one in (before, after)), chance))
        return [*rows, ("content kept (%)", "100", self.content.text(), "")]

    def __str__(self) -> str:
        """Return the report as a table of text."""
        what = "nothing to remove" if self.nothing else f"{self.method}, {self.components} components"
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"{what}; {self.images} images, intervals of 95 %", *lines])

    def to_json(self) -> str:
        """Return the report as JSON."""

        def plain(value: Any) -> Any:
            if isinstance(value, Estimate):
                return {name: float(one) for name, one in value._asdict().items()}
            return [plain(one) for one in value] if isinstance(value, tuple) else value

        return json.dumps({name: plain(value) for name, value in vars(self).items()}, indent=1)


@checked
def debias(
    model: nn.Module,
    images: Tensor | None = None,
    method: Method = "mean",
    components: int | None = None,
    layers: Sequence[int] | None = None,
    *,
    labels: Tensor | None = None,
    img_size: tuple[int, int] | None = None,
    batch_size: int = 16,
) -> Debiased:
    """Return a model whose features have position removed; `certificate` says what is left of it, and what is lost.

    The methods, all in closed form, for the patches of the features:

    - 'mean' subtracts the mean of each position over images, smoothed to a function of the row, one of the column and
      a matrix of low rank. Content is shifted, not projected.
    - 'rows_columns' subtracts only the functions of row and column.
    - 'leace' removes directions from which position is read linearly, all positions as classes, with the smallest
      change of the features (LEACE; Belrose et al., 2023); their covariance is shrunk (OAS; Chen et al., 2010).
    - 'blank' projects out the principal directions of the effect of position on content-free images, of several colors
      and noise, as INSID3 (2026) does with one black image. It alone needs no images; without them there is no
      certificate.

    Two thirds of the images fit the removal, every third one is held out for the certificate. The number of components
    is the one that explains most of the effect of position on images that were not fitted; directions, which take
    content with them, are removed as long as they hold a larger share of position's variance than of content's. If
    position explains nothing beyond chance, nothing is removed.

    Args:
        model: one of our backbones, or another model whose blocks are found by structure and that returns features of
            patches, as those of timm and transformers. It is measured in evaluation mode, and shared, not copied.
        images: preprocessed images (B, C, height, width) of a size that the model takes, at least nine that differ;
            the removal is for this size, and a table is resampled for others.
        method: the method.
        components: number of components (see `DebiasCertificate.components`); by default chosen on held-out images.
        layers: indices of layers from whose patches position is removed as well, for `Debiased.layer_tokens`.
        labels: for the certificate: classes of the images (B,), or of their patches (B, H * W), -1 for unknown.
        img_size: (height, width) in pixels of the content-free images, without `images`.
        batch_size: images per forward pass.

    Raises:
        ValueError: if the images are too few, all alike or missing, or the model cannot be used.

    Example:
        >>> import graticule, torch
        >>> model = graticule.create_model("deit_tiny_patch16_224", depth=1, img_size=64, encoding="sinusoidal_2d")
        >>> clean = graticule.debias(model, torch.randn(12, 3, 64, 64), "rows_columns")
        >>> clean.certificate.share[1].value < clean.certificate.share[0].value
        True
    """
    _check(model, images, method, components, labels, img_size)
    size = img_size or (None if images is None else (images.shape[-2], images.shape[-1]))
    view = view_of(model, size)
    size = view.img_size
    grid = Grid(*view.grids(size)[-1].shape)
    patch = size[0] // grid.height, size[1] // grid.width
    names = [FEATURES, *map(str, layers or ())]
    held = torch.arange(0 if images is None else len(images)) % _HELD == _HELD - 1
    read = _Reader(model, size, [int(name) for name in names[1:]], grid, batch_size)
    fitted = None if images is None else read(images[~held])
    blank = read(_content_free(model, size)) if method == "blank" else None
    removals: dict[str, nn.Module] = {}
    for index, name in enumerate(names):
        given, free = (None if one is None else one[index] for one in (fitted, blank))
        if components is None and given is not None and _none(given, read.grids[index]):
            continue
        made = _fit(method, given, read.grids[index], components, free)
        if made is not None:
            removals[name] = made.to(next(model.parameters()).device, torch.float32)
    debiased = Debiased(model, patch, removals, method).train(model.training)
    if images is not None:
        debiased.certificate = certify(debiased, images[held], None if labels is None else labels[held], batch_size)
    return debiased


def _check(
    model: nn.Module, images: Tensor | None, method: str, components: int | None, labels: Tensor | None,
    img_size: Size | None,
) -> None:  # fmt: skip
    if isinstance(model, Debiased):
        raise ValueError("`model` must have its position in its features, got a debiased one; use model.backbone.")
    quantized = [type(one).__name__ for one in model.modules() if "quantized" in type(one).__module__]
    if quantized:
        raise ValueError(
            f"`model` must have weights in floating point, got a quantized one ({quantized[0]}); debias it first, and "
            "export the result as int8."
        )
    if images is None:
        if method != "blank":
            raise ValueError(f"`images` must be given for {method!r}, got none; only 'blank' works without any.")
        if labels is not None:
            raise ValueError("`labels` must be left out without `images`, whose classes they are.")
    else:
        check_images(images, _LEAST)
        if img_size is not None and tuple(img_size) != tuple(images.shape[-2:]):
            raise ValueError(f"`img_size` must be left out with `images`, whose size is used, got {img_size}.")
        if labels is not None and len(labels) != len(images):
            raise ValueError(f"`labels` must be one entry per image, {len(images)}, got {len(labels)}.")
    if components is not None:
        if method == "rows_columns":
            raise ValueError(f"`components` must be left out with 'rows_columns', which has none, got {components}.")
        if components < (method != "mean"):
            raise ValueError(f"`components` must be at least {int(method != 'mean')}, got {components}.")


class _Reader:
    """Reads the patches of the features and of chosen layers of images, (n, H * W, D) each, in float32 on the CPU."""

    def __init__(self, model: nn.Module, size: Size, layers: Sequence[int], grid: Grid, batch_size: int) -> None:
        self.model, self.size, self.layers, self.batch_size = model, size, layers, batch_size
        self.grids = [grid]
        if layers:
            depths = view_of(model, size).grids(size)
            if wrong := [layer for layer in layers if not 0 <= layer < len(depths)]:
                raise ValueError(f"`layers` must be from 0 to {len(depths) - 1}, got {wrong[0]}.")
            self.grids += [Grid(*depths[layer].shape) for layer in layers]

    def __call__(self, images: Tensor) -> list[Tensor]:
        weight = next(self.model.parameters())
        parts: list[list[Tensor]] = []
        with evaluating(self.model):
            for batch in images.split(self.batch_size):
                given = batch.to(weight.device, weight.dtype)
                try:
                    features = unpooled(self.model, given)
                except (AssertionError, RuntimeError) as error:  # raised by models for a wrong size
                    said = str(error).strip().partition("\n")[0]
                    raise ValueError(
                        f"`images` must have a size that the model takes, got {self.size[0]} x {self.size[1]}: {said}"
                    ) from error
                found = [split_features(features, self.grids[0])[1], *layer_patches(self.model, given, self.layers)]
                parts.append([one.float().cpu() for one in found])
        return [torch.cat(one) for one in zip(*parts, strict=True)]


def _content_free(model: nn.Module, size: Size) -> Tensor:
    """Return images without content, (n, C, height, width): colors, then noise of unit variance."""
    first = next((one for one in model.modules() if isinstance(one, nn.Conv2d)), None)
    channels = int(getattr(model, "in_chans", 0)) or (3 if first is None else first.in_channels)
    corners = list(itertools.product((-_LEVEL, _LEVEL), repeat=min(channels, 3)))
    colors = torch.zeros(len(corners) + 1, channels)
    colors[1:, : len(corners[0])] = torch.tensor(corners)
    noise = torch.randn(_NOISES, channels, *size, generator=torch.Generator().manual_seed(0))
    return torch.cat([colors[:, :, None, None].expand(-1, -1, *size), noise])


def effect_of(patches: Tensor) -> Tensor:
    """Return the effect of each position, (H * W, D): its mean over images (n, H * W, D) minus the mean of all."""
    mean = patches.double().mean(0)
    return mean - mean.mean(0)


def _none(patches: Tensor, grid: Grid) -> bool:
    """Return whether position explains no more of the variance than chance."""
    low = ShareSums(grid).add(patches).shares()["total"][1]
    return not low > 0


def _folds(patches: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the images outside and inside of each fold, at least two each."""
    folds = min(_FOLDS, len(patches) // 2)
    index = torch.arange(len(patches)) % folds
    return [(patches[index != fold], patches[index == fold]) for fold in range(folds)]


def _fit(
    method: Method, patches: Tensor | None, grid: Grid, components: int | None, blank: Tensor | None
) -> nn.Module | None:
    """Fit a removal; None if no number of components explains anything on images that were not fitted."""
    if patches is None:
        assert blank is not None
        basis = _principal(blank)
        count = _explaining(basis, blank) if components is None else components
        return _eraser(blank.double().mean((0, 1)), basis, basis, count)
    mean = patches.double().mean((0, 1))
    if method == "blank":
        assert blank is not None
        basis = _principal(blank)
        count = _worth([_shares_along(basis, patches.double())]) if components is None else components
        return _eraser(mean, basis, basis, count)
    rank = components if method == "mean" and components is not None else _table_rank(method, patches, grid)
    if method != "leace":
        keep = rank is not None
        return Subtraction(_smooth(effect_of(patches), grid, rank or 0).unflatten(0, grid.shape)) if keep else None
    white, color = _whitening(patches)
    whitened = patches.double() @ white
    if components is None:
        if rank is None:
            return None
        bases = [(_directions(fitted, grid, rank), other) for fitted, other in _folds(whitened)]
        components = _worth([_shares_along(basis, other) for basis, other in bases])
    basis = _directions(whitened, grid, rank or 0)
    return _eraser(mean, white @ basis, color @ basis, components)


def _eraser(mean: Tensor, read: Tensor, write: Tensor, count: int) -> Eraser | None:
    return Eraser(mean, read[:, :count], write[:, :count]) if count else None


def _smooth(effect: Tensor, grid: Grid, rank: int) -> Tensor:
    """Return the effect (H * W, D) as a function of the row, one of the column and a matrix of rank `rank`."""
    basis = additive_basis(grid)
    table = basis @ (basis.T @ effect)
    if rank:
        u, s, v = torch.linalg.svd(effect - table, full_matrices=False)
        table = table + (u[:, :rank] * s[:rank]) @ v[:rank]
    return table


def _directions(patches: Tensor, grid: Grid, rank: int) -> Tensor:
    """Return the principal directions (D, k) of the smoothed effect of position, with the largest first."""
    _, s, v = torch.linalg.svd(_smooth(effect_of(patches), grid, rank), full_matrices=False)
    kept: Tensor = v[s > 1e-6 * s[0]].T
    return kept


def _table_rank(method: Method, patches: Tensor, grid: Grid) -> int | None:
    """Return the rank of the smoothed effect that explains most on images that were not fitted; None if none does."""
    basis = additive_basis(grid)
    gains = []
    for fitted, other in _folds(patches):
        effect, truth = effect_of(fitted), effect_of(other)
        additive = basis @ (basis.T @ effect)
        gain = (additive * (2 * truth - additive)).sum()
        u, s, v = torch.linalg.svd(effect - additive, full_matrices=False)  # orthogonal to the additive part
        each = s * (2 * ((u.T @ truth) * v).sum(1) - s)
        gains.append(gain + F.pad(each.cumsum(0), (1, 0)))
    mean = torch.stack(gains).mean(0)
    best = 0 if method == "rows_columns" else int(mean.argmax())
    return best if mean[best] > 0 else None


def _shares_along(basis: Tensor, patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the variance of position and of content along each direction (k,), and in all directions, (2,).

    As in `position_share`, squares of means are products of different images.
    """
    n, count = patches.shape[:2]

    def variances(x: Tensor) -> tuple[Tensor, Tensor]:
        centered = x - x.mean(1, keepdim=True)
        products = centered.sum(0).square().sum(0) - centered.square().sum((0, 1))
        position = products / (n * (n - 1) * count)
        return position, x.var((0, 1), correction=0) - position

    position, content = variances(patches @ basis)
    whole = torch.stack([one.sum() for one in variances(patches)])
    return position, content, whole


def _worth(shares: Sequence[tuple[Tensor, Tensor, Tensor]]) -> int:
    """Return the number of directions that hold most of position's variance minus their share of content's.

    So a direction is worth removing where it holds a larger share of all position than of all content.
    """
    few = min(len(position) for position, _, _ in shares)
    position, content = (torch.stack([one[index][:few] for one in shares]).sum(0) for index in (0, 1))
    whole = torch.stack([one[2] for one in shares]).sum(0)
    if whole[0] <= 0:
        return 0
    return int(F.pad((position / whole[0] - content / whole[1]).cumsum(0), (1, 0)).argmax())


def _explaining(basis: Tensor, blank: Tensor) -> int:
    """Return the fewest directions that explain as much of other content-free images as any number does.

    As much is within one standard error over folds; there is no content to weigh it against.
    """
    gains = []
    for fitted, other in _folds(blank):
        first, second = effect_of(fitted) @ basis, effect_of(other) @ basis
        gains.append(F.pad((first * (2 * second - first)).sum(0).cumsum(0), (1, 0)))
    each = torch.stack(gains)
    best = int(each.mean(0).argmax())
    lost = each[:, best : best + 1] - each
    return int((lost.mean(0) <= lost.std(0) / len(gains) ** 0.5).nonzero()[0])


def _whitening(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square roots (D, D) of the inverse of the covariance and of the covariance, shrunk by OAS.

    Reference: Shrinkage Algorithms for MMSE Covariance Estimation (Chen et al., 2010), Eq. 23.
    """
    x = patches.double().flatten(0, 1)
    x = x - x.mean(0)
    count, dim = x.shape
    covariance = x.T @ x / count
    trace, squares = covariance.trace(), covariance.square().sum()
    top, bottom = (1 - 2 / dim) * squares + trace**2, (count + 1 - 2 / dim) * (squares - trace**2 / dim)
    shrink = float((top / bottom).clamp(max=1)) if bottom > 0 else 1.0
    values, vectors = torch.linalg.eigh((1 - shrink) * covariance)
    values = (values.clamp_min(0) + shrink * trace / dim).clamp_min(torch.finfo(torch.float64).tiny)
    return (vectors * values.rsqrt()) @ vectors.T, (vectors * values.sqrt()) @ vectors.T


def _principal(blank: Tensor) -> Tensor:
    """Return the principal directions (D, k) of the effects of position on content-free images.

    The effect of noise is averaged over its images.
    """
    colors = blank[:-_NOISES].double()
    effects = [*(colors - colors.mean(1, keepdim=True)), effect_of(blank[-_NOISES:])]
    directions: Tensor = torch.linalg.svd(torch.cat(effects), full_matrices=False)[2].T
    return directions


@checked
def certify(
    debiased: Debiased, images: Tensor, labels: Tensor | None = None, batch_size: int = 16
) -> DebiasCertificate:
    """Measure what is left of position, and what is lost of content, in the features of a debiased model.

    Args:
        debiased: the model.
        images: preprocessed images (B, C, height, width), at least three that differ; others than it was fitted on.
        labels: classes of the images (B,), or of their patches (B, H * W), -1 for unknown.
        batch_size: images per forward pass.

    Raises:
        ValueError: if the images cannot be used.
    """
    check_images(images, 3)
    grid = debiased.grid_of(images)
    size = (images.shape[-2], images.shape[-1])
    read = _Reader(debiased.backbone, size, [], grid, batch_size)
    removal = dict(debiased.removals.items()).get(FEATURES)

    def both(given: Tensor) -> tuple[Tensor, Tensor]:
        found = read(given)[0]
        if removal is None:
            return found, found
        device = next(debiased.parameters()).device
        with torch.no_grad():
            return found, removal(found.to(device), grid).float().cpu()

    before, after = both(images)
    shares = [ShareSums(grid).add(one) for one in (before, after)]
    totals = [one.shares()["total"] for one in shares]
    unexplained = [_content(one) for one in (before, after)]
    matches: list[list[Tensor]] = [[], []]
    chances = []
    for changed, place in _copies(images, grid):
        limit = max(_TOLERANCE * max(grid.shape), _NEAREST)
        near = torch.cdist(place, _places(grid)) <= limit
        chances.append(float(near.double().mean()))
        for found, whole, copied in zip(matches, (before, after), both(changed), strict=True):
            found.append(_matched(copied, whole, near))
    first, second = (torch.stack(one).mean(0).numpy() for one in matches)
    known = None
    if labels is not None:
        known = tuple(mean_estimate(_by_neighbors(one, labels)) for one in (before, after))
    method, components = debiased.method, None
    if isinstance(removal, Eraser):
        components = removal.read.shape[1]
    elif isinstance(removal, Subtraction):
        components = _rank(removal.table, grid)
    return DebiasCertificate(
        method=method,
        components=components,
        images=len(images),
        share=(Estimate(*totals[0]), Estimate(*totals[1])),
        place=(mean_estimate(_located(before, grid)), mean_estimate(_located(after, grid))),
        place_chance=-1 / _count((len(images) - 1) * grid.patches),
        match=(mean_estimate(first), mean_estimate(second)),
        match_change=mean_estimate(second - first),
        match_chance=float(np.mean(chances)),
        content=_ratio(*unexplained),
        labels=None if known is None else (known[0], known[1]),
    )


def _rank(table: Tensor, grid: Grid) -> int:
    """Return the rank of a table (H, W, D) after a function of the row and one of the column are subtracted."""
    if tuple(table.shape[:2]) != grid.shape:
        grid = Grid(table.shape[0], table.shape[1])
    basis = additive_basis(grid)
    flat = table.double().cpu().flatten(0, 1)
    rest = flat - basis @ (basis.T @ flat)
    values = torch.linalg.svdvals(rest - rest.mean(0))
    return int((values > 1e-5 * torch.linalg.svdvals(flat)[0]).sum())


def _content(patches: Tensor) -> Array:
    """Return the variance of each image that the mean of each position over the other images does not explain."""
    x = patches.double() - patches.double().mean(1, keepdim=True)
    n = len(x)
    others = (x.sum(0) - x) / (n - 1)
    found: Array = ((x - others).square().sum(-1).mean(-1) * (n - 1) / n).numpy()
    return found


def _ratio(before: Array, after: Array) -> Estimate:
    """Return the ratio of the means after and before of images (n,), by the delta method."""
    ratio = after.mean() / before.mean()
    value, low, high = mean_estimate((after - ratio * before) / before.mean())
    return Estimate(ratio + value, ratio + low, ratio + high)


def _places(grid: Grid) -> Tensor:
    return Grid(*grid.shape).coordinates().double()


def _copies(images: Tensor, grid: Grid) -> list[tuple[Tensor, Tensor]]:
    """Return shifted and cropped copies of images, and the place in the image of each patch of a copy, (H * W, 2).

    The shift is by a quarter of each side; what leaves on one side enters on the other. Crops are of two corners, of
    three quarters of the sides, enlarged to the size of the image.
    """
    height, width = images.shape[-2:]
    sides = torch.tensor(grid.shape, dtype=torch.float64)
    places = _places(grid)
    step = [side // 4 for side in grid.shape]
    pixels = [move * whole // side for move, whole, side in zip(step, (height, width), grid.shape, strict=True)]
    copies = [(images.roll(pixels, (-2, -1)), (places - torch.tensor(step)) % sides)]
    inner = round(height * _CROP), round(width * _CROP)
    shares = torch.tensor([inner[0] / height, inner[1] / width], dtype=torch.float64)
    for top, left in ((0, 0), (height - inner[0], width - inner[1])):
        part = images[..., top : top + inner[0], left : left + inner[1]]
        start = torch.tensor([top / height, left / width], dtype=torch.float64) * sides
        place = start + (places + 0.5) * shares - 0.5
        copies.append((F.interpolate(part, (height, width), mode="bilinear", antialias=True), place))
    return copies


def _matched(copies: Tensor, whole: Tensor, near: Tensor) -> Tensor:
    """Return the share of the patches of each copy whose nearest patch in its image is one of `near`, (n,)."""
    similarity = F.normalize(copies, dim=-1) @ F.normalize(whole, dim=-1).mT
    found: Tensor = near[torch.arange(len(near)), similarity.argmax(-1)].double().mean(-1)
    return found


def _count(others: int) -> int:
    return max(1, min(_NEIGHBORS, others // 4))


def _neighbors(patches: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return the chosen patches, (m,), and for each image the images and patches of their nearest in other images.

    Images and indices among the chosen patches are (m, k) each.
    """
    step = -(-patches.shape[1] // _PATCHES)
    step += step > 1 and step % 2 == 0  # so that not all chosen patches are in the same columns
    chosen = torch.arange(0, patches.shape[1], step)
    unit = F.normalize(patches[:, chosen], dim=-1)
    n, m = unit.shape[:2]
    flat = unit.flatten(0, 1)
    found = []
    for index, one in enumerate(unit):
        similarity = one @ flat.T
        similarity[:, index * m : (index + 1) * m] = -torch.inf
        nearest = similarity.topk(_count((n - 1) * m), 1).indices
        found.append((nearest // m, nearest % m))
    return chosen, found


def _located(patches: Tensor, grid: Grid) -> Array:
    """Return R2 of the places that the nearest patches of other images predict, of each image, (n,)."""
    labels = labels_of(grid)
    labels = labels[:, labels.abs().sum(0) > 0]
    chosen, nearest = _neighbors(patches)
    truth = labels[chosen]
    spread = (truth - truth.mean(0)).square().mean(0)
    errors = [(truth[other].mean(1) - truth).square().mean(0) for _, other in nearest]
    return np.array([float((1 - error / spread).mean()) for error in errors])


def _by_neighbors(patches: Tensor, labels: Tensor) -> Array:
    """Return the accuracy of the labels that most of the nearest have, of each image, (n,)."""
    if labels.ndim == 1:
        patches, labels = patches.mean(1, keepdim=True), labels[:, None]
    if labels.shape != patches.shape[:2]:
        raise ValueError(f"`labels` must be (B,) or (B, {patches.shape[1]}), one per patch, got {tuple(labels.shape)}.")
    chosen, nearest = _neighbors(patches)
    known = labels[:, chosen].long()
    classes = int(known.max()) + 1
    right = []
    for own, (image, patch) in zip(known, nearest, strict=True):
        votes = F.one_hot(known[image, patch].clamp_min(-1) + 1, classes + 1).sum(1)[:, 1:]
        counted = own >= 0
        right.append(float((votes.argmax(1) == own)[counted].double().mean()) if counted.any() else float("nan"))
    return np.array(right)
