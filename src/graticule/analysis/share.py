r"""Share of the variance of a model's tokens that position alone explains, by layer.

With :math:`x_{ip}` the token of image i at patch p, :math:`m_i` the mean over the patches of an image and
:math:`z_{ip} = x_{ip} - m_i`,

.. math:: \text{share} = \frac{\frac{1}{N} \sum_p \|E_i\, z_{ip}\|^2}{\frac{1}{N} \sum_p E_i\, \|x_{ip} - E\, x\|^2}

The squared norm of a mean is estimated by the products of different images, :math:`\|E z\|^2 = E \langle z_i, z_j
\rangle` for :math:`i \ne j`, so a model without position has the share 0 in expectation, however few the images are.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import binomtest
from scipy.stats import t as student
from torch import Tensor, nn

from graticule.analysis.effect import resize_images
from graticule.analysis.probe import labels_of
from graticule.analysis.similarity import Array
from graticule.external.images import Size
from graticule.external.traced_model import view_of
from graticule.external.view import ModelView, Unavailable
from graticule.position.grid import Grid
from graticule.registry.checks import TENSORS, check_tensor, checked
from graticule.registry.fields import Count
from graticule.system.tables import PrintedTable

#: The largest number of groups of images that are left out one at a time for the intervals.
GROUPS = 16
#: A token is an outlier if its norm is above this multiple of the median norm.
_OUTLIER = 3.0
#: The largest number of patches of an image between which similarities are computed.
_PAIRED = 400


class Estimate(NamedTuple):
    """Values with the limits of their 95 % intervals; arrays with an entry per layer, or numbers."""

    value: Any
    low: Any
    high: Any

    def text(self, index: int | None = None, scale: float = 100, decimals: int = 1) -> str:
        """Return a value with its interval as text, in percent by default."""
        value, low, high = (scale * float(part if index is None else part[index]) for part in self)
        if np.isnan(value):
            return "-"
        return f"{value:.{decimals}f} [{low:.{decimals}f}, {high:.{decimals}f}]"


def mean_estimate(values: Array) -> Estimate:
    """Return the mean of values of images (..., n), with intervals of Student's t; NaN for one image."""
    mean, count = values.mean(-1), values.shape[-1]
    margin = student.ppf(0.975, count - 1) * values.std(-1, ddof=1) / np.sqrt(count) if count > 1 else np.nan
    return Estimate(mean, mean - margin, mean + margin)


def proportion_estimate(right: Array) -> Estimate:
    """Return the mean of values of images that are right or wrong, or of shares, (n,), with limits within 0 and 1.

    The interval is Wilson's, or for shares Student's t, cut at 0 and 1.

    Reference: Probable Inference, the Law of Succession, and Statistical Inference (Wilson, 1927).
    """
    if np.isin(right, (0, 1)).all():
        low, high = binomtest(int(right.sum()), len(right)).proportion_ci(0.95, method="wilson")
        return Estimate(right.mean(), low, high)
    mean, *limits = mean_estimate(right)
    return Estimate(mean, *np.clip(limits, 0, 1))


@dataclass(frozen=True, eq=False, repr=False)
class PositionShare(PrintedTable):
    """Shares of the variance of the tokens of patches; an entry per layer, and the last for the features, if known.

    Intervals are of 95 %: for `total`, `linear`, `additive` and `rest` by the jackknife over (groups of) images, with
    Student's t, which is too wide where there is no position; for `decay` by the standard error over images.

    total: the share that position explains: the mean of each position over images.
    linear: the part of it that is linear in row and column, or in all coordinates.
    additive: the part of it that is a function of the row plus a function of the column; it includes `linear`.
    rest: `total` minus `linear`.
    decay: SSDC, the correlation of the cosine similarity of two patches of an image with minus their distance, mean
        over images: 1 if similarity falls linearly with distance.
    outliers: the share of tokens whose norm is above 3 times the median norm of the layer.
    largest: the largest norm as a multiple of the median norm.
    features: whether the last entry is of the features (after the final norm), and not of a layer.
    others: the same at other sizes.
    """

    img_size: Size
    images: int
    total: Estimate
    linear: Estimate
    additive: Estimate
    rest: Estimate
    decay: Estimate
    outliers: Array
    largest: Array
    features: bool
    others: dict[Size, PositionShare] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of the entries: layers from 0, and 'features'."""
        layers = len(self.outliers) - self.features
        return [*map(str, range(layers)), *(["features"] if self.features else [])]

    @property
    def heading(self) -> str:
        return f"{self.images} images of {' x '.join(map(str, self.img_size))}; shares in %, with intervals of 95 %"

    def summary(self) -> list[tuple[str, ...]]:
        """Return rows for a table: a header, then every entry; shares in percent with intervals."""
        rows: list[tuple[str, ...]] = [("layer", "position", "linear", "additive", "SSDC", "outliers", "max norm")]
        for index, name in enumerate(self.names):
            shares = [share.text(index) for share in (self.total, self.linear, self.additive)]
            norms = f"{100 * self.outliers[index]:.2f}", f"{self.largest[index]:.1f}"
            rows.append((name, *shares, self.decay.text(index, 1, 2), *norms))
        return rows


class ShareSums:
    """Sums over images from which the shares of one layer are computed; images are added batch by batch.

    Image i belongs to group i modulo `GROUPS`.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.bases = {"linear": linear_basis(grid), "additive": additive_basis(grid)}
        self.images = 0
        self.count = torch.zeros(GROUPS, dtype=torch.float64)
        self.squares = torch.zeros(GROUPS, 4, dtype=torch.float64)  # of z, in both bases, and of the means
        self.shift = self.positions = self.means = torch.empty(0)
        self.decay: list[Tensor] = []
        self.norms: list[Tensor] = []

    def add(self, patches: Tensor) -> Self:
        """Add the patches (B, H * W, D) of further images."""
        x = patches.detach().cpu()
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if not self.images:
            self.shift = x[0].mean(0)  # near the mean, so that no variance is a rounding error
            self.positions = x.new_zeros(GROUPS, *x.shape[1:])
            self.means = x.new_zeros(GROUPS, x.shape[-1])
        self.decay.append(spatial_decay(x, self.grid))
        self.norms.append(x.norm(dim=-1).flatten())
        if not self.norms[-1].isfinite().all():
            raise ValueError("`images` must be normalized, got values for which the model's tokens are not finite.")
        means = x.mean(1) - self.shift
        centered = x - x.mean(1, keepdim=True)
        projected = [basis.to(x).T @ centered for basis in self.bases.values()]
        squares = [part.double().square().flatten(1).sum(1) for part in (centered, *projected, means[:, None])]
        group = (torch.arange(len(x)) + self.images) % GROUPS
        self.count.index_add_(0, group, torch.ones(len(x), dtype=torch.float64))
        self.squares.index_add_(0, group, torch.stack(squares, 1))
        self.positions.index_add_(0, group, centered)
        self.means.index_add_(0, group, means)
        self.images += len(x)
        return self

    def shares(self) -> dict[str, Estimate]:
        used = self.count > 0
        count, squares, sums = self.count[used], self.squares[used], self.positions[used].double()
        parts = [sums, *(basis.T @ sums for basis in self.bases.values()), self.means[used].double()[:, None]]
        products = [part.flatten(1) @ part.flatten(1).T for part in parts]  # between groups
        groups, patches = torch.arange(len(count)), self.grid.patches

        def ratios(chosen: Tensor) -> Array:
            """Return the four shares of the images of some groups."""
            n, same = count[chosen].sum(), squares[chosen].sum(0)
            both = torch.stack([product[chosen][:, chosen].sum() for product in products])
            between = (both - same) / (n * (n - 1))  # E <z_i, z_j> over different images
            variance = same[0] / (n * patches) + same[3] / n - between[3]
            total, linear, additive = (between[:3] / patches / variance).tolist()
            return np.array([total, linear, additive, total - linear])

        without = np.stack([ratios(groups != group) for group in groups])
        spread = (len(groups) - 1) / len(groups) * ((without - without.mean(0)) ** 2).sum(0)
        margin = student.ppf(0.975, len(groups) - 1) * np.sqrt(spread)
        values = zip(
            ("total", "linear", "additive", "rest"), ratios(groups >= 0).tolist(), margin.tolist(), strict=True
        )
        return {name: Estimate(value, value - error, value + error) for name, value, error in values}


def linear_basis(grid: Grid) -> Tensor:
    """Return an orthonormal basis of the linear functions of the coordinates without a mean, (H * W, k)."""
    labels = labels_of(grid)
    labels = labels[:, labels.abs().sum(0) > 0]
    return labels / labels.norm(dim=0)


def additive_basis(grid: Grid) -> Tensor:
    """Return an orthonormal basis of f(row) + g(column) without a mean, (H * W, H + W - 2), or of more axes."""
    parts = []
    for axis, side in enumerate(grid.shape):
        shape = [1] * len(grid.shape)
        shape[axis] = side
        centered = torch.eye(side, dtype=torch.float64) - 1 / side
        basis = torch.linalg.svd(centered)[0][:, : side - 1]  # of the vectors that sum to zero
        values = basis.mT.reshape(-1, *shape).expand(-1, *grid.shape).flatten(1)
        parts.append(values / (grid.patches / side) ** 0.5)
    return torch.cat(parts).mT


def spatial_decay(patches: Tensor, grid: Grid) -> Tensor:
    """Return the SSDC of each image, (B,), from its patches (B, H * W, D).

    It is Pearson's correlation over all pairs of patches; of large grids, evenly spaced patches are used.

    Reference: Positional Encodings Anchor Spatial Structure in Vision Transformers (Mannes, 2026), which names the
    correlation of similarity and distance; the sign here is positive if near patches are similar.
    """
    step = -(-grid.patches // _PAIRED)
    step += step > 1 and grid.shape[-1] % step == 0  # so that not all chosen patches are in the same columns
    chosen = torch.arange(0, grid.patches, step)
    unit = F.normalize(patches[:, chosen].double(), dim=-1)
    places = Grid(*grid.shape).coordinates().double()[chosen]
    pairs = torch.triu_indices(len(chosen), len(chosen), 1)
    nearness = -torch.cdist(places, places)[pairs[0], pairs[1]]
    nearness = nearness - nearness.mean()
    correlations = []
    for image in unit:
        similarity = (image @ image.T)[pairs[0], pairs[1]]
        similarity = similarity - similarity.mean()
        scale = similarity.norm() * nearness.norm()
        correlations.append((similarity @ nearness) / scale if scale > 1e-12 else similarity.new_tensor(torch.nan))
    return torch.stack(correlations)


class LayerShares:
    """Sums of every layer and of the features of one view, from which a `PositionShare` is computed."""

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self.sums: list[ShareSums] = []
        self.features = True

    def add(self, images: Tensor, layers: Sequence[tuple[Tensor, Grid]]) -> Self:
        """Add images (B, C, height, width) and the tokens that `view.run` returned for them."""
        patches = [grid.split(tokens)[1] for tokens, grid in layers]
        try:
            patches.append(self.view.features(images, layers))
        except Unavailable:
            self.features = False
        if not self.sums:
            grids = [Grid(*grid.shape) for _, grid in layers]
            self.sums = [ShareSums(grid) for grid in (*grids, grids[-1])[: len(patches)]]
        for sums, x in zip(self.sums, patches, strict=True):
            sums.add(x)
        return self

    def share(self) -> PositionShare:
        layers = [sums.shares() for sums in self.sums]
        shares: dict[str, Any] = {name: Estimate(*np.array([layer[name] for layer in layers]).T) for name in layers[0]}
        norms = [torch.cat(sums.norms).double() for sums in self.sums]
        relative = [norm / norm.median().clamp_min(torch.finfo(torch.float64).tiny) for norm in norms]
        return PositionShare(
            img_size=self.view.img_size,
            images=self.sums[0].images,
            **shares,
            decay=mean_estimate(np.stack([torch.cat(sums.decay).numpy() for sums in self.sums])),
            outliers=np.array([float((norm > _OUTLIER).double().mean()) for norm in relative]),
            largest=np.array([float(norm.max()) for norm in relative]),
            features=self.features,
        )


def check_images(images: Tensor, least: int = 2, videos: bool = False) -> None:
    """Check images from which position and content are told apart: several that differ; or videos, if they may be."""
    check_tensor("images", images)
    if images.ndim not in (4, 4 + videos) or len(images) < least or not images.is_floating_point():
        hint = f"; {TENSORS}" * (not images.is_floating_point())
        raise ValueError(
            f"`images` must be preprocessed images (B, C, height, width) in floating point, with B at least {least}"
            f"{', or videos with a depth before the height' * videos}, got {images.dtype} {tuple(images.shape)}{hint}."
        )
    if not images.isfinite().all():
        raise ValueError("`images` must be finite, got NaN or infinity.")
    if (images == images[:1]).all():
        raise ValueError(
            f"`images` must differ, to tell position from content, got the same image {len(images)} times."
        )


def different_images(images: Tensor) -> list[int]:
    """Return the indices of the images without repeats, which tell nothing more; a warning says how many differ."""
    values = images.detach().cpu().contiguous()
    first: dict[str, int] = {}
    for index, image in enumerate(values):
        first.setdefault(hashlib.sha256(image.view(torch.uint8).numpy().tobytes()).hexdigest(), index)
    if len(first) < len(images):
        warnings.warn(f"{len(first)} of the {len(images)} images differ; the others are left out.", stacklevel=4)
    return list(first.values())


@checked
def position_share(
    model: nn.Module,
    images: Tensor,
    sizes: Sequence[tuple[int, ...]] | None = None,
    *,
    batch_size: Count = 16,
    progress: Callable[..., Any] | None = None,
) -> PositionShare:
    """Measure the share of the variance of each layer's tokens, and of the features, that position alone explains.

    The model is not changed, and is measured in evaluation mode.

    Args:
        model: one of our backbones, or another model of images, as of timm or transformers.
        images: preprocessed images (B, C, height, width), at least two that differ, or videos with a depth. Repeated
            images are left out, with a warning.
        sizes: further (height, width) in pixels, to which the images are resized; see `PositionShare.others`.
        batch_size: images per forward pass.
        progress: class of the progress bar, such as tqdm (default: none).

    Raises:
        ValueError: if the images or sizes cannot be used.

    Example:
        >>> import graticule, torch
        >>> model = graticule.create_model("deit_tiny_patch16_224", depth=2, img_size=64)
        >>> share = graticule.position_share(model, torch.randn(4, 3, 64, 64))
        >>> share.names, bool(share.total.value[-1] > 0)
        (['0', '1', 'features'], True)
    """
    check_images(images, videos=True)
    images = images[different_images(images)]
    size = tuple(images.shape[2:])
    base = view_of(model, size)
    others = [other for other in dict.fromkeys(map(tuple, sizes or ())) if other != size]
    views = [base, *(base.resized_to(other) for other in others)]
    bar = None if progress is None else progress(total=len(views) * len(images), unit="img")
    shares = []
    for view in views:
        sums = LayerShares(view)
        for batch in images.split(batch_size):
            resized = batch if view is base else resize_images(batch, view.img_size)
            sums.add(resized, view.run(resized).layers)
            if bar is not None:
                bar.update(len(batch))
        shares.append(sums.share())
    if bar is not None:
        bar.close()
    shares[0].others.update(zip(others, shares[1:], strict=True))
    return shares[0]
