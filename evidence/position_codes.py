"""Position code of timm, transformers and diffusers, as `graticule.testing` takes it: name -> function that builds it.

A name is LIBRARY.MODULE.CLASS. `rotations_of_transformers()` and `rotations_of_diffusers()` have the rotations of
vision encoders and of diffusion transformers; each value builds a `RotationCode`, and raises if the class is another.
diffusers, an optional package, is imported when a code of it is built.
"""

from __future__ import annotations

import ast
import csv
import importlib
import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graticule.testing.pairs import RotationCode
from graticule.testing.tables import PositionCode

Size = tuple[int, int]
Build = Callable[[], PositionCode]


class NoInterface(Exception):
    """A class has an interface that no function here calls; the message says which."""


def classes(library: str, pattern: str, method: str = "") -> dict[str, str]:
    """Return LIBRARY.FOLDER.CLASS -> MODULE of the classes of a library with a name of a pattern and a method."""
    spec, names = find_spec(library), {}
    if spec is None or spec.origin is None:
        return {}
    root = Path(spec.origin).parent
    for file in sorted(root.glob("models/**/*.py")):
        module = ".".join([library, *file.relative_to(root).with_suffix("").parts])
        text = file.read_text(encoding="utf-8")
        for name, body in re.findall(rf"^class ({pattern})[(:]([^\0]*?)(?=^\S|\Z)", text, re.MULTILINE):
            if ".modular_" not in module and method in body:
                folder = re.sub(r"transformers\.transformer_|\.modeling_\w+$", "", module.partition(".models.")[2])
                names[f"{library}.{folder}.{name}"] = module
    return names


def part(module: str, name: str) -> Any:
    """Return a class or function of a module."""
    return getattr(importlib.import_module(module), name)


# transformers

#: Vision rotations of transformers by the names of their classes.
_VISION = r"\w*(?:Vision(?!Text)|ViT|MLCD|Sapiens2|EomtDinov3)\w*(?:Rotary|Rope)\w*Embedding"
#: Functions of a module of transformers that apply cosines and sines, the first that it has.
_APPLY = (
    "apply_rotary_pos_emb_vision apply_rotary_pos_emb apply_rotary_pos_emb_2d apply_rotary_pos_emb_2d_self_attn "
    "vision_apply_rotary_emb apply_vision_rotary_emb apply_rope"
)
#: Options of configurations, so that the channels of a head are not more than needed.
_CONFIG = {"memory_attention_hidden_size": 64}


def configuration(kind: type, **options: Any) -> Any:
    """Return a configuration for a class of transformers, the type of its first argument."""
    config = next((argument.annotation for argument in inspect.signature(kind).parameters.values()), inspect._empty)
    if config is inspect.Parameter.empty:
        raise NoInterface("its first argument has no type")
    if not isinstance(config, type):
        config = getattr(inspect.getmodule(kind), str(config).strip("'\"").rpartition(".")[2])
    known = config()
    return config(**{key: value for key, value in options.items() if hasattr(known, key)})


def _rotation_of_transformers(module: str, name: str) -> RotationCode:
    """Return the rotation of a class whose output are cosines and sines of positions, or of pixels."""
    kind, home = part(module, name), importlib.import_module(module)
    config = configuration(kind, **_CONFIG)
    rope, source = kind(config).eval(), Path(str(home.__file__)).read_text(encoding="utf-8")
    apply = next((getattr(home, function) for function in _APPLY.split() if hasattr(home, function)), None)
    if apply is None:
        raise NoInterface("its module has no function that applies cosines and sines")
    inputs = list(inspect.signature(rope.forward).parameters)

    def tables(like: Tensor, grid: Size) -> list[Tensor]:
        at = positions(grid, time="self.include_temporal = True" in source, columns_first="[wpos_ids." in source)
        if inputs == ["pixel_values"]:
            waves = rope(torch.zeros(1, 3, *(side * config.patch_size for side in grid), dtype=like.dtype))
        else:
            waves = rope(like, at)
        return [table.reshape(-1, table.shape[-1]) for table in waves]

    def rotate_packed(queries: Tensor, grid: Size) -> Tensor:
        cos, sin = tables(queries, grid)
        tokens = queries.movedim(2, 0).flatten(1, 2)  # (N, B * heads, d), as of one packed row
        return apply(tokens, tokens, cos, sin)[0].unflatten(1, queries.shape[:2]).movedim(0, 2)

    def rotate_heads(queries: Tensor, grid: Size) -> Tensor:
        return apply(queries, queries, *tables(queries, grid))[0]

    probe = torch.zeros(2, 3, 4 * 5, tables(torch.zeros(1), (4, 5))[0].shape[-1])
    for rotate in (rotate_heads, rotate_packed):
        with suppress(RuntimeError, TypeError, ValueError, IndexError):
            if rotate(probe, (4, 5)).shape == probe.shape:
                return RotationCode(rotate, probe.shape[-1])
    raise NoInterface("its function of cosines and sines takes or returns another shape")


def positions(grid: Size, time: bool = False, columns_first: bool = False) -> Tensor:
    """Return the places of patches as transformers passes them to vision encoders, (N, 2), or (N, 3) with a time."""
    from transformers.vision_utils import get_vision_position_ids

    places = get_vision_position_ids(torch.tensor([[1, *grid]]), 1, include_temporal=time)
    return places.flip(-1) if columns_first else places


def _rotation_of_llama4(module: str) -> RotationCode:
    """Return the rotation of Llama 4, whose tables are square and have the class token last."""
    config = part(module, "Llama4VisionConfig")

    def rotate(queries: Tensor, grid: Size) -> Tensor:
        if grid[0] != grid[1]:
            raise NoInterface("its tables are square")
        channels = queries.shape[-1]
        rope = part(module, "Llama4VisionRotaryEmbedding")(
            config(hidden_size=channels, num_attention_heads=1, image_size=7 * grid[0], patch_size=7)
        )
        x = torch.cat([queries, torch.zeros_like(queries[:, :, :1])], 2).transpose(1, 2)
        return part(module, "vision_apply_rotary_emb")(x, x, rope(x))[0].transpose(1, 2)[:, :, :-1]

    return RotationCode(rotate, 16, grids=((6, 6), (12, 12)))


def _rotation_of_gemma4(module: str) -> RotationCode:
    """Return the rotation of Gemma 4, which gets the places of patches again when it is applied."""
    kind, apply = part(module, "Gemma4VisionRotaryEmbedding"), part(module, "apply_multidimensional_rope")
    rope = kind(configuration(kind)).eval()

    def rotate(queries: Tensor, grid: Size) -> Tensor:
        at = positions(grid, columns_first=True)[None]
        return apply(queries.transpose(1, 2), *rope(queries, at), at).transpose(1, 2)

    return RotationCode(rotate, rope(torch.zeros(1), positions((2, 3))[None])[0].shape[-1])


def _rotation_of_vjepa2(module: str) -> RotationCode:
    """Return the rotation of V-JEPA 2 on two axes of a frame."""
    rotate_channels = part(module, "rotate_queries_or_keys")

    def rotate(queries: Tensor, grid: Size) -> Tensor:
        y, x = torch.meshgrid(*map(torch.arange, grid), indexing="ij")
        halves = zip(queries.chunk(2, -1), (y.flatten(), x.flatten()), strict=True)
        return torch.cat([rotate_channels(channels, at) for channels, at in halves], -1)

    return RotationCode(rotate, 32)


_OTHERS: dict[str, Callable[[str], RotationCode]] = {
    "Gemma4VisionRotaryEmbedding": _rotation_of_gemma4,
    "Llama4VisionRotaryEmbedding": _rotation_of_llama4,
    "VJEPA2RopeAttention": _rotation_of_vjepa2,
}


def rotations_of_transformers() -> dict[str, Build]:
    """Return the rotations of all vision encoders of the installed transformers."""
    builds: dict[str, Build] = {}
    for name, module in classes("transformers", f"{_VISION}|{'|'.join(_OTHERS)}").items():
        kind = name.rpartition(".")[2]
        builds[name] = partial(_OTHERS.get(kind, partial(_rotation_of_transformers, name=kind)), module)
    return builds


# timm


_TIMM: dict[str, dict[str, Any]] = {
    "RotaryEmbedding": {"in_pixels": False},
    "RotaryEmbeddingCat": {"in_pixels": False},
    "RotaryEmbeddingDinoV3": {},
    "RotaryEmbeddingMRope": {"mrope_section": (4, 6, 6)},
    "RotaryEmbeddingMixed": {"depth": 1, "num_heads": 1},
}


def _rotation_of_timm(name: str) -> RotationCode:
    """Return the rotation of a class of timm, of one layer and head."""
    layers, channels = importlib.import_module("timm.layers"), 32
    rope = getattr(layers, name)(channels, **_TIMM[name])

    def rotate(queries: Tensor, grid: Size) -> Tensor:
        table = rope.get_embed(list(grid))
        table = torch.cat(table, -1) if isinstance(table, tuple) else table.reshape(-1, 2 * channels)
        half = getattr(rope, "rotate_half", "MRope" in name)
        return layers.apply_rot_embed_cat(queries, table.to(queries.dtype), half=half)

    return RotationCode(rotate, channels)


def rotations_of_timm() -> dict[str, Build]:
    """Return the rotations of the installed timm."""
    return {f"timm.{name}": partial(_rotation_of_timm, name) for name in _TIMM}


# diffusers

Rotate = Callable[[str, Tensor, Any], Tensor]


def places(grid: Size, axes: int = 3, offset: int = 0) -> Tensor:
    """Return the coordinates of patches on the second and third of `axes`, (N, axes)."""
    coordinates = torch.zeros(*grid, axes)
    coordinates[..., 1], coordinates[..., 2] = torch.arange(grid[0])[:, None], torch.arange(grid[1])[None]
    return coordinates.flatten(0, 1) + offset


def _axes(grid: Size) -> tuple[Tensor, ...]:
    return torch.arange(1), torch.arange(grid[0]), torch.arange(grid[1])


#: Name -> the input, or inputs, of a rotation for a grid.
_INPUTS: dict[str, Callable[[Size], Any]] = {
    "places": places,
    "places on four axes": partial(places, axes=4),
    "whole places": lambda grid: places(grid).long(),
    "batch of places": lambda grid: places(grid)[None],
    "distant places": lambda grid: places(grid, offset=65_536)[None],
    "pixels": lambda grid: torch.zeros(1, 16, *grid),
    "image": lambda grid: torch.zeros(1, 16, 2 * grid[0], 2 * grid[1]),
    "video": lambda grid: torch.zeros(1, 16, 1, 2 * grid[0], 2 * grid[1]),
    "seconds": lambda grid: (torch.zeros(1, 1, 1), 1, *grid, (8 / 25, 32, 32)),
    "shape": lambda grid: ((1, *grid), torch.device("cpu"), 4),
    "axes": lambda grid: (_axes(grid),),
    "shape and axes": lambda grid: ((1, 1, *grid), _axes(grid)),
}


def _by_waves(module: str, queries: Tensor, tables: Any, layout: int = -1) -> Tensor:
    """Apply cosines and sines to some or all channels: -1 for pairs of neighbors, -2 for halves."""
    cos, sin = (table.reshape(-1, table.shape[-1]).to(queries.dtype) for table in tables)
    turned, others = queries.split([cos.shape[-1], queries.shape[-1] - cos.shape[-1]], -1)
    apply = part("diffusers.models.embeddings", "apply_rotary_emb")
    turned = apply(turned, (cos, sin), use_real=True, use_real_unbind_dim=layout).type_as(queries)
    return torch.cat([turned, others], -1)


def _by_phases(module: str, queries: Tensor, phases: Any) -> Tensor:
    """Multiply pairs of neighbors by complex numbers, with the function of the module if there is one."""
    names = [name for name in dir(importlib.import_module(module)) if re.match("_?apply_rotary_emb_", name)]
    if names:
        x = queries.transpose(1, 2).float()
        return part(module, names[0])(x, phases[0], use_real=False).transpose(1, 2).type_as(queries)
    numbers = torch.view_as_complex(queries.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(numbers * phases).flatten(-2).type_as(queries)


def _by_matrices(module: str, queries: Tensor, matrices: Any) -> Tensor:
    """Multiply pairs of neighbors by matrices, (..., d / 2, 2, 2)."""
    matrices = matrices.reshape(-1, queries.shape[-1] // 2, 2, 2).float()
    return (matrices * queries.unflatten(-1, (-1, 1, 2)).float()).sum(-1).flatten(-2).type_as(queries)


def _by_angles(module: str, queries: Tensor, angles: Any) -> Tensor:
    """Rotate halves by angles, as the attention of ERNIE-Image does."""
    x = queries.transpose(1, 2)
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return (x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)).transpose(1, 2)


#: Name -> the function that applies the output of a rotation.
_APPLIED: dict[str, Rotate] = {
    "waves": _by_waves,
    "waves of halves": partial(_by_waves, layout=-2),
    "phases": _by_phases,
    "matrices": _by_matrices,
    "angles": _by_angles,
}
with Path(__file__).with_name("rotations_of_diffusers.csv").open(encoding="utf-8") as _file:
    #: MODULE.CLASS -> its arguments, its input, channels of a head, and how its output is applied.
    _DIFFUSERS = {cells["class"]: cells for cells in csv.DictReader(_file)}
#: Classes of diffusers that rotate, without classes of texts and of sound.
_DIFFUSION = r"(?!\w*(?:Audio|Music|Text|1D))\w*(?:Rotary|Rope|RoPE|PosEmbed|EmbedND)\w*"


def _rotation_of_diffusers(module: str, name: str) -> RotationCode:
    if name not in _DIFFUSERS:
        raise NoInterface(f"no function here calls its interface, in {module}")
    cells = _DIFFUSERS[name]
    inputs, apply = _INPUTS[cells["input"]], _APPLIED[cells["applied"]]
    rope = part(module, name.partition(".")[2].partition("(")[0])(*ast.literal_eval(f"({cells['arguments']})"))

    def rotate(queries: Tensor, grid: Size) -> Tensor:
        given = inputs(grid)
        return apply(module, queries, rope(*given) if isinstance(given, tuple) else rope(given))

    return RotationCode(rotate, int(cells["channels"]))


def rotations_of_diffusers() -> dict[str, Build]:
    """Return the rotations of all transformers of the installed diffusers, and none without it."""
    modules = {name: module for name, module in classes("diffusers", _DIFFUSION).items() if ".transformers." in module}
    others = [f"diffusers.{name}" for name in _DIFFUSERS if name.endswith(")")]  # with other options
    modules |= {name: modules[key] for name in others if (key := name.partition("(")[0]) in modules}
    return {name: partial(_rotation_of_diffusers, module, name.partition(".")[2]) for name, module in modules.items()}


def rotations() -> dict[str, Build]:
    """Return the rotations of the three libraries."""
    return {**rotations_of_timm(), **rotations_of_transformers(), **rotations_of_diffusers()}
