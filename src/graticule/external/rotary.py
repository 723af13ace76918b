"""Rotations of models of diffusers and transformers: the classes that compute them, and a module that replaces them."""

from __future__ import annotations

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
    channels: the name of its numbers of channels of each axis.
    """

    inputs: Literal["coordinates", "pixels", "shapes"]
    outputs: Literal["waves", "rounded waves", "waves per head", "complex"] = "waves"
    half: bool = True
    dtype: torch.dtype = torch.float32
    channels: str = ""


_FLUX = RotationFormat("coordinates", "waves", False, torch.float64, "axes_dim")
#: Name of a class -> what it gets and returns.
FORMATS = {
    **dict.fromkeys(("FluxPosEmbed", "Flux2PosEmbed", "Krea2RotaryPosEmbed"), _FLUX),
    "WanRotaryPosEmbed": RotationFormat("pixels", "waves per head", False, torch.float64),
    "HunyuanVideoRotaryPosEmbed": RotationFormat("pixels", "waves", False, channels="rope_dim"),
    "MotifVideoRotaryPosEmbed": RotationFormat("pixels", "waves", False, torch.float64, "rope_dim"),
    "QwenEmbedRope": RotationFormat("shapes", "complex", False, channels="axes_dim"),
    "DINOv3ViTRopePositionEmbedding": RotationFormat("pixels", "rounded waves"),
    "PixtralVisionRotaryEmbedding": RotationFormat("coordinates", "rounded waves"),
    **{f"Qwen{name}VLVisionRotaryEmbedding": RotationFormat("coordinates") for name in ("2", "2_5_", "3")},
}


def find_rotations(model: nn.Module) -> list[nn.Module]:
    """Return the rotations of known classes in a model of diffusers or transformers, which must have some."""
    known = [part for part in model.modules() if type(part).__name__ in FORMATS]
    if rotations := [part for part in known if type(part).__module__.startswith(("diffusers.", "transformers."))]:
        return rotations
    raise ValueError(f"`model` must have one of the rotations {', '.join(FORMATS)}; got {type(model).__name__}.")


def rotation_of(model: nn.Module) -> tuple[Callable[[Tensor, tuple[int, int]], Tensor], int]:
    """Return the rotation of the images of a model of diffusers or transformers, and its number of channels, d.

    `RotationCode(*rotation_of(model))` takes both. The function maps queries, (B, heads, H * W, d), on the device of
    the model, and a grid (H, W) to rotated queries.
    """
    module = find_rotations(model)[0]

    def rotate(queries: Tensor, grid: tuple[int, int]) -> Tensor:
        with queries.device, evaluating(module):
            cosines, sines = module(*_arguments(module, grid, queries.dtype))
        if cosines.is_complex():
            cosines, sines = (part.repeat_interleave(2, -1) for part in (cosines.real, cosines.imag))
        table = torch.cat([sines, cosines], -1).flatten(0, -2)
        return PairRotation(table, FORMATS[type(module).__name__].half)(queries, queries)[0]

    return rotate, 2 * len(_frequencies(module))


def _frequencies(module: Any) -> Tensor:
    """Return the frequencies of a rotation, one per pair, (d / 2,), as it computes them, before a factor 2 pi."""
    if hasattr(module, "inv_freq"):  # of one axis, or of both in Pixtral
        return module.inv_freq.repeat(1 if type(module).__name__.startswith("Pixtral") else 2)
    known, base = FORMATS[type(module).__name__], getattr(module, "theta", 10_000.0)
    channels = getattr(module, known.channels) if known.channels else (module.t_dim, module.h_dim, module.w_dim)
    return torch.cat([1.0 / base ** (torch.arange(0, count, 2, dtype=known.dtype) / count) for count in channels])


def _patch(module: Any) -> Sequence[int]:
    """Return (frames, height, width) or (height, width) of a patch."""
    size = module.patch_size if hasattr(module, "patch_size") else module.config.patch_size
    sides = (size, size) if isinstance(size, int) else size
    return (module.patch_size_t, *sides) if hasattr(module, "patch_size_t") else sides


def _arguments(module: Any, grid: tuple[int, int], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the arguments of a call of a rotation for the patches of an image, row by row."""
    known, places = FORMATS[type(module).__name__], lattice(*map(torch.arange, grid))
    if known.inputs == "coordinates":
        return (F.pad(places, (1, len(module.axes_dim) - 3)),) if known.channels else (places.to(dtype), places)
    if known.inputs == "shapes":
        return [(1, *grid)], places.device, 0
    patch = _patch(module)
    sides = [side * size for side, size in zip((1, *grid)[-len(patch) :], patch, strict=True)]
    return (torch.zeros((), dtype=dtype).expand(1, 3, *sides),)


def _read(
    module: Any, first: Any, second: Any = None, max_txt_seq_len: Any = 0, **more: Any
) -> tuple[Any, Tensor, int]:
    """Return coordinates of tokens, or grids of images, of a call, a tensor like them, and the length of a text."""
    inputs = FORMATS[type(module).__name__].inputs
    if inputs == "pixels":
        sides = (side // size for side, size in zip(first.shape[2:], _patch(module), strict=True))
        return [Grid(*sides)], first, 0
    if inputs == "shapes":
        shapes = first[0] if isinstance(first, list) else first
        if isinstance(first, list) and any(sample != shapes for sample in first):
            raise ValueError(f"`img_shapes` must be the same for all samples, which have one rotation, got {first}.")
        grids = [Grid(*shape) for shape in (shapes if isinstance(shapes, list) else [shapes])]
        return grids, torch.empty(0, device=more.get("device", second)), int(max_txt_seq_len)
    return first if second is None else second, first, 0


class ReplacedRotation(nn.Module):
    """Stands where a model of another library keeps its rotation, and returns that of an encoding in the same form.

    Angles have the dtype that the model computes them in, also under autocast. A frequency that differs from one of the
    model by the rounding of that dtype is the model's, so that its own dialect gives the same outputs. The rotation
    that is replaced is no part of this module.
    """

    def __init__(self, encoding: PlaneRotary, replaced: nn.Module) -> None:
        super().__init__()
        self.encoding = encoding
        self.replaced = (replaced,)
        self.format = FORMATS[type(replaced).__name__]
        self.unit = 2 * torch.pi if hasattr(replaced, "num_patches_h") else 1.0  # of DINOv3, a factor of coordinates
        self._apply(lambda value: value)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Compute the frequency vectors, (d / 2, axes), float64, again, unless they are learned; none is cast."""
        nn.Module._apply(self, fn, recurse)
        self._fixed = None
        if not list(self.encoding.parameters()):
            vectors = self.encoding.vectors(torch.device("cpu")).flatten(0, -2)
            known = _frequencies(self.replaced[0]).cpu().double()[:, None] * self.unit
            is_same = (vectors / known - 1).abs() <= 16 * torch.finfo(self.format.dtype).eps
            device = next((value.device for value in self.encoding.buffers()), vectors.device)
            self._fixed = torch.where(is_same, known, vectors).to(_wide(device))
        return self

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Return what the replaced module returns for these arguments, for the angles of the encoding."""
        asked, like, texts = _read(self.replaced[0], *args, **kwargs)
        encoding, device, wide = self.encoding, like.device, _wide(like.device)
        dtype = self.format.dtype if wide == device else torch.float32
        if isinstance(asked, Tensor):
            lengths: Any = asked.to(wide, torch.float64).amax(0) + 1
            places = asked.to(dtype) + encoding.coordinates.offset
        else:
            lengths = [max(sides) for sides in zip(*(grid.shape for grid in asked), strict=True)]
            images = [encoding.coordinates(grid, wide, encoding.grid) for grid in asked]
            for count, image in enumerate(images):  # each is one later than the previous
                image[:, 0] += count
            shift = 0.0 if self.unit == 1 else 1.0  # DINOv3 subtracts 1 after it has rounded the rest
            places = (torch.cat(images) + shift).to(dtype).to(device) - shift
        places = encoding.noise(places) if encoding.noisy else places
        if texts:
            index = torch.arange(texts, dtype=dtype, device=device)[:, None]
            places = torch.cat([places, (places[:, 1:].amax() + 1 + index).expand(-1, places.shape[1])])
        vectors = encoding.vectors(wide).flatten(0, -2) if self._fixed is None else self._fixed.to(wide)
        scaling, outputs = encoding.scaling, self.format.outputs
        temperature, amplitudes = scaling.logit_factor(lengths, vectors), scaling.amplitudes(vectors, lengths)
        vectors = scaling.frequencies(vectors, lengths, encoding.series, getattr(encoding, "time", None))
        angles = linear(places * self.unit, (vectors / self.unit).to(dtype).to(device))
        sizes = torch.ones_like(angles) if amplitudes is None else amplitudes.to(angles).expand_as(angles)
        if temperature is not None:  # of logits, so half of it for queries, and half for keys
            sizes = sizes * temperature.sqrt().to(sizes)
        if outputs == "complex":
            return torch.polar(sizes, angles).split([len(angles) - texts, texts])
        dtype = like.dtype if outputs == "rounded waves" else torch.float32
        waves = [(wave * sizes).to(dtype) for wave in (angles.cos(), angles.sin())]
        waves = [torch.cat([wave, wave], -1) if self.format.half else wave.repeat_interleave(2, -1) for wave in waves]
        return tuple(wave[None, :, None] if outputs == "waves per head" else wave for wave in waves)


def _wide(device: torch.device) -> torch.device:
    """Return a device, or the CPU in place of one without float64."""
    return torch.device("cpu") if device.type in ("mps", "npu") else device


@checked
def set_rotary(model: Model, encoding: str | Spec | tuple[Spec, ...] | None) -> Model:
    """Replace the rotation of queries and keys of a model of diffusers or transformers, in place, and return the model.

    All else stays the same object, and the dialect that the model has gives the same outputs, bit by bit. As
    `save_pretrained` of the library saves no rotation, call this again once the model is loaded, before the parameters
    of a learned encoding are, `encoding...` at the name of the rotation.

    Args:
        model: FLUX, FLUX.2, Krea 2, Wan, HunyuanVideo, MotifVideo, Qwen-Image, DINOv3, Pixtral, Qwen2-VL, Qwen2.5-VL or
            Qwen3-VL, or a larger model with one of these.
        encoding: a rotary encoding for the axes of the model, such as "rope(preset='flux', scaling='yarn',
            reference=(1, 64, 64))" for (time, row, column). None restores the rotation that the model had.

    Raises:
        ValueError: if the model has no known rotation, or cannot use the encoding. It is then unchanged.
    """
    check_intact(model, "wrapped")
    parts: list[Any] = list(model.modules())
    rotations: dict[Any, Any] = {part: part.replaced[0] for part in parts if isinstance(part, ReplacedRotation)}
    if encoding is None and not rotations:
        raise ValueError(f"`encoding` must be given: {type(model).__name__} has its own rotation, got None.")
    device = next((value.device for value in model.parameters()), None)
    rotations = rotations or {part: part for part in find_rotations(model)}
    if model in rotations:
        raise ValueError(f"`model` must contain its rotation, got the rotation alone, {type(model).__name__}.")
    if encoding is not None:
        rotations = {part: _build(encoding, rotation) for part, rotation in rotations.items()}
    for parent in parts:
        for name, part in parent._modules.items():
            if part in rotations:  # the new one has its mode and shares its hooks
                vars(rotations[part]).update({key: value for key, value in vars(part).items() if "_hooks" in key})
                parent._modules[name] = rotations[part].train(part.training).to(device)
    return model


@torch.inference_mode(False)  # tensors of inference could never be trained
def _build(encoding: str | Spec | tuple[Spec, ...], replaced: nn.Module) -> ReplacedRotation:
    """Build the module that replaces a rotation, if the encoding has its form."""
    kind, specs = type(replaced).__name__, ENCODINGS.specs(encoding)
    text, layout = " + ".join(map(str, specs)), "half" if FORMATS[kind].half else "interleaved"
    asked, _, _ = _read(replaced, *_arguments(replaced, (1, 1), torch.float32))
    axes, channels = asked.shape[-1] if isinstance(asked, Tensor) else asked[0].ndim, 2 * len(_frequencies(replaced))
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
    if isinstance(asked, Tensor) and rotary.coordinates.coordinates != "patches":
        what = f"with {kind}, which gets those of tokens and no grid, got {rotary.coordinates.coordinates!r}."
        raise ValueError(f"`coordinates` must be 'patches' {what}")
    return ReplacedRotation(rotary, replaced)
