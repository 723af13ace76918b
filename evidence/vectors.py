"""Record vectors/: outputs of position code of many libraries, each from the library's own code.

`python -m evidence.vectors` needs transformers and diffusers, jax, tensorflow and opencv-python-headless; vectors of a
library that is not installed are kept. Convention, parameters, dtype and source of a vector are declared in
vectors/vectors.json, a new one there first; its inputs and outputs are computed here, without the formulas in
vectors/formulas.py, so that the two are independent.
"""

from __future__ import annotations

import datetime
import importlib
import json
import re
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

from evidence.vector_rotations import DECLARED, VECTORS, Row, draw, in_float64, rotations, texts
from graticule.system.files import write_bytes, write_text

GRID, DIM = (3, 5), 16


def part(model: str, name: str) -> Any:
    """Return a class or function of a model of transformers."""
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


def half(q: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Apply tables (1, N, d) of cosines and sines as transformers does: pairs (k, k + d / 2)."""
    return q * tables[0][0] + part("llama", "rotate_half")(q) * tables[1][0]


def of_mrope(model: str, name: str, positions: Tensor, sections: list[int]) -> Tensor:
    """Rotate queries by the M-RoPE of a text model of transformers."""
    parameters = {"rope_type": "default", "mrope_section": sections, "rope_theta": 10_000.0}
    config = getattr(importlib.import_module("transformers"), name.replace("RotaryEmbedding", "Config"))
    options = {"hidden_size": DIM, "num_attention_heads": 1, "head_dim": DIM, "rope_parameters": parameters}
    q = draw(positions.shape[1], DIM)
    return half(q, part(model, name.replace("2VLText", "2VL"))(config(**options))(q[None], positions[:, None]))


def of_index(
    model: str, name: str, parts: list[Any], merge: int, step: float | None = None, merge_time: int = 1
) -> Tensor:
    """Return the positions of texts, an image and the frames of a video by `get_rope_index`, (3, N)."""
    kind = part(model, name)
    config = kind.config_class()
    image, *videos = [grid for grid in parts if not isinstance(grid, int)]
    times = {0: 1, 1: 1, 2: merge_time}
    codes = [0 if isinstance(piece, int) else 1 + (piece != image) for piece in parts]  # text, image, video
    areas = [merge**2 * times[code] if code else 1 for code in codes]
    counts = [int(np.prod(piece)) // area for piece, area in zip(parts, areas, strict=True)]
    sequence = torch.repeat_interleave(torch.tensor(codes), torch.tensor(counts))[None]
    own = SimpleNamespace(config=config, get_vision_position_ids=partial(kind.get_vision_position_ids, None))
    video = [sum(time for time, _, _ in videos), *videos[0][1:]]
    more = {"second_per_grid_ts": [step / config.vision_config.tokens_per_second]} if step else {}
    grids = {"image_grid_thw": torch.tensor([image]), "video_grid_thw": torch.tensor([video])}
    return kind.get_rope_index(own, sequence, mm_token_type_ids=sequence, **grids, **more)[0][:, 0]


def rotary() -> Iterator[Row]:
    """Yield rotations of texts and of timm, and rotations and positions of texts with images."""
    from timm.layers import RotaryEmbeddingCat, apply_rot_embed_cat

    q = draw(7, DIM)
    config = importlib.import_module("transformers").LlamaConfig(hidden_size=DIM, num_attention_heads=1)
    yield "rope.half", {"q": q}, half(q, part("llama", "LlamaRotaryEmbedding")(config)(q[None], torch.arange(7)[None]))
    sin, cos = part("gptj", "create_sinusoidal_positions")(7, DIM)[None].chunk(2, -1)
    yield "rope.interleaved", {"q": q}, part("gptj", "apply_rotary_pos_emb")(q[None, :, None], sin, cos)[0, :, 0]
    for name, options in (
        ("rope_vit", {"temperature": 100.0, "grid_indexing": "xy"}),
        ("perception_encoder", {"grid_indexing": "xy", "grid_offset": 1.0}),
        ("eva02", {"ref_feat_shape": (16, 16)}),
    ):
        q, rope = draw(15, DIM), RotaryEmbeddingCat(DIM, in_pixels=False, feat_shape=GRID, **options)
        yield f"rope.{name}", {"q": q}, apply_rot_embed_cat(q, rope.get_embed())
    at = torch.cartesian_prod(torch.arange(1), *map(torch.arange, GRID)).T + 3
    inputs = {"q": draw(18, DIM), "positions": torch.cat([torch.arange(3).expand(3, -1), at], 1)}
    for name, model, kind in (
        ("mrope.chunked", "qwen2_vl", "Qwen2VLTextRotaryEmbedding"),
        ("mrope.interleaved", "qwen3_vl", "Qwen3VLTextRotaryEmbedding"),
    ):
        yield name, inputs, of_mrope(model, kind, inputs["positions"], DECLARED[name]["parameters"]["split"])
    for model, kind in (
        ("qwen2_vl", "Qwen2VLModel"),
        ("qwen2_5_vl", "Qwen2_5_VLModel"),
        ("qwen3_vl", "Qwen3VLModel"),
        ("glm4v", "Glm4vModel"),
        ("ernie4_5_vl_moe", "Ernie4_5_VLMoeModel"),
    ):
        name = f"mrope.positions.{model}"
        yield name, {}, of_index(model, kind, **DECLARED[name]["parameters"])


def tables() -> Iterator[Row]:
    """Yield sinusoids, relative indices and biases."""
    from timm.layers import gen_relative_log_coords, gen_relative_position_index

    config = part("vit_mae", "ViTMAEConfig")(hidden_size=DIM, num_attention_heads=1, image_size=28, patch_size=7)
    mae = part("vit_mae", "ViTMAEEmbeddings")(config)
    mae.initialize_weights()
    yield "sinusoid.mae", {}, mae.position_embeddings[0, 1:].detach()
    detr = part("detr", "DetrSinePositionEmbedding")(DIM // 2, normalize=True)
    yield "sinusoid.detr", {}, detr((1, 3, *GRID), torch.device("cpu"), torch.float64).flatten(2)[0].mT
    halves = part("marian", "MarianSinusoidalPositionalEmbedding")(7, DIM).create_weight().chunk(2, -1)
    yield "sinusoid.text", {}, torch.stack(halves, -1).flatten(1)
    for name, prefix in (("index.swin", False), ("index.beit", True)):
        yield name, {}, gen_relative_position_index(GRID, class_token=prefix)
    levit = importlib.import_module("timm.models.levit").Attention(8, 4, resolution=GRID)
    yield "index.levit", {}, levit.attention_bias_idxs
    relative = torch.arange(40)[None] - torch.arange(40)[:, None]
    for name, both in (("buckets.t5.encoder", True), ("buckets.t5.decoder", False)):
        yield name, {}, part("t5", "T5Attention")._relative_position_bucket(relative, both, 16, 30)
    for name, trained in (("log.swin_v2", (0, 0)), ("log.swin_v2.trained", (7, 7))):
        yield name, {}, gen_relative_log_coords(GRID, trained, mode="swin")
    for heads in (8, 12):
        slopes = part("bloom", "build_alibi_tensor")(torch.ones(1, 2), heads, torch.float64)
        yield f"slopes.alibi.{heads}", {}, slopes[:, 0, 1]
    sam = part("sam", "SamVisionAttention")
    own = SimpleNamespace(get_rel_pos=partial(sam.get_rel_pos, None))
    for name, (height, width) in (("bias.sam", (5, 9)), ("bias.sam.resampled", (7, 13))):
        q, rows, columns = draw(15, 4), draw(height, 4), draw(width, 4)
        bias = sam.get_decomposed_rel_pos(own, q[None], rows, columns, GRID, GRID).reshape(15, 15)
        yield name, {"q": q, "rows": rows, "columns": columns}, bias


def resized(table: np.ndarray[Any, Any], size: tuple[int, int], how: list[str]) -> np.ndarray[Any, Any]:
    """Resample a table (H, W, C) by a library, a kernel and options, such as pil, linear."""
    library, kernel, *options = how
    if library == "torch":
        arguments: dict[str, Any] = {name: name.split("_")[-1] in options for name in ("align_corners", "antialias")}
        x = torch.from_numpy(table).permute(2, 0, 1)[None]
        if "steps" in options:
            scale = tuple((to + 0.1) / side for to, side in zip(size, table.shape[:2], strict=True))
            arguments, size = {"scale_factor": scale, "recompute_scale_factor": False}, None
        return torch.nn.functional.interpolate(x, size, mode=f"bi{kernel}", **arguments)[0].permute(1, 2, 0).numpy()
    if library == "pil":
        from PIL import Image

        filters = {"linear": Image.Resampling.BILINEAR, "cubic": Image.Resampling.BICUBIC}
        planes = [Image.fromarray(plane).resize(size[::-1], filters[kernel]) for plane in np.moveaxis(table, -1, 0)]
        return np.stack([np.asarray(plane) for plane in planes], -1)
    if library == "opencv":
        import cv2

        return cv2.resize(table, size[::-1], interpolation=getattr(cv2, f"INTER_{kernel.upper()}"))
    if library == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
        return np.asarray(jax.image.resize(table, (*size, table.shape[-1]), kernel, antialias="antialias" in options))
    import tensorflow

    return tensorflow.image.resize(table, size, f"bi{kernel}", antialias="antialias" in options).numpy()


#: The names of packages that differ from the names of libraries.
PACKAGES = {"OpenCV": "opencv-python-headless", "PIL": "pillow", "JAX": "jax", "TensorFlow": "tensorflow-cpu"}


def resampling() -> Iterator[Row]:
    """Yield tables of positions and of displacements at other sizes."""
    for name in DECLARED:
        _, *how, last = name.split(".")
        if re.fullmatch(r"resample\..*\.\dx\d", name):
            size = int(last[0]), int(last[2])
            table = draw(5, 6, 2).numpy().astype("float32" if how[0] in ("pil", "tensorflow") else "float64")
            yield name, {"table": table}, partial(resized, table, size, how)
    timm = importlib.import_module("timm.layers")
    table, window, offsets, size = draw(4, 4, 2), draw(2, 2, 2), draw(5, 5, 2), (8, 12)
    flat = table.reshape(1, 16, 2)
    inputs: dict[str, Any] = {"table": table}
    larger = timm.resample_abs_pos_embed(flat, size, num_prefix_tokens=0)
    yield "resample.timm", inputs, larger.reshape(*size, 2)
    larger = part("sam3", "Sam3ViTEmbeddings")._tile_position_embeddings(None, flat, 6, 9)
    yield "resample.sam3", inputs, larger.reshape(6, 9, 2)
    whole, tile = (value.permute(2, 0, 1)[None] for value in (table, window))
    inputs = {"table": table, "window": window}
    sam2 = SimpleNamespace(pos_embed=whole, pos_embed_window=tile)
    larger = importlib.import_module("timm.models.hieradet_sam2").HieraDet._pos_embed(sam2, torch.zeros(1, *size, 2))
    yield "resample.sam2", inputs, larger[0]
    hiera = SimpleNamespace(pos_embed=whole, pos_embed_win=tile, mask_spatial_shape=(4, 6))
    larger = importlib.import_module("timm.models.hiera").Hiera._pos_embed(hiera, torch.zeros(1, 96, 2))
    yield "resample.hiera", inputs, larger.reshape(*size, 2)
    for name, resize in (("beit", timm.resize_rel_pos_bias_table), ("swin", timm.resize_rel_pos_bias_table_simple)):
        larger = resize(offsets.reshape(25, 2), (4, 5), (63, 2))
        yield f"resample.{name}", {"table": offsets}, larger.reshape(7, 9, 2)


def computed() -> Iterator[Row]:
    """Yield all vectors."""
    for rows in (rotary, rotations, texts, tables, resampling):
        with in_float64():
            yield from rows()


def record(folder: Path = VECTORS) -> list[Path]:
    """Write the vectors and their description; returns the paths."""
    sys.path.insert(0, str(folder))
    from verify import CONVENTIONS, vectors

    known = {name: (inputs, output) for name, _, inputs, outputs in vectors() for output in outputs.values()}
    rows = {name: (inputs, output) for name, inputs, output in computed()}
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    names: dict[tuple[Any, ...], str] = {}

    def store(name: str, value: Any) -> str:
        """Store an array under a name, unless there is an equal one; returns its name."""
        array = np.ascontiguousarray(value)
        own = names.setdefault((array.dtype.str, array.shape, array.tobytes()), name)
        tensors.setdefault(own, array)
        return own

    described: dict[str, Any] = {}
    for name, about in DECLARED.items():
        library, source = re.match(r"(\w+)[^,]*(.*)", about["source"]).groups()  # type: ignore[union-attr]
        try:
            inputs, output = rows[name]
            array = np.asarray(output() if callable(output) else output)
            source = f"{library} {version(PACKAGES.get(library, library))}{source}"
        except (ImportError, KeyError):
            (inputs, array), source = known[name], about["source"]
            print(f"{name} is kept: {library} is not installed, or no longer has its class")
        inputs = {key: np.asarray(value) for key, value in inputs.items()}
        (key,) = CONVENTIONS[about["convention"]](**inputs, **about["parameters"])  # its name alone
        described[name] = {
            "convention": about["convention"],
            "parameters": about["parameters"],
            "inputs": {key: store(f"inputs.{len(tensors)}", value) for key, value in inputs.items()},
            "outputs": {key: store(f"{name}.{key}", array)},
            "dtype": about["dtype"],
            "source": source,
        }
    formulas = {name: function.__doc__ for name, function in CONVENTIONS.items()}
    lines = [f" {json.dumps(name)}: {json.dumps(about, ensure_ascii=False)}" for name, about in described.items()]
    head = json.dumps({"recorded": f"{datetime.date.today()}", "conventions": formulas}, indent=1, ensure_ascii=False)
    text = f'{head[:-2]},\n "vectors": {{\n' + ",\n".join(lines) + "\n}\n}\n"
    return [write_bytes(folder / "vectors.safetensors", save(tensors)), write_text(folder / "vectors.json", text)]


if __name__ == "__main__":
    print("wrote", *record())
