"""Record vectors/: outputs of position code of many libraries, each from the library's own code.

`python -m evidence.vectors` needs transformers, jax, tensorflow, and opencv-python-headless beside the library's own
dependencies; the formulas in vectors/verify.py are not used here, so that the two are independent.
"""

from __future__ import annotations

import datetime
import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graticule.system.files import write_bytes, write_text

GRID, MERGED, DIM, HEADS = (3, 5), (4, 6), 16, 2
AXIAL = {"base": 10_000.0, "grid": GRID}


class InFloat64(TorchFunctionMode):
    """Replaces float32 by float64, in which no table of a library is rounded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*(torch.float64 if arg is torch.float32 else arg for arg in args), **kwargs)


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute in float64 by default."""
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def draw(*shape: int) -> Tensor:
    """Return normal values that depend on the shape alone."""
    return torch.from_numpy(np.random.default_rng(0).normal(size=shape))


def part(model: str, name: str) -> Any:
    """Return a class or function of a model of transformers."""
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


def indices(grid: tuple[int, int], merge: int = 1) -> Tensor:
    """Return the places of patches as transformers passes them to vision encoders, (N, 2)."""
    from transformers.vision_utils import get_vision_position_ids

    return get_vision_position_ids(torch.tensor([[1, *grid]]), merge)


def half(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply tables of cosines and sines as transformers does: pairs (k, k + d / 2)."""
    return q * cos + part("llama", "rotate_half")(q) * sin


def of_transformers(model: str, name: str, config: dict[str, Any], grid: tuple[int, int], merge: int = 1) -> Tensor:
    """Rotate queries by the rotary embedding of a vision encoder of transformers."""
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    annotation = getattr(module, name).__init__.__annotations__["config"]
    kind = annotation if isinstance(annotation, type) else getattr(module, annotation)
    rope = getattr(module, name)(kind(**config)).eval()
    q = draw(grid[0] * grid[1], DIM)
    if model == "dinov3_vit":
        return half(q, *rope(torch.zeros(1, 3, 16 * grid[0], 16 * grid[1])))
    index = indices(grid, merge)
    if model == "gemma4":
        cos, sin = rope(q[None], index[None])
        apply = module.apply_multidimensional_rope
        return apply(q[None, :, None], cos, sin, index[None])[0, :, 0]
    cos, sin = rope(q, index)
    return half(q, cos, sin)


def of_llama4(grid: tuple[int, int]) -> Tensor:
    """Rotate queries by Llama 4's vision encoder, whose tables are square and have the class token last."""
    config = part("llama4", "Llama4VisionConfig")
    rope = part("llama4", "Llama4VisionRotaryEmbedding")(
        config(hidden_size=DIM * HEADS, num_attention_heads=HEADS, image_size=7 * grid[0], patch_size=7)
    )
    q = torch.cat([draw(grid[0] * grid[1], DIM), torch.zeros(1, DIM)])[None, :, None]
    return part("llama4", "vision_apply_rotary_emb")(q, q, rope(q))[0][0, :-1, 0]


def of_timm(grid: tuple[int, int], **options: Any) -> Tensor:
    """Rotate queries by timm's rotary embedding."""
    from timm.layers import RotaryEmbeddingCat, apply_rot_embed_cat

    rope = RotaryEmbeddingCat(DIM, in_pixels=False, feat_shape=grid, **options)
    return apply_rot_embed_cat(draw(grid[0] * grid[1], DIM), rope.get_embed())


def of_text(interleaved: bool) -> Tensor:
    """Rotate queries by the rotary embedding of Llama (pairs k, k + d / 2) or of GPT-J (pairs 2 k, 2 k + 1)."""
    q = draw(7, DIM)
    if interleaved:
        sin, cos = part("gptj", "create_sinusoidal_positions")(7, DIM).chunk(2, -1)
        return part("gptj", "apply_rotary_pos_emb")(q[None, :, None], sin[None], cos[None])[0, :, 0]
    config = importlib.import_module("transformers").LlamaConfig(hidden_size=DIM, num_attention_heads=1)
    cos, sin = part("llama", "LlamaRotaryEmbedding")(config)(q[None], torch.arange(7)[None])
    return half(q, cos[0], sin[0])


def of_mrope(interleaved: bool, positions: Tensor, sections: tuple[int, int, int]) -> Tensor:
    """Rotate queries by M-RoPE: chunked as in Qwen2-VL, interleaved as in Qwen3-VL."""
    transformers = importlib.import_module("transformers")
    model, name = ("qwen3_vl", "Qwen3VLTextRotaryEmbedding") if interleaved else ("qwen2_vl", "Qwen2VLRotaryEmbedding")
    parameters = {"rope_type": "default", "mrope_section": list(sections), "rope_theta": 10_000.0}
    kind = transformers.Qwen3VLTextConfig if interleaved else transformers.Qwen2VLTextConfig
    config = kind(hidden_size=DIM, num_attention_heads=1, head_dim=DIM, rope_parameters=parameters)
    q = draw(positions.shape[1], DIM)
    cos, sin = part(model, name)(config)(q[None], positions[:, None])
    return half(q, cos[0], sin[0])


def resized(table: np.ndarray[Any, Any], size: tuple[int, int], how: str) -> np.ndarray[Any, Any]:
    """Resample a table (H, W, C) by a library: 'torch', 'PIL', 'OpenCV', 'JAX' or 'TensorFlow', and a kernel."""
    library, kernel, *options = how.split()
    height, width = size
    if library == "torch":
        arguments: dict[str, Any] = {"align_corners": "corners" in options, "antialias": "antialias" in options}
        x = torch.from_numpy(table).permute(2, 0, 1)[None]
        if "steps" in options:
            scale = tuple((to + 0.1) / side for to, side in zip(size, table.shape[:2], strict=True))
            arguments = {"scale_factor": scale, "recompute_scale_factor": False}
        else:
            arguments["size"] = size
        return torch.nn.functional.interpolate(x, mode=f"bi{kernel}", **arguments)[0].permute(1, 2, 0).numpy()
    if library == "PIL":
        from PIL import Image

        filters = {"linear": Image.Resampling.BILINEAR, "cubic": Image.Resampling.BICUBIC}
        planes = [
            Image.fromarray(plane).resize((width, height), filters[kernel]) for plane in np.moveaxis(table, -1, 0)
        ]
        return np.stack([np.asarray(plane) for plane in planes], -1)
    if library == "OpenCV":
        import cv2

        return cv2.resize(table, (width, height), interpolation=getattr(cv2, f"INTER_{kernel.upper()}"))
    if library == "JAX":
        import jax

        jax.config.update("jax_enable_x64", True)
        return np.asarray(jax.image.resize(table, (*size, table.shape[-1]), kernel, antialias="antialias" in options))
    import tensorflow

    return tensorflow.image.resize(table, size, f"bi{kernel}", antialias="antialias" in options).numpy()


#: How a library resamples -> the parameters that describe it, and the dtype it computes in.
RESAMPLING: dict[str, tuple[dict[str, Any], str]] = {
    "torch linear": ({"kernel": "linear"}, "float64"),
    "torch linear corners": ({"kernel": "linear", "corners": True}, "float64"),
    "torch linear antialias": ({"kernel": "linear", "antialias": True, "border": "renormalize"}, "float64"),
    "torch cubic": ({"kernel": "cubic", "a": -0.75}, "float64"),
    "torch cubic corners": ({"kernel": "cubic", "a": -0.75, "corners": True}, "float64"),
    "torch cubic antialias": ({"kernel": "cubic", "a": -0.5, "antialias": True, "border": "renormalize"}, "float64"),
    "torch cubic steps": ({"kernel": "cubic", "a": -0.75}, "float64"),
    "PIL linear": ({"kernel": "linear", "antialias": True, "border": "renormalize"}, "float32"),
    "PIL cubic": ({"kernel": "cubic", "a": -0.5, "antialias": True, "border": "renormalize"}, "float32"),
    "OpenCV linear": ({"kernel": "linear"}, "float64"),
    "OpenCV cubic": ({"kernel": "cubic", "a": -0.75}, "float64"),
    "JAX linear antialias": ({"kernel": "linear", "antialias": True, "border": "renormalize"}, "float64"),
    "JAX linear": ({"kernel": "linear", "border": "renormalize"}, "float64"),
    "JAX cubic antialias": ({"kernel": "cubic", "a": -0.5, "antialias": True, "border": "renormalize"}, "float64"),
    "JAX cubic": ({"kernel": "cubic", "a": -0.5, "border": "renormalize"}, "float64"),
    "TensorFlow linear": ({"kernel": "linear"}, "float32"),
    "TensorFlow cubic": ({"kernel": "cubic", "a": -0.5, "border": "renormalize", "offsets": 1024}, "float32"),
    "TensorFlow cubic antialias": (
        {"kernel": "cubic", "a": -0.5, "antialias": True, "border": "renormalize"},
        "float32",
    ),
}
#: What is computed from float32 weights, whatever its own dtype is.
WEIGHTS_IN_FLOAT32 = ("sinusoid.text", "resample.opencv")
#: The names of packages that differ from those of libraries.
PACKAGES = {"OpenCV": "opencv-python-headless", "PIL": "pillow", "JAX": "jax", "TensorFlow": "tensorflow-cpu"}

Row = tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Callable[[], Any]], str]


def rotary() -> Iterator[Row]:
    """Yield the rotary encodings: name, convention, parameters, inputs, functions of the outputs, and source."""
    vision = {"hidden_size": DIM * HEADS, "num_attention_heads": HEADS, "image_size": 28, "patch_size": 7}
    of_qwen = {"hidden_size": DIM * HEADS, "num_heads": HEADS}
    q, square = draw(GRID[0] * GRID[1], DIM), (4, 4)

    def row(name: str, convention: str, arguments: dict[str, Any], rotated: Callable[[], Tensor], source: str) -> Row:
        grid = arguments.get("grid", GRID)
        count = 7 if convention == "rope" else grid[0] * grid[1]
        return name, convention, arguments, {"q": draw(count, DIM)}, {"rotated": rotated}, source

    for layout, model in (("half", "Llama"), ("interleaved", "GPT-J")):
        inputs = {"base": 10_000.0, "layout": layout}
        yield row(
            f"rope.{layout}", "rope", inputs, lambda own=layout: of_text(own == "interleaved"), f"transformers, {model}"
        )
    timm = {
        "rope_vit": ({"base": 100.0, "order": "xy"}, {"temperature": 100.0, "grid_indexing": "xy"}),
        "perception_encoder": (
            {"base": 10_000.0, "order": "xy", "offset": 1.0},
            {"temperature": 10_000.0, "grid_indexing": "xy", "grid_offset": 1.0},
        ),
    }
    for name, (inputs, options) in timm.items():
        inputs = {"grid": GRID, "layout": "interleaved"} | inputs
        yield row(
            f"rope.{name}", "rope_axial", inputs, lambda own=options: of_timm(GRID, **own), "timm, RotaryEmbeddingCat"
        )
    inputs = {"grid": GRID, "base": 10_000.0, "reference": (16, 16)}
    yield row(
        "rope.eva02", "rope_eva02", inputs, lambda: of_timm(GRID, ref_feat_shape=(16, 16)), "timm, RotaryEmbeddingCat"
    )
    name, config = "DINOv3ViTRopePositionEmbedding", {"hidden_size": DIM * HEADS, "num_attention_heads": HEADS}
    yield row(
        "rope.dinov3",
        "rope_dinov3",
        {"grid": GRID, "base": 100.0},
        lambda: of_transformers("dinov3_vit", name, config, GRID),
        f"transformers, {name}",
    )
    yield row(
        "rope.pixtral",
        "rope_pixtral",
        AXIAL,
        lambda: of_transformers("pixtral", "PixtralVisionRotaryEmbedding", vision, GRID),
        "transformers, PixtralVisionRotaryEmbedding",
    )
    qwen = {
        "qwen2_vl": ("Qwen2VLVisionRotaryEmbedding", {"embed_dim": DIM * HEADS, "num_heads": HEADS}),
        "qwen2_5_vl": ("Qwen2_5_VLVisionRotaryEmbedding", of_qwen),
        "qwen3_vl": ("Qwen3VLVisionRotaryEmbedding", of_qwen),
    }
    for model, (name, config) in qwen.items():
        for grid, merge in ((GRID, 1), (MERGED, 2)):
            yield row(
                f"rope.{model}{'.blocks' * (merge > 1)}",
                "rope_axial",
                {"grid": grid, "base": 10_000.0, "order": "yx", "layout": "half", "merge": merge},
                lambda model=model, name=name, config=config, grid=grid, merge=merge: of_transformers(
                    model, name, config, grid, merge
                ),
                f"transformers, {name}",
            )
    inputs = {"grid": square, "base": 10_000.0, "order": "xy", "layout": "interleaved", "offset": 1.0}
    yield row(
        "rope.llama4", "rope_axial", inputs, lambda: of_llama4(square), "transformers, Llama4VisionRotaryEmbedding"
    )
    name = "Gemma4VisionRotaryEmbedding"
    config = {"hidden_size": DIM * HEADS, "num_attention_heads": HEADS, "head_dim": DIM}
    inputs = {"grid": GRID, "base": 100.0, "order": "yx", "layout": "half per axis"}
    yield row(
        "rope.gemma4",
        "rope_axial",
        inputs,
        lambda: of_transformers("gemma4", name, config, GRID),
        f"transformers, {name}",
    )
    text, at = torch.arange(3), indices(GRID)
    image = torch.stack([torch.full((len(q),), 3), at[:, 0] + 3, at[:, 1] + 3])
    positions = torch.cat([text.expand(3, -1), image], 1)
    for arrangement, source in (("chunked", "Qwen2VLRotaryEmbedding"), ("interleaved", "Qwen3VLTextRotaryEmbedding")):
        sections = (2, 3, 3) if arrangement == "chunked" else (4, 2, 2)
        yield (
            f"mrope.{arrangement}",
            "mrope",
            {"base": 10_000.0, "sections": sections, "arrangement": arrangement},
            {"q": draw(positions.shape[1], DIM), "positions": positions},
            {"rotated": lambda own=arrangement, s=sections: of_mrope(own == "interleaved", positions, s)},
            f"transformers, {source}",
        )


def tables() -> Iterator[Row]:
    """Yield sinusoids, relative indices and biases, as `rotary` does."""
    from timm.layers import gen_relative_log_coords, gen_relative_position_index

    detr = part("detr", "DetrSinePositionEmbedding")

    def mae() -> Tensor:  # its tables are square
        config = part("vit_mae", "ViTMAEConfig")(hidden_size=DIM, num_attention_heads=1, image_size=28, patch_size=7)
        embeddings = part("vit_mae", "ViTMAEEmbeddings")(config)
        embeddings.initialize_weights()
        return embeddings.position_embeddings[0, 1:].detach()

    inputs = {"grid": (4, 4), "dim": DIM, "base": 10_000.0}
    yield "sinusoid.mae", "sinusoid_mae", inputs, {}, {"table": mae}, "transformers, ViTMAE"

    def detrs() -> Tensor:
        images = torch.zeros(1, 3, *GRID)
        table = detr(DIM // 2, normalize=True)(images.shape, images.device, torch.float64)
        return table.reshape(GRID[0] * GRID[1], DIM) if table.ndim == 3 else table.flatten(2)[0].mT

    yield "sinusoid.detr", "sinusoid_detr", AXIAL | {"dim": DIM}, {}, {"table": detrs}, "transformers, DETR"
    text = part("marian", "MarianSinusoidalPositionalEmbedding")

    def marian() -> Tensor:  # its sines are all before its cosines
        return torch.stack(text(7, DIM).create_weight().chunk(2, -1), -1).flatten(1)

    inputs = {"length": 7, "dim": DIM, "base": 10_000.0}
    yield (
        "sinusoid.text",
        "sinusoid",
        inputs,
        {},
        {"table": marian},
        "transformers, Marian, sines and cosines interleaved",
    )
    for name, convention, prefix in (("swin", "index_swin", False), ("beit", "index_beit", True)):
        of_grid = {"index": lambda own=prefix: gen_relative_position_index(GRID, class_token=own)}
        yield f"index.{name}", convention, {"grid": GRID}, {}, of_grid, "timm, gen_relative_position_index"
    buckets = part("t5", "T5Attention")._relative_position_bucket
    relative = torch.arange(40)[None] - torch.arange(40)[:, None]
    for both in (True, False):
        inputs = {"length": 40, "buckets": 16, "farthest": 30, "bidirectional": both}
        of_t5 = {"index": lambda own=both: buckets(relative, own, 16, 30)}
        yield (
            f"buckets.t5.{'encoder' if both else 'decoder'}",
            "buckets_t5",
            inputs,
            {},
            of_t5,
            "transformers, T5Attention",
        )
    logs = {"table": lambda: gen_relative_log_coords(GRID, mode="swin")}
    yield "log.swin_v2", "log_coordinates_swin_v2", {"grid": GRID}, {}, logs, "timm, gen_relative_log_coords"
    alibi = part("bloom", "build_alibi_tensor")
    for heads in (8, 12):
        slopes = {"slopes": lambda own=heads: alibi(torch.ones(1, 2), own, torch.float64)[:, 0, 1]}
        yield f"slopes.alibi.{heads}", "slopes_alibi", {"heads": heads}, {}, slopes, "transformers, BLOOM"


def resampling() -> Iterator[Row]:
    """Yield tables that become larger, smaller and both, as `rotary` does."""
    for how, (arguments, dtype) in RESAMPLING.items():
        for size in ((7, 9), (3, 2), (8, 3)):
            table = draw(5, 6, 2).numpy().astype(dtype)
            options = dict(arguments)
            if how.endswith("steps"):  # DINO and DINOv2 pass a scale of (new side + 0.1) / side
                options["steps"] = [side / (to + 0.1) for to, side in zip(size, table.shape[:2], strict=True)]
            name = f"resample.{how.replace(' ', '.').lower()}.{size[0]}x{size[1]}"
            of = {"resampled": lambda table=table, size=size, how=how: resized(table, size, how)}
            yield name, "resample", {"size": size} | options, {"table": table}, of, how.split()[0]


def record(folder: Path) -> list[Path]:
    """Write the vectors and their description; returns the paths."""
    import sys

    sys.path.insert(0, str(folder))
    from verify import CONVENTIONS

    tensors: dict[str, np.ndarray[Any, Any]] = {}
    described: dict[str, Any] = {}
    for rows in (rotary, tables, resampling):
        with in_float64():
            for name, convention, parameters, inputs, outputs, source in rows():
                arrays = {key: np.asarray(function()) for key, function in outputs.items()}
                single = name.startswith(WEIGHTS_IN_FLOAT32) or any(
                    value.dtype == np.float32 for value in arrays.values()
                )
                inputs_at = {}
                for key, value in inputs.items():
                    value = np.ascontiguousarray(value)
                    same = [
                        at for at, array in tensors.items() if at.startswith("inputs.") and np.array_equal(array, value)
                    ]
                    same = [at for at in same if tensors[at].dtype == value.dtype]
                    inputs_at[key] = same[0] if same else f"inputs.{len(tensors)}"
                    tensors[inputs_at[key]] = value
                for key, value in arrays.items():
                    tensors[f"{name}.{key}"] = np.ascontiguousarray(value)
                library = source.partition(",")[0]
                described[name] = {
                    "convention": convention,
                    "formula": CONVENTIONS[convention].__doc__,
                    "parameters": parameters,
                    "inputs": inputs_at,
                    "outputs": list(arrays),
                    "dtype": "float32" if single else "float64",
                    "source": source.replace(library, f"{library} {version(PACKAGES.get(library, library))}", 1),
                }
    about = {"recorded": datetime.date.today().isoformat(), "vectors": described}
    text = json.dumps(about, indent=1, ensure_ascii=False)
    return [
        write_bytes(folder / "vectors.safetensors", save(tensors)),
        write_text(folder / "vectors.json", text + "\n"),
    ]


if __name__ == "__main__":
    print("wrote", *record(Path(__file__).parents[1] / "vectors"))
