r"""Resampling of the tables of a grid: one small matrix per axis, whose rows sum to one.

.. math:: T' = R\, T\, C^\top, \quad R: (H', H), \quad C: (W', W)

for an image; on more axes, or on one, each axis is multiplied by its matrix.

So resampling is linear, differentiable and separable, and it is exported as matrix products. A `resampler` is a name
with options, such as 'bicubic(antialias=False)'.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
import scipy
import torch
from torch import Tensor

from graticule.registry.checks import Checked
from graticule.registry.registry import Registry, options_of
from graticule.registry.specs import Spec
from graticule.system.symbolic import as_tensor, is_statically_true

Size = tuple[int, ...]


class Resampler(Checked, ABC):
    """Resamples maps (..., H, W), one row and column per patch, or per displacement of two patches.

    A map of displacements has odd sides, and displacement 0 in its center. Subclasses return the matrix of an axis, or
    both matrices if one axis depends on the other. The parameters of the constructor are the options; each is an
    attribute of the same name.
    """

    #: The tables that it can resample: of positions, of displacements, or both.
    takes: ClassVar[frozenset[str]] = frozenset({"positions", "displacements"})

    @abstractmethod
    def weights(self, old: int, new: int, device: torch.device | None = None) -> Tensor:
        """Return the matrix from an axis of `old` entries to one of `new`, (new, old), float64; rows sum to one."""

    def matrices(self, old: Size, new: Size, device: torch.device | None = None) -> tuple[Tensor, ...]:
        """Return the matrix of each axis, (H', H) and (W', W) for an image, float64."""
        if len(old) != len(new):
            raise ValueError(
                f"`grid` must have {len(old)} axes, as many as the table that is resampled for it, got {len(new)}."
            )
        return tuple(self.weights(n, m, device) for n, m in zip(old, new, strict=True))

    def __call__(self, image: Tensor, size: Size) -> Tensor:
        """Resample (..., H, W) to (..., H', W'), in float32 (in float64 if the map is); unchanged at its own size.

        As many axes are resampled as `size` has, the last ones.
        """
        old = tuple(image.shape[-len(size) :])
        if all(is_statically_true(a == b) for a, b in zip(old, size, strict=True)):
            return image
        wide = image.to(torch.promote_types(image.dtype, torch.float32))
        *first, last = (matrix.to(wide.dtype) for matrix in self.matrices(old, size, image.device))
        for axis, matrix in enumerate(first, -len(size)):
            wide = (matrix @ wide.movedim(axis, -2)).movedim(-2, axis)
        return (wide @ last.mT).to(image.dtype)

    @classmethod
    def options(cls, **options: object) -> Spec:
        """Return the spec of this resampler with options.

        Raises:
            ValueError: if the class is not registered, or has no such option.
        """
        return RESAMPLERS.spec_of(cls, options)

    def __str__(self) -> str:
        """Return its name, with the options that differ from the defaults."""
        name = RESAMPLERS.name_of(type(self)) or type(self).__name__
        known = RESAMPLERS.options(name) if name in RESAMPLERS else {}
        values = {option: getattr(self, option) for option in known}
        return str(Spec(name, {option: value for option, value in values.items() if value != known[option].default}))


#: The resamplers by name.
RESAMPLERS: Registry[type[Resampler]] = Registry(
    "resampler", Resampler, lambda cls: options_of(cls.__init__, frozenset({"self"}))
)
register_resampler = RESAMPLERS.register


def build_resampler(resampler: str | Spec, table: Literal["positions", "displacements"] = "positions") -> Resampler:
    """Build the resampler that `resampler` names, such as 'bicubic(antialias=False)'.

    Raises:
        ValueError: for an unknown name or option, or one that cannot resample tables of `table`.
    """
    spec, *more = RESAMPLERS.specs(resampler)
    if more:
        raise ValueError(f"`resampler` must be one resampler, got {resampler!s}.")
    kind = RESAMPLERS[spec.name]
    if table not in kind.takes:
        known = ", ".join(name for name, resampler_class in RESAMPLERS.items() if table in resampler_class.takes)
        raise ValueError(f"`resampler` must be one for tables of {table}, {known}; got {spec.name!r}.")
    return kind(**spec.options)


class _Filter(Resampler):
    """A filter of finite support, as in `torch.nn.functional.interpolate`.

    Args:
        antialias: widen the filter to the new spacing if the new axis is shorter.
        align_corners: align the centers of the first and last entries instead of the borders of the axis.
        offset: added to the new length in the spacing, n / (m + offset), as in DINOv2's code (0.1); usually 0.
    """

    #: Half the width of the filter.
    support: ClassVar[int]

    def __init__(self, antialias: bool = True, align_corners: bool = False, offset: float = 0.0) -> None:
        if offset and align_corners:
            raise ValueError(f"`offset` must be 0 with `align_corners`, whose spacing ignores it, got {offset}.")
        if offset < 0:
            raise ValueError(f"`offset` must be at least 0, got {offset}.")
        self.antialias, self.align_corners, self.offset = antialias, align_corners, offset

    @staticmethod
    @abstractmethod
    def filter(distance: Tensor, antialias: bool) -> Tensor:
        """Return the filter at a distance of at least 0, in entries; 0 from `support` on."""

    def weights(self, old: int, new: int, device: torch.device | None = None) -> Tensor:
        """Return the matrix from an axis of `old` entries to one of `new`, (new, old), float64."""
        spacing = old / (new + self.offset)
        if self.align_corners:
            spacing = (old - 1) / (new - 1) if new > 1 else 0.0
        index = torch.arange(new, device=device, dtype=torch.float64)
        if not self.antialias:
            center = spacing * index if self.align_corners else spacing * (index + 0.5) - 0.5
            return self.at(center, old)
        # PyTorch computes the centers of the antialiased filter like this, also with aligned corners
        center = spacing * (index + 0.5) - 0.5
        entries = torch.arange(old, device=device, dtype=torch.float64)
        width: Any = torch.sym_max(spacing, 1.0)
        weights = self.filter((entries - center[:, None]).abs() / width, antialias=True)
        weights = weights / weights.sum(1, keepdim=True)
        # PyTorch skips an axis of the same length, only with antialias
        return _kept_if(as_tensor([new], entries) == old, weights) if self.offset else weights

    def matrices(self, old: Size, new: Size, device: torch.device | None = None) -> tuple[Tensor, ...]:
        """Return the matrix of each axis, (H', H) and (W', W) for an image, float64; identities at the same size."""
        matrices = super().matrices(old, new, device)
        if not self.offset:
            return matrices
        same = (
            as_tensor(new, matrices[0]) == as_tensor(old, matrices[0])
        ).all()  # a program for any size compares at run time
        return tuple(_kept_if(same, matrix) for matrix in matrices)

    def at(self, center: Tensor, old: int) -> Tensor:
        """Return the matrix that samples an axis of `old` entries at `center` (m,), in entries from 0, (m, old).

        Beyond the ends, the entries at the ends are repeated.
        """
        taps = torch.arange(1 - self.support, self.support + 1, device=center.device)
        index = center.floor()[:, None] + taps  # (m, taps)
        weights = self.filter((index - center[:, None]).abs(), antialias=False)
        entries = torch.arange(old, device=center.device)
        return (weights[..., None] * (index.clamp(0, old - 1)[..., None] == entries)).sum(1)


@register_resampler("bicubic")
class Bicubic(_Filter):
    r"""Cubic convolution: a = -1/2 with antialias, as timm resamples position embeddings, and a = -3/4 without.

    .. math:: f(t) = \begin{cases} (a + 2) t^3 - (a + 3) t^2 + 1 & t \le 1 \\
              a t^3 - 5 a t^2 + 8 a t - 4 a & 1 < t < 2 \end{cases}

    Reference: Cubic Convolution Interpolation for Digital Image Processing (Keys, 1981).
    """

    support = 2

    @staticmethod
    def filter(distance: Tensor, antialias: bool) -> Tensor:
        a, t = (-0.5 if antialias else -0.75), distance
        near = ((a + 2) * t - (a + 3)) * t * t + 1
        far = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
        return near.where(t <= 1, far.where(t < 2, 0.0))


#: The default resampling of tables for another grid: as in timm.
BICUBIC = Bicubic()


def resize_rows(rows: Tensor, old: Size, new: Size, resampler: Resampler = BICUBIC) -> Tensor:
    """Resample maps of patches, (T, N) -> (T, N')."""
    return resampler(rows.unflatten(1, old), new).flatten(1)


@register_resampler("bilinear")
class Bilinear(_Filter):
    """Linear interpolation per axis; with antialias, a triangle as wide as two new entries."""

    support = 1

    @staticmethod
    def filter(distance: Tensor, antialias: bool) -> Tensor:
        return (1 - distance).clamp(min=0)


@register_resampler("area")
class Area(Resampler):
    """Adaptive average pooling: the mean of the old entries that a new one overlaps; a larger axis repeats entries."""

    def weights(self, old: int, new: int, device: torch.device | None = None) -> Tensor:
        index, entry = torch.arange(new, device=device)[:, None], torch.arange(old, device=device)
        inside = (entry >= index * old // new) & (entry * new < (index + 1) * old)
        weights = inside.double()
        return weights / weights.sum(1, keepdim=True)


@register_resampler("crop")
class CropResampler(Resampler):
    """Keeps the aspect ratio of patches: scales the table to cover the new grid, and crops it at the top left.

    For a square table that is the aspect-preserving option of timm's NaFlexVit: resampled to a square of the longer
    side, then cropped. If the new grid has the aspect ratio of the table, it equals `mode`.

    Args:
        mode: the interpolation between old entries.
        antialias: as for 'bicubic' and 'bilinear'.
    """

    takes = frozenset({"positions"})

    def __init__(self, mode: Literal["bilinear", "bicubic"] = "bicubic", antialias: bool = True) -> None:
        self.mode, self.antialias = mode, antialias
        self.inner = {"bicubic": Bicubic, "bilinear": Bilinear}[mode](antialias)

    def weights(self, old: int, new: int, device: torch.device | None = None) -> Tensor:
        """Return the matrix of an axis if both axes are scaled by the same factor, (new, old), float64."""
        return self.inner.weights(old, new, device)

    def matrices(self, old: Size, new: Size, device: torch.device | None = None) -> tuple[Tensor, ...]:
        """Return the first H' and W' rows of the matrices of the covering size, (H', H) and (W', W), float64."""
        pairs = list(zip(old, new, strict=True))
        covering = [max(-(-n * longer // side) for side, longer in pairs) for n in old]
        return tuple(self.weights(n, c, device)[:m] for n, c, m in zip(old, covering, new, strict=True))


@register_resampler("tiled")
class Tiled(Resampler):
    r"""Repeats the table from the top left on; a smaller grid gets its top left part.

    .. math:: T'_{y, x} = T_{y \bmod H,\; x \bmod W}

    Nothing is interpolated, so each patch has the position that it has in training within its window of H x W patches.

    Reference: SAM 3 (Carion et al., 2025), whose table of 24 x 24 patches is repeated over 72 x 72.
    """

    takes = frozenset({"positions"})

    def weights(self, old: int, new: int, device: torch.device | None = None) -> Tensor:
        index, entry = torch.arange(new, device=device)[:, None], torch.arange(old, device=device)
        return (index % old == entry).double()


@register_resampler("clamped")
class Clamped(Resampler):
    """Keeps the value of every displacement in patches; displacements beyond the table have the value of its border."""

    takes = frozenset({"displacements"})

    def weights(self, old: int, new: int, device: torch.device | None = None) -> Tensor:
        index = torch.arange(new, device=device)[:, None] - new // 2 + old // 2
        return (index.clamp(0, old - 1) == torch.arange(old, device=device)).double()


@register_resampler("geometric")
class Geometric(Resampler):
    r"""A spline through knots in a geometric series, as BEiT's fine-tuning resamples relative position biases.

    .. math:: x_k = \sum_{i < k} q^i, \quad x_R = R'

    for the displacement k of R, so that small displacements hardly move. q is found by bisection in [1.01, 1.5], as in
    its code, and is the value of the last step; so at smaller sizes the outer displacements are dropped. Beyond the
    outer knots the values are constant. Interpolation is by a cubic spline ('not a knot') or piecewise linear.

    Reference: BEiT (Bao et al., 2022), released code.
    """

    takes = frozenset({"displacements"})

    def __init__(self, mode: Literal["cubic", "linear"] = "cubic") -> None:
        self.mode = mode

    def knots(self, old: int, new: int) -> list[float]:
        """Return the knots of the displacements 1, ..., `old` of an old axis on a new one, at most `new`."""
        left, right, q = 1.01, 1.5, 1.0
        while right - left > 1e-6:
            q = (left + right) / 2
            left, right = (left, q) if (q**old - 1) / (q - 1) > new else (q, right)
        return [sum(q**i for i in range(k)) for k in range(1, old + 1)]

    def weights(self, old: int, new: int, device: torch.device | None = None) -> Tensor:
        """Return the matrix from an axis of `old` displacements to one of `new`, both odd, (new, old), float64."""
        if not (old % 2 and new % 2):
            raise ValueError(f"`table` must have odd sides, one entry per displacement, got {old} for {new}.")
        if isinstance(new, torch.SymInt):
            raise ValueError(
                "`resampler` must not be 'geometric' in a program for images of any size: its knots and spline are "
                "computed for a fixed size; use 'bicubic' or 'bilinear', or export for a fixed size."
            )
        if old == new:
            return torch.eye(old, device=device, dtype=torch.float64)
        return _spline(tuple(self.knots(old // 2, new // 2)), new // 2, self.mode).to(device)


def _kept_if(same: Tensor, matrix: Tensor) -> Tensor:
    """Return the identity if `same` is true, else the matrix (n', n)."""
    new, old = (torch.arange(side, device=matrix.device) for side in matrix.shape)
    return torch.where(same, (new[:, None] == old).to(matrix.dtype), matrix)


def _spline_matrix(knots: tuple[float, ...], reach: int, mode: str) -> Tensor:
    """Return the matrix of a spline through 0 and +-knots at the displacements -reach, ..., reach."""
    x = np.array([*(-k for k in reversed(knots)), 0.0, *knots])
    at = np.arange(-reach, reach + 1).clip(x[0], x[-1])
    degree = min(3 if mode == "cubic" else 1, len(x) - 1)
    return torch.from_numpy(
        np.asarray(scipy.interpolate.make_interp_spline(x, np.eye(len(x)), k=degree)(at), dtype=np.float64)
    )


_compiler: Any = torch.compiler
#: The same function, which the compiler calls instead of tracing into it.
_spline: Callable[[tuple[float, ...], int, str], Tensor] = _compiler.assume_constant_result(_spline_matrix)
