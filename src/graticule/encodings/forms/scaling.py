"""Scaling of rotary frequencies on grids of other lengths than the reference grid: one function for each method."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from graticule.registry.fields import Count, Positive, check_fields
from graticule.system.symbolic import as_tensor, is_statically_true

#: The length of each axis in patches.
Lengths = Sequence[float] | Tensor
#: Frequencies of axes that have a series each, of axes that share one, of other directions, and those without an order.
Series = Literal["own", "shared", "free", "learned"]
#: What depends on the time of diffusion.
DYNAMIC = ("dy_ntk", "dy_yarn")


class Bands:
    """Frequencies, vectors (..., n, axes), with what methods need to know of them and of their axes."""

    def __init__(self, scaling: Scaling, vectors: Tensor, lengths: Lengths, s: Tensor, shared: bool) -> None:
        self.ramp, self.s = scaling.ramp or (1.0, 32.0), s
        self.lengths, self.reference = as_tensor(lengths, vectors), as_tensor(scaling.reference or (), vectors)
        self.turns = vectors.abs() * self.reference / (2 * math.pi)
        sizes = vectors.norm(dim=-1, keepdim=True)
        moves = (sizes if shared else vectors) != 0
        logs = torch.where(moves, sizes, 1).log()
        edges = (torch.where(moves, logs, edge).flatten(0, -2) for edge in (-math.inf, math.inf))
        self.highest, lowest, self.count = next(edges).amax(0), next(edges).amin(0), moves.flatten(0, -2).sum(0)
        self.span = (self.highest - lowest).clamp(min=torch.finfo(logs.dtype).tiny)  # 0 for one frequency
        self.vectors, self.depth = vectors, torch.where(moves, (self.highest - logs) / self.span, 0)
        self.number = self.depth * (self.count - 1)
        if scaling.resonance == "turns":
            factor = torch.where((s > 1) & (self.turns >= 1), self.turns.round() / self.turns, 1)
            self.vectors, self.depth = vectors * factor, self.depth - factor.log() / self.span

    def above(self, low: Tensor, high: Tensor) -> Tensor:
        """Return 1 for frequencies above `high` turns, 0 below `low`, linear in their number between whole bounds."""
        step = self.span / (self.count - 1).clamp(min=1)
        first, last = ((self.highest + (self.reference / (2 * math.pi * turns)).log()) / step for turns in (high, low))
        first, last = first.floor().clamp(min=0).minimum(self.count), last.ceil().minimum(self.count)
        return (1 - ((self.number - first) / (last - first).clamp(min=1e-3)).clamp(0, 1)) * (last >= 0)


def yarn(bands: Bands, t: Tensor) -> Tensor:
    """Interpolate frequencies of few turns, and keep frequencies of many turns."""
    low, high = bands.ramp
    share = ((bands.turns - low) / (high - low)).clamp(0, 1)
    return bands.vectors * (share + (1 - share) / bands.s)


def dy_yarn(bands: Bands, t: Tensor) -> Tensor:
    """Interpolate the lowest frequencies, keep the highest, and scale others as 'ntk'; bounds follow the time t."""
    slow, ntk = (METHODS[name](bands, t) for name in ("interpolation", "ntk"))
    slow = slow + bands.above(0.75 * t**2, 1.25 * t**2) * (ntk - slow)
    return slow + bands.above(2 * t**2, 16 * t**2) * (bands.vectors - slow)


def riflex(bands: Bands, t: Tensor) -> Tensor:
    """Lower the frequency whose period is nearest to the reference, so that a longer axis does not repeat it."""
    periods = (2 * math.pi / bands.vectors.abs()).round()  # infinite if it does not move
    nearest = (periods - bands.reference).abs().argmin(-2, keepdim=True)
    intrinsic = torch.arange(periods.shape[-2], device=periods.device)[:, None] == nearest
    repeats = (bands.s > 1) & (bands.lengths > periods)
    return torch.where(intrinsic & repeats, 0.9 * 2 * math.pi / bands.lengths, bands.vectors)


METHODS: dict[str, Callable[[Bands, Tensor], Tensor]] = {
    "interpolation": lambda bands, t: bands.vectors / bands.s,
    "ntk": lambda bands, t: bands.vectors * bands.s**-bands.depth,
    "yarn": yarn,
    "dy_ntk": lambda bands, t: bands.vectors * bands.s ** (-2 * t**2 * bands.depth),
    "dy_yarn": dy_yarn,
    "riflex": riflex,
}


@dataclass(frozen=True)
class Scaling:
    r"""Scales rotary frequencies per axis, by the ratio of its length to the reference grid's.

    With s the ratio of the two lengths of an axis and :math:`\omega` a frequency on it:

    - 'interpolation': :math:`\omega / s`, so that angles span the same range; also at smaller grids.
    - 'ntk': :math:`\omega s^{-u}`, where u runs from 0 at the highest frequency of the axis (or of a series that axes
      share) to 1 at the lowest, by their logarithms: for T^(-k / n) this is the base :math:`T s^{n / (n - 1)}`.
    - 'yarn': :math:`\omega (\gamma + (1 - \gamma) / s)`, where :math:`\gamma` grows from 0 to 1 as the number of turns
      along the axis of the reference grid grows through `ramp`; and the logits are multiplied by
      :math:`(1 + \ln(s_y s_x) / 10)^2`, where on one axis s is the ratio of numbers of tokens, as in the paper.
    - 'dy_ntk': :math:`\omega s^{-2 t^2 u}`, where t is the time of diffusion, 1 for noise and 0 for the image: there
      nothing is scaled. `graticule.set_progress` sets 1 - t.
    - 'dy_yarn': :math:`\omega` above :math:`16 t^2` turns, as 'ntk' from :math:`2 t^2` to :math:`1.25 t^2`, as
      'interpolation' below :math:`0.75 t^2`, linear in k between; and sines and cosines of the axis times
      :math:`1 + \ln(s) / 10`. Bounds in DyPE's code change places at t < 0.03; these do not.
    - 'riflex': on an axis of L patches, more than its reference N, the frequency whose rounded period is nearest to N
      becomes :math:`0.9 \cdot 2 \pi / L`, if L is above the period. N is the length after which the trained model
      repeats itself, as (48, H, W) for HunyuanVideo.

    All but 'interpolation' change nothing on an axis that is not longer. At the reference grid none changes anything.
    `resonance` does, unless they are whole: 'wavelengths' rounds those that result to whole patches, at any grid.
    'turns' rounds turns along the reference, if at least 1, before a longer axis is scaled.

    Reference: Position Interpolation (Chen et al., 2023); YaRN (Peng et al., 2023), Eq. 16 and sections 3.1-3.4; per
    axis as in FiT (Lu et al., 2024); DyPE (Issachar et al., 2025), bands of its code; RIFLEx (Zhao et al., 2025), Eq.
    7-8, 0.9 of its code; Resonance RoPE (Wang et al., 2024); UltraFlux (Ye et al., 2025), 'dy_yarn' at t = 1, 'turns'.

    scaling: one of the methods; None keeps the frequencies per patch.
    reference: the shape of the reference grid, (H, W) for images; by default the one that the encoding is built for.
    ramp: turns below which a frequency is interpolated, and above which it is unchanged, (1, 32) by default as in the
        paper. On a small grid no frequency is above 32 turns; there (0.25, 1) keeps some.
    resonance: what becomes whole, 'wavelengths' or 'turns'.
    """

    scaling: Literal["interpolation", "ntk", "yarn", "dy_ntk", "dy_yarn", "riflex"] | None = None
    reference: tuple[Count, ...] | None = None
    ramp: tuple[Positive, Positive] | None = None
    resonance: Literal["wavelengths", "turns"] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.reference is not None and self.scaling is None:
            raise ValueError(f"`reference` must be left out without `scaling`, got {self.reference}.")
        if self.ramp is not None and self.scaling != "yarn":
            raise ValueError(f"`ramp` must be left out with scaling {self.scaling!r}, got {self.ramp}.")
        if self.ramp is not None and self.ramp[0] >= self.ramp[1]:
            raise ValueError(f"`ramp` must be two increasing numbers of turns, got {self.ramp}.")
        if self.resonance == "turns" and self.scaling is None:
            raise ValueError("`resonance` must be 'wavelengths' without `scaling`, got 'turns'.")

    def at(self, built: Lengths, series: Series) -> Scaling:
        """Return the same with a reference grid, `built` if it has none, for frequencies that it can scale."""
        if series == "learned" and self.scaling not in (None, "interpolation"):
            raise ValueError(f"`scaling` must be 'interpolation' with learned frequencies, got {self.scaling!r}.")
        for name, value in (("scaling", self.scaling), ("resonance", self.resonance)):
            if series in ("free", "learned") and value in ("dy_yarn", "riflex", "wavelengths", "turns"):
                raise ValueError(f"`{name}` must not be {value!r} with frequencies of other directions than axes.")
        known = self.scaling is None or self.reference is not None
        return self if known else replace(self, reference=tuple(map(int, built)))

    def ratios(self, lengths: Lengths, like: Tensor) -> Tensor | None:
        """Return s on each axis, such as (y, x), as a tensor like `like`; None if all are known to be 1."""
        if self.scaling is None or self.reference is None:
            return None
        if (axes := len(lengths)) != len(self.reference):
            raise ValueError(f"`reference` must have {axes} sides, as many as the grid has axes, got {self.reference}.")
        pairs, longer = zip(lengths, self.reference, strict=True), self.scaling != "interpolation"
        if not isinstance(lengths, Tensor) and all(is_statically_true(a <= b if longer else a == b) for a, b in pairs):
            return None
        s = as_tensor(lengths, like) / as_tensor(self.reference, like)
        return s.clamp(min=1) if longer else s

    def frequencies(self, vectors: Tensor, lengths: Lengths, series: Series, time: Tensor | None) -> Tensor:
        """Scale frequency vectors (..., n, axes), in radians per patch along each axis, for axes of these lengths."""
        s = self.ratios(lengths, vectors)
        if s is not None and self.scaling is not None:
            t = s.new_ones(()) if time is None else time.to(s.dtype)
            vectors = METHODS[self.scaling](Bands(self, vectors, lengths, s, series != "own"), t)
        if self.resonance != "wavelengths":
            return vectors
        wavelengths = (2 * math.pi / vectors.abs()).round().clamp(min=1)
        return torch.where(vectors != 0, 2 * math.pi / wavelengths, 0)

    def amplitudes(self, vectors: Tensor, lengths: Lengths) -> Tensor | None:
        """Return the factor of the sine and cosine of each frequency, (n,); None for 1."""
        s = self.ratios(lengths, vectors) if self.scaling == "dy_yarn" else None
        return None if s is None else 1 + 0.1 * ((vectors != 0) * s.log()).sum(-1)

    def logit_factor(self, lengths: Lengths, like: Tensor) -> Tensor | None:
        """Return the factor of the attention logits, a scalar like `like`; None for 1."""
        s = self.ratios(lengths, like.double()) if self.scaling == "yarn" else None
        return None if s is None else (1 + 0.1 * s.prod().log()).square().to(like.dtype)
