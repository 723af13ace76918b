"""Record vectors/: outputs of position code of many libraries, each from the library's own code.

`python -m evidence.vectors` needs transformers and diffusers, jax, tensorflow and opencv-python-headless; vectors of a
library that is not installed are kept. The formulas in vectors/formulas.py are not used here: the two are independent.
"""

from __future__ import annotations

import datetime
import importlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor

from evidence.vector_rotations import Row, draw, in_float64, rotations, texts
from graticule.system.files import write_bytes, write_text

GRID, DIM = (3, 5), 16


def part(model: str, name: str) -> Any:
    """Return a class or function of a model of transformers."""
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


def half(q: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Apply tables (1, N, d) of cosines and sines as transformers does: pairs (k, k + d / 2)."""
    return q * tables[0][0] + part("llama", "rotate_half")(q) * tables[1][0]


def of_mrope(model: str, name: str, positions: Tensor, sections: tuple[int, int, int]) -> Tensor:
    """Rotate queries by the M-RoPE of a text model of transformers."""
    parameters = {"rope_type": "default", "mrope_section": list(sections), "rope_theta": 10_000.0}
    config = getattr(importlib.import_module("transformers"), name.replace("RotaryEmbedding", "Config"))
    options = {"hidden_size": DIM, "num_attention_heads": 1, "head_dim": DIM, "rope_parameters": parameters}
    q = draw(positions.shape[1], DIM)
    return half(q, part(model, name.replace("2VLText", "2VL"))(config(**options))(q[None], positions[:, None]))


def of_index(model: str, name: str, parts: list[Any], step: float | None = None, merge_time: int = 1) -> Tensor:
    """Return the positions of texts, an image and the frames of a film by `get_rope_index`, (3, N)."""
    kind = part(model, name)
    config = kind.config_class()
    image, *films = [grid for grid in parts if not isinstance(grid, int)]
    times = {0: 1, 1: 1, 2: merge_time}
    codes = [0 if isinstance(piece, int) else 1 + (piece != image) for piece in parts]  # text, image, film
    counts = [int(np.prod(piece)) // (4 * times[code] if code else 1) for piece, code in zip(parts, codes, strict=True)]
    sequence = torch.repeat_interleave(torch.tensor(codes), torch.tensor(counts))[None]
    own = SimpleNamespace(config=config, get_vision_position_ids=partial(kind.get_vision_position_ids, None))
    film = [sum(time for time, _, _ in films), *films[0][1:]]
    more = {"second_per_grid_ts": [step / config.vision_config.tokens_per_second]} if step else {}
    grids = {"image_grid_thw": torch.tensor([image]), "video_grid_thw": torch.tensor([film])}
    return kind.get_rope_index(own, sequence, mm_token_type_ids=sequence, **grids, **more)[0][:, 0]


def rotary() -> Iterator[Row]:
    """Yield rotations of texts and of timm, and rotations and positions of texts with images."""
    from timm.layers import RotaryEmbeddingCat, apply_rot_embed_cat

    q = draw(7, DIM)
    config = importlib.import_module("transformers").LlamaConfig(hidden_size=DIM, num_attention_heads=1)
    rotated = half(q, part("llama", "LlamaRotaryEmbedding")(config)(q[None], torch.arange(7)[None]))
    yield "rope.half", "rotation", {"layout": "half"}, {"q": q}, rotated, "transformers, Llama"
    sin, cos = part("gptj", "create_sinusoidal_positions")(7, DIM)[None].chunk(2, -1)
    rotated = part("gptj", "apply_rotary_pos_emb")(q[None, :, None], sin, cos)[0, :, 0]
    yield "rope.interleaved", "rotation", {"layout": "interleaved"}, {"q": q}, rotated, "transformers, GPT-J"
    for name, parameters, options in (
        ("rope_vit", {"base": 100.0, "order": "xy"}, {"temperature": 100.0, "grid_indexing": "xy"}),
        ("perception_encoder", {"order": "xy", "offset": 1.0}, {"grid_indexing": "xy", "grid_offset": 1.0}),
        ("eva02", {"coordinates": "scaled", "reference": (16, 16)}, {"ref_feat_shape": (16, 16)}),
    ):
        q, rope = draw(15, DIM), RotaryEmbeddingCat(DIM, in_pixels=False, feat_shape=GRID, **options)
        parameters = {"grid": GRID, "layout": "interleaved"} | parameters
        rotated = apply_rot_embed_cat(q, rope.get_embed())
        yield f"rope.{name}", "rotation", parameters, {"q": q}, rotated, "timm, RotaryEmbeddingCat"
    at = torch.cartesian_prod(torch.arange(1), *map(torch.arange, GRID)).T + 3
    positions = torch.cat([torch.arange(3).expand(3, -1), at], 1)
    inputs = {"q": draw(18, DIM), "positions": positions}
    for name, model, source, split, arrangement in (
        ("chunked", "qwen2_vl", "Qwen2VLTextRotaryEmbedding", (2, 3, 3), "blocks"),
        ("interleaved", "qwen3_vl", "Qwen3VLTextRotaryEmbedding", (4, 2, 2), "alternating"),
    ):
        parameters = {"split": split, "arrangement": arrangement, "series": "pair"}
        rotated = of_mrope(model, source, positions, split)
        yield f"mrope.{name}", "rotation", parameters, inputs, rotated, f"transformers, {source}"
    film, frames = [3, (1, 4, 6), 2, (4, 4, 4), 2], [3, (1, 4, 6), 2, (1, 4, 4), 1, (1, 4, 4), 2]
    for model, name, parts, options in (
        ("qwen2_vl", "Qwen2VLModel", film, {}),
        ("qwen2_5_vl", "Qwen2_5_VLModel", film, {"step": 2.5}),
        ("qwen3_vl", "Qwen3VLModel", frames, {}),
        ("glm4v", "Glm4vModel", frames, {}),
        ("ernie4_5_vl_moe", "Ernie4_5_VLMoeModel", film, {"merge_time": 2}),
    ):
        parameters, source = {"parts": parts, "merge": 2} | options, f"transformers, {name}.get_rope_index"
        yield (
            f"mrope.positions.{model}",
            "mrope_positions",
            parameters,
            {},
            of_index(model, name, parts, **options),
            source,
        )


def tables() -> Iterator[Row]:
    """Yield sinusoids, relative indices and biases."""
    from timm.layers import gen_relative_log_coords, gen_relative_position_index

    config = part("vit_mae", "ViTMAEConfig")(hidden_size=DIM, num_attention_heads=1, image_size=28, patch_size=7)
    mae = part("vit_mae", "ViTMAEEmbeddings")(config)
    mae.initialize_weights()
    inputs, source = {"grid": (4, 4), "dim": DIM, "base": 10_000.0}, "transformers, ViTMAE"
    yield "sinusoid.mae", "sinusoid_mae", inputs, {}, mae.position_embeddings[0, 1:].detach(), source
    detr = part("detr", "DetrSinePositionEmbedding")(DIM // 2, normalize=True)
    table = detr((1, 3, *GRID), torch.device("cpu"), torch.float64).flatten(2)[0].mT
    yield "sinusoid.detr", "sinusoid_detr", inputs | {"grid": GRID}, {}, table, "transformers, DETR"
    halves = part("marian", "MarianSinusoidalPositionalEmbedding")(7, DIM).create_weight().chunk(2, -1)
    inputs, source = {"length": 7, "dim": DIM, "base": 10_000.0}, "transformers, Marian, sines and cosines interleaved"
    yield "sinusoid.text", "sinusoid", inputs, {}, torch.stack(halves, -1).flatten(1), source
    for name, prefix in (("swin", False), ("beit", True)):
        index, source = gen_relative_position_index(GRID, class_token=prefix), "timm, gen_relative_position_index"
        yield f"index.{name}", f"index_{name}", {"grid": GRID}, {}, index, source
    levit = importlib.import_module("timm.models.levit").Attention(8, 4, resolution=GRID).attention_bias_idxs
    yield "index.levit", "index_levit", {"grid": GRID}, {}, levit, "timm, levit.Attention"
    relative = torch.arange(40)[None] - torch.arange(40)[:, None]
    for name, both in (("encoder", True), ("decoder", False)):
        inputs = {"length": 40, "buckets": 16, "farthest": 30, "bidirectional": both}
        index = part("t5", "T5Attention")._relative_position_bucket(relative, both, 16, 30)
        yield f"buckets.t5.{name}", "buckets_t5", inputs, {}, index, "transformers, T5Attention"
    for name, trained in (("log.swin_v2", None), ("log.swin_v2.trained", (7, 7))):
        table = gen_relative_log_coords(GRID, trained or (0, 0), mode="swin")
        inputs = {"grid": GRID} | ({"trained": trained} if trained else {})
        yield name, "log_coordinates_swin_v2", inputs, {}, table, "timm, gen_relative_log_coords"
    for heads in (8, 12):
        slopes = part("bloom", "build_alibi_tensor")(torch.ones(1, 2), heads, torch.float64)[:, 0, 1]
        yield f"slopes.alibi.{heads}", "slopes_alibi", {"heads": heads}, {}, slopes, "transformers, BLOOM"
    sam = part("sam", "SamVisionAttention")
    own = SimpleNamespace(get_rel_pos=partial(sam.get_rel_pos, None))
    for name, (height, width) in (("bias.sam", (5, 9)), ("bias.sam.resampled", (7, 13))):
        q, rows, columns = draw(15, 4), draw(height, 4), draw(width, 4)
        bias = sam.get_decomposed_rel_pos(own, q[None], rows, columns, GRID, GRID).reshape(15, 15)
        inputs = {"q": q, "rows": rows, "columns": columns}
        yield name, "bias_decomposed", {"grid": GRID}, inputs, bias, "transformers, SamVisionAttention"


def resized(table: np.ndarray[Any, Any], size: tuple[int, int], how: str) -> np.ndarray[Any, Any]:
    """Resample a table (H, W, C) by a library: 'torch', 'PIL', 'OpenCV', 'JAX' or 'TensorFlow', and a kernel."""
    library, kernel, *options = how.split()
    if library == "torch":
        arguments: dict[str, Any] = {name: name.split("_")[-1] in options for name in ("align_corners", "antialias")}
        x = torch.from_numpy(table).permute(2, 0, 1)[None]
        if "steps" in options:
            scale = tuple((to + 0.1) / side for to, side in zip(size, table.shape[:2], strict=True))
            arguments, size = {"scale_factor": scale, "recompute_scale_factor": False}, None
        return torch.nn.functional.interpolate(x, size, mode=f"bi{kernel}", **arguments)[0].permute(1, 2, 0).numpy()
    if library == "PIL":
        from PIL import Image

        filters = {"linear": Image.Resampling.BILINEAR, "cubic": Image.Resampling.BICUBIC}
        planes = [Image.fromarray(plane).resize(size[::-1], filters[kernel]) for plane in np.moveaxis(table, -1, 0)]
        return np.stack([np.asarray(plane) for plane in planes], -1)
    if library == "OpenCV":
        import cv2

        return cv2.resize(table, size[::-1], interpolation=getattr(cv2, f"INTER_{kernel.upper()}"))
    if library == "JAX":
        import jax

        jax.config.update("jax_enable_x64", True)
        return np.asarray(jax.image.resize(table, (*size, table.shape[-1]), kernel, antialias="antialias" in options))
    import tensorflow

    return tensorflow.image.resize(table, size, f"bi{kernel}", antialias="antialias" in options).numpy()


_LINEAR, _CUBIC, _KEYS = {"kernel": "linear"}, {"kernel": "cubic", "a": -0.75}, {"kernel": "cubic", "a": -0.5}
_INSIDE, _WIDENED = {"border": "renormalize"}, {"antialias": True, "border": "renormalize"}
#: How a library resamples -> the parameters that describe it.
RESAMPLING: dict[str, dict[str, Any]] = {
    "torch linear": _LINEAR,
    "torch linear corners": _LINEAR | {"corners": True},
    "torch linear antialias": _LINEAR | _WIDENED,
    "torch cubic": _CUBIC,
    "torch cubic corners": _CUBIC | {"corners": True},
    "torch cubic antialias": _KEYS | _WIDENED,
    "torch cubic steps": _CUBIC,
    "PIL linear": _LINEAR | _WIDENED,
    "PIL cubic": _KEYS | _WIDENED,
    "OpenCV linear": _LINEAR,
    "OpenCV cubic": _CUBIC,
    "JAX linear antialias": _LINEAR | _WIDENED,
    "JAX linear": _LINEAR | _INSIDE,
    "JAX cubic antialias": _KEYS | _WIDENED,
    "JAX cubic": _KEYS | _INSIDE,
    "TensorFlow linear": _LINEAR,
    "TensorFlow cubic": _KEYS | _INSIDE | {"offsets": 1024},
    "TensorFlow cubic antialias": _KEYS | _WIDENED,
}
#: What is computed from float32 weights, whatever its own dtype is.
WEIGHTS_IN_FLOAT32 = ("sinusoid.text", "resample.opencv")
#: The names of packages that differ from those of libraries.
PACKAGES = {"OpenCV": "opencv-python-headless", "PIL": "pillow", "JAX": "jax", "TensorFlow": "tensorflow-cpu"}


def resampling() -> Iterator[Row]:
    """Yield tables of positions and of displacements at other sizes."""
    for how, parameters in RESAMPLING.items():
        for size in ((7, 9), (3, 2), (8, 3)):
            single = how.startswith(("PIL", "TensorFlow"))
            table, options = draw(5, 6, 2).numpy().astype("float32" if single else "float64"), dict(parameters)
            if how.endswith("steps"):  # DINO and DINOv2 pass a scale of (new side + 0.1) / side
                options["steps"] = [side / (to + 0.1) for to, side in zip(size, table.shape[:2], strict=True)]
            name = f"resample.{how.replace(' ', '.').lower()}.{size[0]}x{size[1]}"
            output = partial(resized, table, size, how)
            yield name, "resample", {"size": size} | options, {"table": table}, output, how.split()[0]
    timm = importlib.import_module("timm.layers")
    table, window, offsets, size = draw(4, 4, 2), draw(2, 2, 2), draw(5, 5, 2), (8, 12)
    flat = table.reshape(1, 16, 2)
    larger = timm.resample_abs_pos_embed(flat, size, num_prefix_tokens=0).reshape(*size, 2)
    parameters, inputs = {"size": size} | _KEYS | _WIDENED, {"table": table}
    yield "resample.timm", "resample", parameters, inputs, larger, "timm, resample_abs_pos_embed"
    larger = part("sam3", "Sam3ViTEmbeddings")._tile_position_embeddings(None, flat, 6, 9).reshape(6, 9, 2)
    yield "resample.sam3", "resample_tiled", {"size": (6, 9)}, inputs, larger, "transformers, Sam3ViTEmbeddings"
    whole, tile = (value.permute(2, 0, 1)[None] for value in (table, window))
    inputs = {"table": table, "window": window}
    sam2 = SimpleNamespace(pos_embed=whole, pos_embed_window=tile)
    larger = importlib.import_module("timm.models.hieradet_sam2").HieraDet._pos_embed(sam2, torch.zeros(1, *size, 2))[0]
    parameters = {"size": size, "a": -0.75, "antialias": False, "border": "repeat"}
    yield "resample.sam2", "resample_windowed", parameters, inputs, larger, "timm, HieraDet"
    hiera = SimpleNamespace(pos_embed=whole, pos_embed_win=tile, mask_spatial_shape=(4, 6))
    larger = importlib.import_module("timm.models.hiera").Hiera._pos_embed(hiera, torch.zeros(1, 96, 2))
    larger, parameters = larger.reshape(*size, 2), {"size": size, "a": -0.5} | _WIDENED
    yield "resample.hiera", "resample_windowed", parameters, inputs, larger, "timm, Hiera"
    size, flat = (7, 9), offsets.reshape(25, 2)
    larger = timm.resize_rel_pos_bias_table(flat, (4, 5), (63, 2)).reshape(*size, 2)
    inputs, source = {"table": offsets}, "timm, resize_rel_pos_bias_table"
    yield "resample.beit", "resample_geometric", {"size": size}, inputs, larger, source
    larger = timm.resize_rel_pos_bias_table_simple(flat, (4, 5), (63, 2)).reshape(*size, 2)
    yield "resample.swin", "resample", {"size": size} | _CUBIC, inputs, larger, f"{source}_simple"


def record(folder: Path) -> list[Path]:
    """Write the vectors and their description; returns the paths."""
    sys.path.insert(0, str(folder))
    from verify import CONVENTIONS, vectors

    known = {name: (about, inputs, outputs) for name, about, inputs, outputs in vectors()}
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    names: dict[tuple[Any, ...], str] = {}

    def store(name: str, value: Any) -> str:
        """Store an array under a name, unless there is an equal one; returns its name."""
        array = np.ascontiguousarray(value)
        own = names.setdefault((array.dtype.str, array.shape, array.tobytes()), name)
        tensors.setdefault(own, array)
        return own

    described: dict[str, Any] = {}
    for rows in (rotary, rotations, texts, tables, resampling):
        with in_float64():
            for name, convention, parameters, inputs, output, source in rows():
                library = source.partition(",")[0]
                try:
                    array = np.asarray(output() if callable(output) else output)
                    source = source.replace(library, f"{library} {version(PACKAGES.get(library, library))}", 1)
                except ImportError:
                    about, inputs, ((_, array),) = (*known[name][:2], known[name][2].items())
                    source = about["source"]
                    print(f"{name} is kept: {library} is not installed")
                inputs = {key: np.asarray(value) for key, value in inputs.items()}
                (key,) = CONVENTIONS[convention](**inputs, **parameters)  # its name alone
                single = name.startswith(WEIGHTS_IN_FLOAT32) or array.dtype == np.float32
                described[name] = {
                    "convention": convention,
                    "parameters": parameters,
                    "inputs": {key: store(f"inputs.{len(tensors)}", value) for key, value in inputs.items()},
                    "outputs": {key: store(f"{name}.{key}", array)},
                    "dtype": "float32" if single else "float64",
                    "source": source,
                }
    formulas = {name: function.__doc__ for name, function in CONVENTIONS.items()}
    lines = [f" {json.dumps(name)}: {json.dumps(about, ensure_ascii=False)}" for name, about in described.items()]
    head = json.dumps({"recorded": f"{datetime.date.today()}", "conventions": formulas}, indent=1, ensure_ascii=False)
    text = f'{head[:-2]},\n "vectors": {{\n' + ",\n".join(lines) + "\n}\n}\n"
    return [write_bytes(folder / "vectors.safetensors", save(tensors)), write_text(folder / "vectors.json", text)]


if __name__ == "__main__":
    print("wrote", *record(Path(__file__).parents[1] / "vectors"))
