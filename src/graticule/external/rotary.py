"""Rotations of models of diffusers and transformers: the classes that compute them, and a module that replaces them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.checkpoints.obstacles import check_intact
from graticule.encodings.build import build_position
from graticule.encodings.forms.coordinates import linear
from graticule.encodings.forms.rotary import PlaneRotary, RotaryPosition
from graticule.external.images import evaluating
from graticule.position.grid import Grid
from graticule.position.places import lattice
from graticule.position.position import ENCODINGS
from graticule.position.rotation import PairRotation
from graticule.registry.checks import checked
from graticule.registry.specs import Spec

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class RotationFormat:
    """What a class of another library gets and returns as the rotation of queries and keys.

    inputs: coordinates, (N, axes), which tokens may precede; pixels; or shapes of images, a device, and how many tokens
        of a text continue their coordinates.
    outputs: cosines and sines, (N, d), also in the dtype of the inputs, or (1, N, 1, d); or complex numbers.
    half: whether channel i forms a pair with i + d / 2 instead of its neighbor.
    dtype: the dtype of angles, where a device has it.
    """

    inputs: Literal["coordinates", "pixels", "shapes"]
    outputs: Literal["waves", "rounded waves", "waves per head", "complex"] = "waves"
    half: bool = True
    dtype: torch.dtype = torch.float32


_FLUX = RotationFormat("coordinates", "waves", False, torch.float64)
#: Name of a class -> what it gets and returns.
FORMATS = {
    **dict.fromkeys(("FluxPosEmbed", "Flux2PosEmbed", "Krea2RotaryPosEmbed"), _FLUX),
    "WanRotaryPosEmbed": RotationFormat("pixels", "waves per head", False, torch.float64),
    "HunyuanVideoRotaryPosEmbed": RotationFormat("pixels", "waves", False),
    "MotifVideoRotaryPosEmbed": RotationFormat("pixels", "waves", False, torch.float64),
    "QwenEmbedRope": RotationFormat("shapes", "complex", False),
    "DINOv3ViTRopePositionEmbedding": RotationFormat("pixels", "rounded waves"),
    "PixtralVisionRotaryEmbedding": RotationFormat("coordinates", "rounded waves"),
    **{f"Qwen{name}VLVisionRotaryEmbedding": RotationFormat("coordinates") for name in ("2", "2_5_", "3")},
}


def find_rotations(model: nn.Module) -> list[nn.Module]:
    """Return the rotations of known classes of diffusers and transformers, and those that replace them."""
    kinds = {part: type(_original(part)) for part in model.modules()}
    known = [part for part, kind in kinds.items() if kind.__module__.startswith(("diffusers.", "transformers."))]
    if rotations := [part for part in known if kinds[part].__name__ in FORMATS]:
        return rotations
    raise ValueError(f"`model` must have one of the rotations {', '.join(FORMATS)}; got {type(model).__name__}.")


def _original(part: nn.Module) -> Any:
    """Return the rotation that a module replaces, or the module."""
    return part.replaced[0] if isinstance(part, ReplacedRotation) else part


def rotation_of(model: nn.Module) -> tuple[Callable[[Tensor, tuple[int, int]], Tensor], int]:
    """Return the rotation of the images of a model of diffusers or transformers, and its number of channels, d.

    `RotationCode(*rotation_of(model))` takes both. The function maps queries, (B, heads, H * W, d), on the device of
    the model, and a grid (H, W) to rotated queries.
    """
    module = find_rotations(model)[0]
    original = _original(module)

    def rotate(queries: Tensor, grid: tuple[int, int]) -> Tensor:
        with queries.device, evaluating(module):
            cosines, sines = module(*_arguments(original, grid, queries.dtype))
        if cosines.is_complex():
            cosines, sines = (part.repeat_interleave(2, -1) for part in (cosines.real, cosines.imag))
        table = torch.cat([sines, cosines], -1).flatten(0, -2)
        return PairRotation(table, FORMATS[type(original).__name__].half)(queries, queries)[0]

    return rotate, 2 * len(torch.cat(_frequencies(original)))


def _frequencies(module: Any) -> list[Tensor]:
    """Return the frequencies of each axis of a rotation, as it computes them, before a factor 2 pi."""
    if hasattr(module, "inv_freq"):  # of one axis, or of both in Pixtral
        return list(module.inv_freq.chunk(2)) if type(module).__name__.startswith("Pixtral") else [module.inv_freq] * 2
    dtype, base = FORMATS[type(module).__name__].dtype, getattr(module, "theta", 10_000.0)
    channels = getattr(module, "axes_dim", None) or getattr(module, "rope_dim", None)
    channels = channels or (module.t_dim, module.h_dim, module.w_dim)
    return [1.0 / base ** (torch.arange(0, count, 2, dtype=dtype) / count) for count in channels]


def _patch(module: Any) -> Sequence[int]:
    """Return (frames, height, width) or (height, width) of a patch."""
    size = module.patch_size if hasattr(module, "patch_size") else module.config.patch_size
    sides = (size, size) if isinstance(size, int) else size
    return (module.patch_size_t, *sides) if hasattr(module, "patch_size_t") else sides


def _arguments(module: Any, grid: tuple[int, int], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the arguments of a call of a rotation for the patches of an image, row by row."""
    known, places = FORMATS[type(module).__name__], lattice(*map(torch.arange, grid))
    if known.inputs == "coordinates":
        is_flux = hasattr(module, "axes_dim")
        return (F.pad(places, (1, len(module.axes_dim) - 3)),) if is_flux else (places.to(dtype), places)
    if known.inputs == "shapes":
        return [(1, *grid)], places.device, 0
    patch = _patch(module)
    sides = [side * size for side, size in zip((1, *grid)[-len(patch) :], patch, strict=True)]
    return (torch.zeros((), dtype=dtype).expand(1, 3, *sides),)


class ReplacedRotation(nn.Module):
    """Replaces the rotation of a model of another library, and returns the rotation of an encoding in the same form.

    Angles have the dtype that the model computes them in, also under autocast. A frequency that differs from one of the
    model by the rounding of that dtype is the model's, so that its own dialect gives the same outputs. The rotation
    that is replaced is no part of this module.
    """

    def __init__(self, encoding: PlaneRotary, replaced: nn.Module) -> None:
        super().__init__()
        self.encoding = encoding
        self.replaced = (replaced,)
        self.signature = inspect.signature(replaced.forward)
        self.format = FORMATS[type(replaced).__name__]
        self.unit = 2 * torch.pi if hasattr(replaced, "num_patches_h") else 1.0  # of DINOv3, a factor of coordinates
        self._apply(lambda value: value)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Compute the frequency vectors, (d / 2, axes), float64, again, unless they are learned; none is cast."""
        nn.Module._apply(self, fn, recurse)
        self._fixed = None
        self._last: tuple[Any, tuple[Tensor, ...]] = None, ()
        if not list(self.encoding.parameters()):
            vectors = self.encoding.vectors(torch.device("cpu")).flatten(0, -2)
            known = torch.cat(_frequencies(self.replaced[0])).cpu().double()[:, None] * self.unit
            is_same = (vectors / known - 1).abs() <= 16 * torch.finfo(self.format.dtype).eps
            device = next((value.device for value in self.encoding.buffers()), vectors.device)
            self._fixed = torch.where(is_same, known, vectors).to(_wide(device))
        return self

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Return what the replaced module returns for these arguments, for the angles of the encoding."""
        call = self.signature.bind(*args, **kwargs)
        call.apply_defaults()
        first, second, texts = (*call.args, None, 0)[:3]
        if self.format.inputs == "coordinates":
            return self._rotation(first if second is None else second, first.device, first.dtype, 0)
        if self.format.inputs == "pixels":
            sides = (side // size for side, size in zip(first.shape[2:], _patch(self.replaced[0]), strict=True))
            arguments: tuple[Any, ...] = (Grid(*sides),), first.device, first.dtype, 0
        else:
            samples = first if isinstance(first, list) else [first]
            if any(sample != samples[0] for sample in samples):
                raise ValueError(
                    f"`img_shapes` must be the same for all samples, which have one rotation, got {first}."
                )
            grids = tuple(Grid(*shape) for shape in (samples[0] if isinstance(samples[0], list) else samples[:1]))
            arguments = grids, torch.empty(0, device=second).device, torch.float32, int(texts)
        if self._fixed is None or self.encoding.noisy or torch.compiler.is_compiling():
            return self._rotation(*arguments)
        key = *arguments, getattr(self.encoding, "progress", 0.0), torch.is_inference_mode_enabled()
        if key != self._last[0]:  # the steps of diffusion have the same grids
            self._last = key, self._rotation(*arguments)
        return self._last[1]

    def _rotation(
        self, coordinates: Tensor | tuple[Grid, ...], device: torch.device, rounded: torch.dtype, texts: int
    ) -> tuple[Tensor, ...]:
        """Return the rotation of tokens with these coordinates, or of images and `texts` tokens of a text."""
        encoding, scaling, wide = self.encoding, self.encoding.scaling, _wide(device)
        dtype = self.format.dtype if wide == device else torch.float32
        if isinstance(coordinates, Tensor):
            lengths: Any = () if scaling.scaling is None else coordinates.to(wide, torch.float64).amax(0) + 1
            places = coordinates.to(dtype) + encoding.coordinates.offset
        else:
            lengths = [max(sides) for sides in zip(*(grid.shape for grid in coordinates), strict=True)]
            images = [encoding.coordinates(grid, wide, encoding.grid) for grid in coordinates]
            for count, image in enumerate(images):  # each is one later than the previous
                image[:, 0] += count
            shift = 0.0 if self.unit == 1 else 1.0  # DINOv3 subtracts 1 after it has rounded the rest
            places = (torch.cat(images) + shift).to(dtype).to(device) - shift
        places = encoding.noise(places) if encoding.noisy else places
        if texts:
            index = torch.arange(texts, dtype=dtype, device=device)[:, None]
            places = torch.cat([places, (places[:, 1:].amax() + 1 + index).expand(-1, places.shape[1])])
        vectors = encoding.vectors(wide).flatten(0, -2) if self._fixed is None else self._fixed.to(wide)
        factor, sizes = scaling.logit_factor(lengths, vectors), scaling.amplitudes(vectors, lengths)
        sizes = sizes if factor is None else factor.sqrt()  # of logits, so half of it for queries, and half for keys
        vectors = scaling.frequencies(vectors, lengths, encoding.series, getattr(encoding, "time", None))
        angles = linear(places * self.unit, (vectors / self.unit).to(dtype).to(device))
        sizes = None if sizes is None else sizes.to(angles)
        if self.format.outputs == "complex":
            radii = torch.ones_like(angles) if sizes is None else sizes.expand_as(angles)
            return torch.polar(radii, angles).split([len(angles) - texts, texts])
        rounded = rounded if self.format.outputs == "rounded waves" else torch.float32
        waves = [(wave if sizes is None else wave * sizes).to(rounded) for wave in (angles.cos(), angles.sin())]
        waves = [torch.cat([wave, wave], -1) if self.format.half else wave.repeat_interleave(2, -1) for wave in waves]
        return tuple(wave[None, :, None] if self.format.outputs == "waves per head" else wave for wave in waves)


def _wide(device: torch.device) -> torch.device:
    """Return a device, or the CPU in place of one without float64."""
    return torch.device("cpu") if device.type in ("mps", "npu") else device


@checked
def set_rotary(model: Model, encoding: str | Spec | tuple[Spec, ...] | None) -> Model:
    """Replace the rotation of queries and keys of a model of diffusers or transformers, in place, and return the model.

    All else stays the same object, and the dialect that the model has gives the same outputs, bit by bit on a CPU; on a
    GPU outputs of DINOv3 and Qwen-Image differ by rounding. As `save_pretrained` of the library saves no rotation, call
    this again once the model is loaded, before the parameters of a learned encoding are, `encoding...` at the name of
    the rotation.

    Args:
        model: FLUX, FLUX.2, Krea 2, Wan, HunyuanVideo, MotifVideo, Qwen-Image, DINOv3, Pixtral, Qwen2-VL, Qwen2.5-VL or
            Qwen3-VL, or a larger model with one of these.
        encoding: a rotary encoding for the axes of the model, such as "rope(preset='flux', scaling='yarn',
            reference=(1, 64, 64))" for (time, row, column). None restores the rotation that the model had.

    Raises:
        ValueError: if the model has no known rotation, or cannot use the encoding. It is then unchanged.
    """
    check_intact(model, "wrapped")
    rotations: dict[Any, Any] = {part: _original(part) for part in find_rotations(model)}
    if model in rotations:
        raise ValueError(f"`model` must contain its rotation, got the rotation alone, {type(model).__name__}.")
    if encoding is None and all(part is rotation for part, rotation in rotations.items()):
        raise ValueError(f"`encoding` must be given: {type(model).__name__} has its own rotation, got None.")
    if changed := [type(part).__name__ for part in rotations if "forward" in vars(part)]:
        reason = "as of a hook for offloading or parallelism; call this before these are enabled"
        raise ValueError(f"`model` must not have another forward in {changed[0]}, {reason}.")
    if encoding is not None:
        rotations = {part: _build(encoding, rotation) for part, rotation in rotations.items()}
    device = next((value.device for value in model.parameters()), None)
    for parent in list(model.modules()):
        for name, part in dict[str, Any](parent._modules).items():
            if part in rotations:  # the new one has its mode and shares its hooks
                vars(rotations[part]).update({key: value for key, value in vars(part).items() if "_hooks" in key})
                parent._modules[name] = rotations[part].train(part.training).to(device)
    return model


@torch.inference_mode(False)  # tensors of inference could never be trained
def _build(encoding: str | Spec | tuple[Spec, ...], replaced: nn.Module) -> ReplacedRotation:
    """Build the module that replaces a rotation, if the encoding has its form."""
    kind, specs = type(replaced).__name__, ENCODINGS.specs(encoding)
    text, layout = " + ".join(map(str, specs)), "half" if FORMATS[kind].half else "interleaved"
    frequencies = _frequencies(replaced)
    axes, channels = len(frequencies), 2 * sum(map(len, frequencies))
    if any("layers" in spec.options for spec in specs):
        raise ValueError(f"`layers` must be left out: {kind} is computed once for all layers, got {text}.")
    position = build_position(Grid(*(1,) * axes), dim=channels, depth=1, num_heads=1, encoding=encoding)
    rotary = position.encoding if isinstance(position, RotaryPosition) else None
    if not isinstance(rotary, PlaneRotary) or rotary.layout is None or type(rotary).angles is not PlaneRotary.angles:
        raise ValueError(
            f"`encoding` must rotate pairs of channels by angles that are linear in the coordinates to replace {kind}, "
            f"as rope, rope_mixed, rope_golden_gate and mrope do, got {text}."
        )
    if rotary.layout != layout and "layout" in rotary.option_types():
        raise ValueError(f"`layout` must be {layout!r}, the pairs of channels of {kind}, got {rotary.layout!r}.")
    if "reference_grid" in dict(rotary.named_buffers()):
        raise ValueError(f"`reference` must be given with `scaling`, the grid that {kind} was trained at, got none.")
    if FORMATS[kind].inputs == "coordinates" and rotary.coordinates.coordinates != "patches":
        reason = f"with {kind}, which gets coordinates and no grid, got {rotary.coordinates.coordinates!r}."
        raise ValueError(f"`coordinates` must be 'patches' {reason}")
    return ReplacedRotation(rotary, replaced)
