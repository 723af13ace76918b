"""Rotations of models of diffusers and transformers: the classes that compute them, and a module that replaces them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.external.images import evaluating
from graticule.position.grid import Grid
from graticule.position.places import lattice
from graticule.position.rotation import PairRotation


class Request(NamedTuple):
    """What a call of a rotation asks for.

    places: the coordinates of tokens, (N, axes), or the grids of images, each of which is one later on the first axis.
    like: a tensor of the device and dtype of the tokens.
    texts: number of further tokens, whose coordinates on all axes continue those of the images.
    """

    places: Tensor | Sequence[Grid]
    like: Tensor
    texts: int = 0


@dataclass(frozen=True)
class RotationFormat:
    """What a class of another library gets and returns as the rotation of queries and keys.

    frequencies: maps a module to its frequencies, one per pair, (d / 2,), as that computes them.
    arguments: maps a module, a grid (height, width) and a dtype to the arguments of a call.
    read: maps a module and the arguments of a call to what is asked for.
    write: maps angles, (N, d / 2), and the magnitude of the rotation, or None, to cosines and sines, complex numbers or
        matrices.
    half: whether channel i forms a pair with i + d / 2 instead of its neighbor.
    dtype: the dtype of its angles, on devices that have it.
    rounded: whether what it returns has the dtype of the tokens.
    unit: a factor of coordinates, applied before frequencies.
    """

    frequencies: Callable[[Any], Tensor]
    arguments: Callable[[Any, Sequence[int], torch.dtype], tuple[Any, ...]]
    read: Callable[..., Request]
    write: Callable[[RotationFormat, Tensor, Tensor | None, Request], Any]
    half: bool = True
    dtype: torch.dtype = torch.float32
    rounded: bool = False
    unit: float = 1.0


def find_rotations(model: nn.Module) -> Iterator[tuple[str, nn.Module, RotationFormat]]:
    """Yield the rotations of known classes in a model of diffusers or transformers: name, module and format."""
    for name, module in model.named_modules():
        library, kind = type(module).__module__.partition(".")[0], type(module).__name__
        if library in ("diffusers", "transformers") and kind in FORMATS:
            yield name, module, FORMATS[kind]


def rotation_of(model: nn.Module) -> tuple[Callable[[Tensor, tuple[int, int]], Tensor], int]:
    """Return the rotation of the images of a model of diffusers or transformers, found by its class, and its channels.

    `RotationCode(*rotation_of(model))` takes both. The function maps queries, (B, heads, H * W, d), on the device of
    the model, and a grid (H, W) to rotated queries; d is the number of channels.

    Raises:
        ValueError: if the model has no rotation of a known class.
    """
    _, module, known = next(find_rotations(model), ("", None, None))
    if module is None or known is None:
        raise ValueError(_no_rotation(model))

    def rotate(queries: Tensor, grid: tuple[int, int]) -> Tensor:
        with queries.device, evaluating(module):
            outputs = module(*known.arguments(module, grid, queries.dtype))
        return PairRotation(_as_table(outputs), known.half)(queries, queries)[0]

    return rotate, 2 * len(known.frequencies(module))


def _no_rotation(model: nn.Module) -> str:
    return f"`model` must have a rotation of {', '.join(FORMATS)}, got {type(model).__name__}, which has none of them."


def _as_table(outputs: Any) -> Tensor:
    """Return the sines, then cosines, of each channel, (N, 2d), that a call of a rotation returned."""
    if isinstance(outputs, Tensor):  # matrices
        waves = [outputs[..., row, 0].repeat_interleave(2, -1) for row in (1, 0)]
    elif outputs[0].is_complex():
        waves = [part.repeat_interleave(2, -1) for part in (outputs[0].imag, outputs[0].real)]
    else:
        waves = [outputs[1], outputs[0]]
    return torch.cat(waves, -1).flatten(0, -2)


def _waves(known: RotationFormat, angles: Tensor, magnitude: Tensor | None, request: Request) -> tuple[Tensor, ...]:
    """Return cosines and sines of each channel, (N, d) each."""
    waves = [wave if magnitude is None else wave * magnitude for wave in (angles.cos(), angles.sin())]
    waves = [wave.to(request.like.dtype if known.rounded else torch.float32) for wave in waves]
    return tuple(torch.cat([wave, wave], -1) if known.half else wave.repeat_interleave(2, -1) for wave in waves)


def _waves_per_head(*arguments: Any) -> tuple[Tensor, ...]:
    """Return cosines and sines of each channel, (1, N, 1, d) each."""
    return tuple(wave[None, :, None] for wave in _waves(*arguments))


def _complex(known: RotationFormat, angles: Tensor, magnitude: Tensor | None, request: Request) -> tuple[Tensor, ...]:
    """Return complex numbers of images and of texts, (N, d / 2) each."""
    lengths = torch.ones_like(angles) if magnitude is None else magnitude.expand_as(angles)
    return torch.polar(lengths, angles).split([len(angles) - request.texts, request.texts])


def _series(base: float, channels: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the frequencies of axes with some channels each, as diffusers computes them."""
    return torch.cat([1.0 / base ** (torch.arange(0, count, 2, dtype=dtype) / count) for count in channels])


def _index(module: Any, grid: Sequence[int], dtype: torch.dtype) -> tuple[Any, ...]:
    return torch.zeros(1, dtype=dtype), lattice(*map(torch.arange, grid))


def _patch(module: Any) -> Sequence[int]:
    """Return (frames, height, width) or (height, width) of a patch."""
    if hasattr(module, "patch_size_t"):
        return module.patch_size_t, module.patch_size, module.patch_size
    size = module.patch_size if hasattr(module, "patch_size") else module.config.patch_size
    return (size, size) if isinstance(size, int) else size


def _pixels(module: Any, grid: Sequence[int], dtype: torch.dtype) -> tuple[Any, ...]:
    patch = _patch(module)
    sides = [side * size for side, size in zip((1, *grid)[-len(patch) :], patch, strict=True)]
    return (torch.zeros((), dtype=dtype).expand(1, 3, *sides),)


def _read_pixels(module: Any, pixels: Tensor) -> Request:
    sides = (side // size for side, size in zip(pixels.shape[2:], _patch(module), strict=True))
    return Request([Grid(*sides)], pixels)


def _read_shapes(module: Any, video_fhw: Any, device: Any = None, max_txt_seq_len: Any = 0) -> Request:
    shapes = video_fhw[0] if isinstance(video_fhw, list) else video_fhw
    shapes = shapes if isinstance(shapes, list) else [shapes]
    return Request([Grid(*shape) for shape in shapes], torch.empty(0, device=device), int(max_txt_seq_len))


_FLUX = RotationFormat(
    lambda module: _series(module.theta, module.axes_dim, torch.float64),
    lambda module, grid, dtype: (F.pad(lattice(*map(torch.arange, grid)), (1, len(module.axes_dim) - 3)),),
    lambda module, ids: Request(ids, ids),
    *(_waves, False, torch.float64),
)
_WAN = RotationFormat(
    lambda module: _series(10_000.0, (module.t_dim, module.h_dim, module.w_dim), torch.float64),
    *(_pixels, _read_pixels, _waves_per_head, False, torch.float64),
)
_HUNYUAN_VIDEO = RotationFormat(
    lambda module: _series(module.theta, module.rope_dim, torch.float32), _pixels, _read_pixels, _waves, False
)
_QWEN_IMAGE = RotationFormat(
    lambda module: _series(module.theta, module.axes_dim, torch.float32),
    lambda module, grid, dtype: ([(1, *grid)], torch.empty(0).device, 0),
    *(_read_shapes, _complex, False),
)
_DINOV3 = RotationFormat(
    lambda module: module.inv_freq.repeat(2), _pixels, _read_pixels, _waves, rounded=True, unit=2 * torch.pi
)
_PIXTRAL = RotationFormat(
    lambda module: module.inv_freq,
    _index,
    lambda module, x, position_ids: Request(position_ids, x),
    _waves,
    rounded=True,
)
_QWEN_VL = RotationFormat(
    lambda module: module.inv_freq.repeat(2), _index, lambda module, x, position_ids: Request(position_ids, x), _waves
)
#: Name of a class -> what it gets and returns.
FORMATS: dict[str, RotationFormat] = {
    **dict.fromkeys(("FluxPosEmbed", "Flux2PosEmbed", "Krea2RotaryPosEmbed"), _FLUX),
    "WanRotaryPosEmbed": _WAN,
    **dict.fromkeys(("HunyuanVideoRotaryPosEmbed", "MotifVideoRotaryPosEmbed"), _HUNYUAN_VIDEO),
    "QwenEmbedRope": _QWEN_IMAGE,
    "DINOv3ViTRopePositionEmbedding": _DINOV3,
    "PixtralVisionRotaryEmbedding": _PIXTRAL,
    **dict.fromkeys((f"Qwen{name}VLVisionRotaryEmbedding" for name in ("2", "2_5_", "3")), _QWEN_VL),
}
