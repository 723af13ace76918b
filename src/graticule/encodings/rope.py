"""The rotary encoding of a grid, axis by axis in the variants of published models, and of a sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from graticule.encodings.forms.coordinates import Coordinates, Noise
from graticule.encodings.forms.rotary import FixedRotary, Layout, axial, check_head_dim, geometric
from graticule.encodings.forms.scaling import Lengths, Scaling
from graticule.position.grid import Grid
from graticule.position.position import register_encoding
from graticule.registry.fields import Bounded, Flag, Positive, check_fields


@dataclass(frozen=True)
class Frequencies:
    r"""The frequencies of an axis, in radians per unit of the coordinate; k counts n frequencies from 0.

    base: T, for T^(-k / n), or one for each axis; 100 by default, if no other field gives the frequencies.
    turns: whether those are in turns instead of radians, as in DINOv3: :math:`2 \pi T^{-k / n}`.
    periods: the shortest and the longest period, for 2 pi / p_k with p_k geometric between these.
    pixels: R, for pi times geometric steps from 1 to R / 2.
    linear: whether those steps are linear.
    alternate: whether the axes take turns in one series of 2 n frequencies, as in Pixtral: the first axis has the
        frequencies of even k, the second the frequencies of odd k; on a axes of a n frequencies, every a-th.
    """

    base: Positive | tuple[Positive, ...] | None = None
    turns: Flag = False
    periods: tuple[Positive, Positive] | None = None
    pixels: Positive | None = None
    linear: Flag = False
    alternate: Flag = False

    def __post_init__(self) -> None:
        check_fields(self)
        names = [name for name in ("base", "periods", "pixels") if getattr(self, name) is not None]
        if len(names) > 1:
            raise ValueError(f"`{names[0]}` must be left out with `{names[1]}`: each gives all frequencies.")
        if self.turns and names not in ([], ["base"]):
            raise ValueError(f"`turns` must be left out with `{names[0]}`.")
        if self.linear and self.pixels is None:
            raise ValueError("`linear` must be left out without `pixels`, whose frequencies it spaces.")
        if self.alternate and isinstance(self.base, tuple):
            raise ValueError(f"`base` must be one number with `alternate`, got {self.base}.")

    def __call__(self, count: int, device: torch.device | None = None, axis: int = 0) -> Tensor:
        """Return `count` frequencies of an axis, (count,), float64."""
        share = torch.linspace(0, 1, count, device=device, dtype=torch.float64)
        if self.periods is not None:
            shortest, longest = self.periods
            return 2 * math.pi / (shortest * (longest / shortest) ** share)
        if self.pixels is not None:
            most = self.pixels / 2
            return math.pi * (1 + (most - 1) * share if self.linear else most**share)
        base = self.base[axis] if isinstance(self.base, tuple) else self.base or 100.0
        return geometric(base, count, device) * (2 * math.pi if self.turns else 1)


@register_encoding("rope")
class Rope(FixedRotary):
    r"""Rotates half of the channel pairs of queries and keys by the row, half by the column; nothing is learned.

    .. math:: \theta_{(y, x)} = (y\,\omega_k, x\,\omega_k), \quad k < d / 4

    In a text all pairs are rotated by the index, and on three axes a third of them by each, or as `split` says. The
    product of a query and a key depends on the difference of their angles, so the logits depend on the displacement
    alone. Prefix tokens are not rotated. At another grid the angles per patch are the same, unless `scaling` or the
    coordinates change them.

    Presets are the variants of released weights: 'rope_vit' (its axial models), 'eva02', 'pe' (Perception Encoder; its
    models without class token have no offset, which changes nothing without prefix tokens), 'dinov3', and the image
    encoders of 'pixtral', 'qwen2_vl' (also Qwen2.5-VL and Qwen3-VL, whose tokens are in the order of merged blocks),
    'llama4', 'gemma4', 'vjepa2' and 'kimi' (Kimi K2.5). For diffusion transformers there are 'glm_image' and, for heads
    of 128 channels on frames, rows and columns, 'flux', 'wan', 'hunyuan_video', 'z_image', 'qwen_image' and 'cosmos';
    'flux2' has a fourth axis, of text: `Grid(1, H, W, 1)`. An image is a video of one frame.

    The layout 'tiled' is from V-JEPA 2's released code, which repeats the frequencies of an axis one after the other
    where its pairs of neighbors need each twice: the two channels of a pair have different angles. This is no rotation,
    so the logits depend on more than the displacement.

    Reference: RoFormer (Su et al., 2021), Eq. 34; per axis as in Rotary Position Embedding for Vision Transformer (Heo
    et al., 2024), section 3.1, whose T = 100 is the default; EVA-02 (Fang et al., 2023); Perception Encoder (Bolya et
    al., 2025); DINOv3 (Simeoni et al., 2025).

    Args:
        head_dim: d, a multiple of 4, or of twice the number of axes.
        frequencies: the frequencies of an axis.
        coordinates: the coordinates of patches.
        layout: the channels of a pair: neighbors ('interleaved'), i and i + d / 2 ('half'), the same within the
            channels of each axis ('half_per_axis') or within those that are rotated ('half_rotated'), or neighbors with
            two angles ('tiled').
        order: the axis of the first d / 4 pairs: 'yx' for the first axis of the grid first, 'xy' for the last.
        noise: noise of the coordinates in training.
        scaling: scaling of the frequencies at other grids.
        split: the number of pairs of each axis, the first axis first, such as (0, 8, 8); other pairs are not rotated.
            By default all pairs, in equal parts. On an image, three numbers describe a video of one frame, 0.
        arrangement: the order of the pairs: axis by axis ('chunked'), or the axes in turn ('interleaved').
        unrotated: where the pairs that are not rotated are: the 'last' of a head, or the 'first'.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "rope_vit": {"base": 100.0, "order": "xy"},
        "eva02": {"base": 10_000.0, "scaling": "interpolation", "reference": (16, 16)},
        "pe": {"base": 10_000.0, "order": "xy", "offset": 1.0, "scaling": "interpolation"},
        "dinov3": {"base": 100.0, "turns": True, "coordinates": "separate", "layout": "half", "rescale": 2.0},
        "pixtral": {"base": 10_000.0, "alternate": True, "layout": "half"},
        "qwen2_vl": {"base": 10_000.0, "layout": "half"},
        "llama4": {"base": 10_000.0, "order": "xy", "offset": 1.0},
        "gemma4": {"base": 100.0, "order": "xy", "layout": "half_per_axis"},
        "vjepa2": {"base": 10_000.0, "layout": "tiled"},
        "kimi": {"base": 10_000.0, "layout": "half", "order": "xy", "arrangement": "interleaved"},
        "glm_image": {"base": 10_000.0, "layout": "half"},
        "flux": {"base": 10_000.0, "split": (8, 28, 28)},
        "flux2": {"base": 2_000.0, "split": (16, 16, 16, 16)},
        "wan": {"base": 10_000.0, "split": (22, 21, 21)},
        "hunyuan_video": {"base": 256.0, "split": (8, 28, 28)},
        "z_image": {"base": 256.0, "split": (16, 24, 24)},
        "qwen_image": {"base": 10_000.0, "split": (8, 28, 28), "coordinates": ("patches", "centered", "centered")},
        "cosmos": {"base": (10_000.0 * 2 ** (22 / 21), 10_000.0, 10_000.0), "split": (22, 21, 21), "layout": "half"},
    }

    def __init__(
        self,
        grid: Grid,
        head_dim: Bounded,
        frequencies: Frequencies = Frequencies(),
        coordinates: Coordinates = Coordinates(),  # noqa: B008
        layout: Layout = "interleaved",
        order: Literal["yx", "xy"] = "yx",
        noise: Noise = Noise(),  # noqa: B008
        scaling: Scaling = Scaling(),  # noqa: B008
        split: tuple[int, ...] | None = None,
        arrangement: Literal["chunked", "interleaved"] = "chunked",
        unrotated: Literal["last", "first"] = "last",
    ) -> None:
        axes, pairs = len(grid.shape), head_dim // 2
        if split is None:
            check_head_dim(head_dim, 2 * axes, f"pairs on {axes} axes; see `split`")
            split = (pairs // axes,) * axes
        elif len(split) not in (axes, 3 if axes == 2 else axes) or min(split) < 0 or not 1 <= sum(split) <= pairs:
            four = "; with four an image is Grid(1, H, W, 1)" if len(split) == 4 != axes else ""
            rule = f"{axes} numbers of pairs, of {pairs} at most together"
            raise ValueError(f"`split` must be {rule}, got {split}{four}.")
        key = "alternate" if frequencies.alternate else "arrangement" if arrangement == "interleaved" else None
        if key and len(set(split)) > 1:
            raise ValueError(f"`split` must have equal numbers with `{key}`, whose axes take turns, got {split}.")
        if key and layout in ("half_per_axis", "tiled"):
            raise ValueError(f"`{key}` must be left out with layout {layout!r}, whose axes have channels of their own.")
        if layout == "half_per_axis" and split != (pairs // len(split),) * len(split):
            raise ValueError(f"`split` must be equal parts of all pairs with layout 'half_per_axis', got {split}.")
        if isinstance(frequencies.base, tuple) and len(frequencies.base) != len(split):
            raise ValueError(f"`base` must be {len(split)} numbers, one for each axis, got {frequencies.base}.")
        rest = pairs - sum(split)
        if unrotated == "first" and not rest:
            raise ValueError(f"`unrotated` must be left out with `split` {split}, which rotates all {pairs} pairs.")
        if isinstance(coordinates.coordinates, tuple) and axes < len(split) == len(coordinates.coordinates):
            coordinates = replace(coordinates, coordinates=coordinates.coordinates[1:])
        self.head_dim, self.split, self.frequencies = head_dim, split, frequencies
        self.order, self.arrangement, self.unrotated = order, arrangement, unrotated
        if layout in ("half_per_axis", "half_rotated", "tiled"):
            parts = (sum(split),) if layout == "half_rotated" else split if order == "yx" else split[::-1]
            self.pairs = (rest, *parts) if unrotated == "first" else (*parts, rest) if rest else parts
        self.series = "shared" if frequencies.alternate else "own"
        super().__init__(grid, coordinates, noise, scaling, layout)

    def vectors(self, device: torch.device | None = None) -> Tensor:
        """Return the frequency vectors (f^y, f^x), (d / 2, axes), float64."""
        count, step = len(self.split), 1 if self.order == "yx" else -1
        if self.frequencies.alternate:
            series = self.frequencies(sum(self.split), device)
            vectors = axial(*(series[turn::count] for turn in range(count)))
        else:
            vectors = axial(*(self.frequencies(self.split[axis], device, axis) for axis in range(count)[::step]))
        if self.arrangement == "interleaved":
            vectors = vectors.unflatten(0, (count, -1)).transpose(0, 1).flatten(0, 1)
        rest = self.head_dim // 2 - len(vectors)  # pairs that are not rotated
        vectors = F.pad(vectors, (0, 0, rest, 0) if self.unrotated == "first" else (0, 0, 0, rest))
        vectors = vectors if self.order == "yx" else vectors.flip(1)
        return vectors[:, count - len(self.grid.shape) :]  # an image has the time 0


@register_encoding("rope_1d")
class Rope1d(FixedRotary):
    r"""Rotates queries and keys by the index in the flattened sequence; nothing is learned.

    .. math:: \theta_{p, k} = p\, T^{-2k / d}, \quad k < d / 2

    where p counts the patches from 0, row by row; prefix tokens are not rotated. The product of a query and a key
    depends on the difference of their angles, so the logits depend on their distance in the sequence. Another grid is
    computed, not resampled. In a text it is RoFormer's encoding, except that indices begin at 0, which
    changes no logit. `scaling` compares numbers of patches.

    Reference: RoFormer (Su et al., 2021), Eq. 14-15 and 34.

    Args:
        head_dim: d, a multiple of 2.
        base: T.
        layout: the channels of a pair, neighbors ('interleaved') or i and i + d / 2 ('half').
        scaling: scaling of the frequencies at other lengths.
    """

    exempt = ("permutation: angles are of the order of patches",)

    def __init__(
        self,
        grid: Grid,
        head_dim: Bounded,
        base: Positive = 10_000.0,
        layout: Literal["interleaved", "half"] = "interleaved",
        scaling: Scaling = Scaling(),  # noqa: B008
    ) -> None:
        check_head_dim(head_dim, 2, "pairs of channels")
        self.head_dim = head_dim
        self.base = base
        if scaling.reference is not None:
            scaling = replace(scaling, reference=(math.prod(scaling.reference),))
        super().__init__(grid, Coordinates(), Noise(), scaling, layout)

    def vectors(self, device: torch.device | None = None) -> Tensor:
        """Return the frequencies as vectors of one axis, (d / 2, 1), float64."""
        return geometric(self.base, self.head_dim // 2, device)[:, None]

    def angles(self, grid: Grid, device: torch.device | None = None, noisy: bool = False) -> Tensor:
        """Return the angle of every pair of channels at every patch, (H * W, d / 2), float64, in radians."""
        vectors = self.scaled(grid, device)
        return grid.order(vectors.device).to(vectors.dtype)[:, None] * vectors[:, 0]

    def lengths(self, grid: Grid) -> Lengths:
        """Return the length of the flattened sequence, of the whole image for a crop."""
        return (grid.image_grid.patches,)
