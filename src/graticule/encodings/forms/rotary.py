"""Base classes of rotary encodings: rotations of queries and keys by angles that are linear in the coordinates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graticule.encodings.forms.coordinates import Coordinates, Noise, linear
from graticule.encodings.forms.scaling import DYNAMIC, Lengths, Scaling, Series
from graticule.position.folded import Folded
from graticule.position.grid import Grid
from graticule.position.joining import Joining
from graticule.position.layer import LayerPosition
from graticule.position.places import Points
from graticule.position.position import FROM_STAGE, Encoding, Position, SharedPosition, StageSpec
from graticule.position.rotation import PairRotation, Rotation
from graticule.registry.checks import checked, known_name
from graticule.registry.registry import Option, options_of

#: The channels of a pair: neighbors, or channel i and i + d / 2, of a head, of each axis or of the channels that are
#: rotated; neighbors with two angles.
Layout = Literal["interleaved", "half", "half_per_axis", "half_rotated", "tiled"]


class RotaryEncoding(Encoding):
    """Makes the rotations of queries and keys: one for all layers, or one per layer.

    If a parameter of the constructor is a dataclass, such as `Coordinates`, its fields are options of the encoding.
    """

    #: Options of released models, by name.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @abstractmethod
    def rotations(self, grid: Grid) -> list[Rotation]:
        """Return one rotation for all layers, or one per layer, for `grid`."""

    def query_scale(self, grid: Grid) -> Tensor | None:
        """Return the factor of the queries of each token at `grid`, (N,); None for 1."""
        return None

    @classmethod
    def position(cls, stage: StageSpec, joining: Joining, *, preset: str | None = None, **options: Any) -> Position:
        """Build one instance for all joined layers.

        Args:
            stage: the sizes of the backbone.
            joining: decides which layers are joined.
            preset: name of a released model, whose options are the defaults.
            options: of the constructor.

        Raises:
            ValueError: if there is no such preset, or its pairs do not fit the heads.
        """
        if preset is not None:
            if not cls.presets:
                raise ValueError(f"`preset` must be left out with {cls.__name__}, which has none, got {preset!r}.")
            options = {**cls.presets[known_name("preset", preset, cls.presets)], **options}
            split = cls.presets[preset].get("split", ())
            if split and options["split"] is split and 2 * sum(split) != stage.head_dim:
                raise ValueError(
                    f"`preset` {preset!r} must have heads of {2 * sum(split)} channels, got {stage.head_dim}; for "
                    f"others give `split`, the pairs of each axis, {split} there."
                )
        encoding = cls.build(replace(stage, depth=joining.layers), stage.within, options)
        return RotaryPosition(encoding, stage.depth, joining.layer_indices)

    @classmethod
    def option_types(cls) -> dict[str, Option]:
        """Return the options by name: the constructor's, with the fields of its parts, and `preset`."""
        options: dict[str, Option] = {}
        for name, option in options_of(cls.__init__, FROM_STAGE).items():
            if is_dataclass(option.kind):
                parts = options_of(type(option.default), FROM_STAGE)
                options |= {part: Option(kind.kind, getattr(option.default, part)) for part, kind in parts.items()}
            else:
                options[name] = option
        return {**({"preset": Option(str | None, None)} if cls.presets else {}), **options}

    @classmethod
    def build(cls, stage: StageSpec, grid: Grid, options: Mapping[str, Any]) -> Self:
        """Build one instance, and set its attribute `grid` if it has none; parts are built from their options."""
        values = dict(options)
        for name, option in options_of(cls.__init__, FROM_STAGE).items():
            names = [field.name for field in fields(option.kind)] if is_dataclass(option.kind) else []
            if part := {field: values.pop(field) for field in names if field in values}:
                values[name] = replace(option.default, **part)
        built = super().build(stage, grid, values)
        vars(built).setdefault("grid", grid)
        return built


class PlaneRotary(RotaryEncoding):
    r"""Rotates each pair of channels by an angle that is a linear function of the coordinates, (y, x) in an image.

    .. math:: \theta_k = y\,f^y_k + x\,f^x_k

    So the logits depend on the displacement of query and key alone. Prefix tokens are not rotated. Angles are computed
    in float32 at least, in any model and under autocast.
    """

    crops = True
    #: The number of pairs of each part of the channels, in their order, if the layout divides them.
    pairs: tuple[int, ...] = ()
    series: Series = "own"

    def __init__(
        self, grid: Grid, coordinates: Coordinates, noise: Noise, scaling: Scaling, layout: Layout | None
    ) -> None:
        """Set the parts; `layout` is None if each channel has its own angle, without pairs.

        `grid` is the reference of the scaling if it has none, and is then a part of the weights.
        """
        super().__init__()
        self.grid, self.layout = grid, layout
        self.coordinates, self.noise = coordinates, noise
        self.scaling = scaling.at(self.lengths(grid), self.series)
        if self.scaling != scaling:
            self.register_buffer("reference_grid", torch.tensor(self.scaling.reference))
        if self.scaling.scaling is not None and not coordinates.in_patches:
            raise ValueError(
                "`scaling` must go with coordinates 'patches', 'centered' or 'middle', as others are relative to the "
                f"grid, got {coordinates.coordinates!r}."
            )

    @abstractmethod
    def vectors(self, device: torch.device | None = None) -> Tensor:
        """Return the frequency vectors (f^y, f^x), (..., d / 2, axes), float32 at least, in radians."""

    def forward(self, grid: Grid) -> Tensor:
        """Return sines, then cosines, for `grid`, (..., N, 2d)."""
        return self._formula(grid, noisy=self.noisy)

    def _formula(self, grid: Grid, device: torch.device | None = None, noisy: bool = False) -> Tensor:
        amplitudes = self.scaling.amplitudes(self.vectors(device), self.lengths(grid))
        angles = self.angles(grid, device, noisy)
        if grid.prefix:  # an angle of 0
            angles = F.pad(angles, (0, 0, grid.prefix, 0))
        tables = [wave if amplitudes is None else wave * amplitudes for wave in (angles.sin(), angles.cos())]
        if self.layout in (None, "interleaved"):
            return torch.cat([table.repeat_interleave(2, -1) if self.layout else table for table in tables], -1)
        parts = self.pairs or angles.shape[-1]  # both channels of a pair are of one part, whose angles are repeated
        return torch.cat([part for table in tables for part in table.split(parts, -1) for _ in range(2)], -1)

    def rotations(self, grid: Grid) -> list[Rotation]:
        half = self.layout not in ("interleaved", "tiled")
        return [PairRotation(self(grid), half, tuple(2 * pairs for pairs in self.pairs) if half else ())]

    @property
    def noisy(self) -> bool:
        """Return whether the coordinates are changed at random: in training, if there is noise."""
        return self.training and self.noise.active

    def angles(self, grid: Grid, device: torch.device | None = None, noisy: bool = False) -> Tensor:
        """Return the angle of every pair of channels at every patch, (..., H * W, d / 2), in radians."""
        vectors = self.scaled(grid, device)
        places = self.coordinates(grid, vectors.device, self.grid)
        if noisy:
            places = self.noise(places)
        return linear(places.to(vectors.dtype), vectors[..., None, :, :])

    def scaled(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        """Return the frequency vectors, scaled for `grid`."""
        time: Tensor | None = getattr(self, "time", None)
        return self.scaling.frequencies(self.vectors(device), self.lengths(grid), self.series, time)

    def lengths(self, grid: Grid) -> Lengths:
        """Return the length of each axis of the whole image in patches."""
        if not isinstance(grid, Points):
            return grid.image_grid.shape
        if grid.extent is None and self.scaling.scaling is not None:
            raise ValueError(
                f"`extent` must be given for Points with scaling {self.scaling.scaling!r}, which compares it with the "
                f"reference {self.scaling.reference}: Points(places, extent=...), got none."
            )
        extent, unit = () if grid.extent is None else grid.extent, self.grid.spacing
        return extent if unit is None else [length / step for length, step in zip(extent, unit, strict=False)]

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load parameters and buffers, and set the reference of the scaling to the one that is loaded."""
        super()._load_from_state_dict(*args)
        reference: Any = dict(self.named_buffers()).get("reference_grid")
        if reference is not None and not reference.is_meta:
            self.scaling = replace(self.scaling, reference=tuple(reference.tolist()))
            self.set_grid(self.grid)


class FixedRotary(PlaneRotary):
    """A rotary encoding with frequencies from a formula: nothing is learned, and another grid is computed.

    The table is computed in float64 and stored in float32 at least; in training with `noise` it is computed in each
    forward pass. A constructor must set the attributes for `vectors` before it calls the constructor of this class.
    """

    exempt: tuple[str, ...] = ("permutation: frequencies are divided among the axes",)

    def __init__(
        self, grid: Grid, coordinates: Coordinates, noise: Noise, scaling: Scaling, layout: Layout | None
    ) -> None:
        super().__init__(grid, coordinates, noise, scaling, layout)
        if scaling.scaling in ("ntk", *DYNAMIC):
            with torch.device("cpu"):  # on the meta device, where only sizes are computed, there would be no values
                frequencies = self.vectors().norm(dim=-1).unique()
            if len(frequencies) < 2:
                raise ValueError(f"`scaling` must not be {scaling.scaling!r} with one frequency; use larger heads.")
        self.table: Tensor
        self.time: Tensor | None
        self.progress = 0.0
        self.register_buffer("time", None, persistent=False)
        self.init_non_persistent_buffers()

    def compute_buffers(self, device: torch.device | None, dtype: torch.dtype) -> dict[str, Tensor]:
        wide, known = torch.promote_types(dtype, torch.float32), self.time
        if self.scaling.scaling in DYNAMIC:
            self.time = torch.tensor(1 - self.progress, dtype=wide, device=device)
        buffers = {"time": self.time, "table": self._formula(self.grid, device).to(wide)}
        self.time = known  # the new value is copied into the same memory
        return {name: value for name, value in buffers.items() if value is not None}

    def forward(self, grid: Grid) -> Tensor:
        """Return sines, then cosines, for `grid`, (N, 2d) or (h, N, 2d)."""
        if grid == self.grid and not self.noisy:
            return self.table
        return self._formula(grid, self.table.device, self.noisy).to(self.table.dtype)

    def query_scale(self, grid: Grid) -> Tensor | None:
        """Return the temperature of 'yarn' at a larger grid, (N,)."""
        factor = self.scaling.logit_factor(self.lengths(grid), self.table)
        return None if factor is None else factor.expand(grid.tokens)


class RotaryPosition(SharedPosition):
    """A rotary encoding: one rotation for all layers, or one per layer."""

    form = "rotation"

    def layer_positions(self, grid: Grid) -> list[LayerPosition]:
        """Return the rotation of each joined layer for `grid`, or one for all."""
        scale, rotations = self.encoding.query_scale(grid), self.encoding.rotations(grid)
        if not torch.compiler.is_compiling():
            is_list = isinstance(rotations, list | tuple)
            wrong = [rotation for rotation in rotations if not callable(rotation)] if is_list else [rotations]
            if wrong or len(rotations) not in (1, len(self.layer_indices)):
                first = wrong[0] if wrong else rotations
                self.encoding.check_returned("rotations", first, "a list of one rotation, or one per layer", None)
        return [LayerPosition(rotary=rotation, query_scale=scale) for rotation in rotations]

    def published_names(self) -> dict[str, str]:
        """Map `rope.freqs`, timm's name of learned frequencies."""
        return {f"rope.{name}": f"encoding.{name}" for name, _ in self.encoding.named_parameters()}


@checked
def set_progress(model: nn.Module, progress: float | Tensor) -> None:
    """Set the progress of diffusion, 1 - t, for the encodings of `model` with scaling 'dy_ntk' or 'dy_yarn'.

    It is 0 for pure noise, where encodings begin, and 1 for the image. Tables change in place, so that a compiled model
    is not compiled again; an exported one keeps its progress, and a saved one is opened with progress 0.
    """
    if getattr(progress, "ndim", 0) or not 0 <= progress <= 1:
        raise ValueError(f"`progress` must be in [0, 1], from noise to image, got {progress}.")
    encodings = [part for part in model.modules() if isinstance(part, FixedRotary) and part.time is not None]
    if not encodings:
        raise ValueError("`model` must have a rotary encoding with scaling 'dy_ntk' or 'dy_yarn', got none.")
    for encoding in encodings:
        encoding.progress = float(progress)
        encoding.init_non_persistent_buffers()
    for part in model.modules():
        if isinstance(part, Folded):
            part.fold()


def check_head_dim(head_dim: int, multiple: int, why: str) -> None:
    """Check that the channels per head can be divided."""
    if head_dim < multiple or head_dim % multiple:
        raise ValueError(
            f"`head_dim` must be a multiple of {multiple} with rotary encodings ({why}), got {head_dim}; "
            "it is embed_dim / num_heads."
        )


def geometric(base: float, count: int, device: torch.device | None = None) -> Tensor:
    """Return the frequencies base^(-k / count), k from 0, (count,), float64."""
    return base ** -(torch.arange(count, device=device, dtype=torch.float64) / count)


def axial(*frequencies: Tensor) -> Tensor:
    """Return the vectors (f, 0) of the first frequencies, then (0, f) of the second, (n, 2); or more axes."""
    last = len(frequencies) - 1
    return torch.cat([F.pad(values[:, None], (axis, last - axis)) for axis, values in enumerate(frequencies)])
