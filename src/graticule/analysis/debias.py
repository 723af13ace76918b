"""Remove position from the features of a model, by a table or directions that are fitted in closed form."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.analysis.certificate import PlaceReader, certify
from graticule.analysis.share import ShareSums, additive_basis, check_images, different_images
from graticule.checkpoints.obstacles import check_intact
from graticule.external.debiased import FEATURES, Debiased, Eraser, Subtraction
from graticule.external.images import Size, image_channels
from graticule.external.traced_model import view_of
from graticule.position.grid import Grid
from graticule.registry.checks import checked
from graticule.registry.fields import Count, LayerIndex, Side

Method = Literal["mean", "rows_columns", "leace", "blank"]
METHODS: tuple[Method, ...] = ("mean", "rows_columns", "leace", "blank")

#: Every third image is held out for the certificate; the fewest images, and the folds that choose the components.
_HELD, _LEAST, _FOLDS = 3, 9, 4
#: Content-free images of each kind for 'blank': the level of the colors, and the number of noise images.
_LEVEL, _NOISES = 1.5, 8


@checked
def debias(
    model: nn.Module,
    images: Tensor | None = None,
    method: Method = "mean",
    components: int | None = None,
    layers: Sequence[LayerIndex] | None = None,
    *,
    labels: Tensor | None = None,
    img_size: tuple[Side, Side] | None = None,
    batch_size: Count = 16,
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
            patches, as in timm and transformers. It is measured in evaluation mode, and shared, not copied.
        images: preprocessed images (B, C, height, width) of a size that the model takes, at least nine that differ
            (repeated ones are left out, with a warning); the removal is for this size, and a table is resampled for
            others.
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
    if images is not None:
        chosen = different_images(images)
        images, labels = images[chosen], None if labels is None else labels[chosen]
        check_images(images, _LEAST)
    view = view_of(model, img_size or (None if images is None else tuple(images.shape[2:])))
    size = view.img_size
    grid = Grid(*view.grids(size)[-1].shape)
    patch = size[0] // grid.height, size[1] // grid.width
    names = [FEATURES, *map(str, layers or ())]
    left_out = torch.arange(0 if images is None else len(images)) % _HELD == _HELD - 1
    read = PlaceReader(model, size, [int(name) for name in names[1:]], grid, batch_size)
    fitted = None if images is None else read(images[~left_out])
    blank = read(_content_free(model, size)) if method == "blank" else None
    removals: dict[str, nn.Module] = {}
    for index, name in enumerate(names):
        patches, free = (None if parts is None else parts[index] for parts in (fitted, blank))
        if components is None and patches is not None:
            low = ShareSums(read.grids[index]).add(patches).shares()["total"].low
            if not low > 0:  # position explains no more of the variance than chance
                continue
        removal = _fit(method, patches, read.grids[index], components, free)
        if removal is not None:
            removals[name] = removal.to(next(model.parameters()).device, torch.float32)
    debiased = Debiased(model, patch, removals, method)
    debiased.removals.train(model.training)
    debiased.training = model.training  # its parts keep their own
    if images is not None:
        classes = None if labels is None else labels[left_out]
        certificate = certify(debiased, images[left_out], classes, batch_size)
        debiased.certificate = dataclasses.replace(certificate, total=len(images))
    return debiased


def _check(
    model: nn.Module, images: Tensor | None, method: str, components: int | None, labels: Tensor | None,
    img_size: Size | None,
) -> None:  # fmt: skip
    if isinstance(model, Debiased):
        raise ValueError("`model` must have its position in its features, got a debiased one; use model.backbone.")
    check_intact(model, "quantized")
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


def _content_free(model: nn.Module, size: Size) -> Tensor:
    """Return images without content, (n, C, height, width): colors, then noise of unit variance."""
    channels = image_channels(model)
    corners = list(itertools.product((-_LEVEL, _LEVEL), repeat=min(channels, 3)))
    colors = torch.zeros(len(corners) + 1, channels)
    colors[1:, : len(corners[0])] = torch.tensor(corners)
    noise = torch.randn(_NOISES, channels, *size, generator=torch.Generator().manual_seed(0))
    return torch.cat([colors[:, :, None, None].expand(-1, -1, *size), noise])


def effect_of(patches: Tensor) -> Tensor:
    """Return the effect of each position, (H * W, D): its mean over images (n, H * W, D) minus the mean of all."""
    mean = patches.double().mean(0)
    return mean - mean.mean(0)


def _folds(patches: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the images outside and inside of each fold, at least two each."""
    folds = min(_FOLDS, len(patches) // 2)
    index = torch.arange(len(patches)) % folds
    return [(patches[index != fold], patches[index == fold]) for fold in range(folds)]


def _fit(
    method: Method, patches: Tensor | None, grid: Grid, components: int | None, blank: Tensor | None
) -> nn.Module | None:
    """Fit a removal; None if no number of components explains anything on images that were not fitted."""
    if method == "blank":
        assert blank is not None
        basis = _principal(blank)
        count = components
        if count is None:
            count = _explaining(basis, blank) if patches is None else _worth([_shares_along(basis, patches.double())])
        return _eraser((blank if patches is None else patches).double().mean((0, 1)), basis, basis, count)
    assert patches is not None
    rank = components if method == "mean" and components is not None else _table_rank(method, patches, grid)
    if method != "leace":
        if rank is None:
            return None
        return Subtraction(_smooth(effect_of(patches), grid, rank).unflatten(0, grid.shape))
    white, color = _whitening(patches)
    whitened = patches.double() @ white
    if components is None:
        if rank is None:
            return None
        bases = [(_directions(fitted, grid, rank), other) for fitted, other in _folds(whitened)]
        components = _worth([_shares_along(basis, other) for basis, other in bases])
    basis = _directions(whitened, grid, rank or 0)
    return _eraser(patches.double().mean((0, 1)), white @ basis, color @ basis, components)


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
    return v[s > 1e-6 * s[0]].T


def _table_rank(method: Method, patches: Tensor, grid: Grid) -> int | None:
    """Return the rank of the smoothed effect that explains most on images that were not fitted; None if none does."""
    basis = additive_basis(grid)
    gains = []
    for fitted, other in _folds(patches):
        effect, truth = effect_of(fitted), effect_of(other)
        additive = basis @ (basis.T @ effect)
        gain = (additive * (2 * truth - additive)).sum()
        u, s, v = torch.linalg.svd(effect - additive, full_matrices=False)  # orthogonal to the additive part
        more = s * (2 * ((u.T @ truth) * v).sum(1) - s)
        gains.append(gain + F.pad(more.cumsum(0), (1, 0)))
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
    return position, content, torch.stack([variance.sum() for variance in variances(patches)])


def _worth(shares: Sequence[tuple[Tensor, Tensor, Tensor]]) -> int:
    """Return the number of directions that hold most of position's variance minus their share of content's.

    So a direction is worth removing where it holds a larger share of all position than of all content.
    """
    few = min(len(position) for position, _, _ in shares)
    position, content = (torch.stack([fold[index][:few] for fold in shares]).sum(0) for index in (0, 1))
    total = torch.stack([fold[2] for fold in shares]).sum(0)
    if total[0] <= 0:
        return 0
    return int(F.pad((position / total[0] - content / total[1]).cumsum(0), (1, 0)).argmax())


def _explaining(basis: Tensor, blank: Tensor) -> int:
    """Return the fewest directions that explain as much of other content-free images as any number does.

    As much is within one standard error over folds; there is no content to weigh it against.
    """
    gains = []
    for fitted, other in _folds(blank):
        first, second = effect_of(fitted) @ basis, effect_of(other) @ basis
        gains.append(F.pad((first * (2 * second - first)).sum(0).cumsum(0), (1, 0)))
    folds = torch.stack(gains)
    best = int(folds.mean(0).argmax())
    lost = folds[:, best : best + 1] - folds
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
    return torch.linalg.svd(torch.cat(effects), full_matrices=False)[2].T
