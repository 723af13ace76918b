"""The rotations of vectors/: those of vision encoders and diffusion transformers, and the positions of their tokens."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from evidence.position_codes import NoInterface, part, rotations_of_diffusers, rotations_of_transformers

#: Name, convention, parameters, inputs, output (or a function of it), source.
Row = tuple[str, str, dict[str, Any], dict[str, Any], Any, str]
#: Grids of images: of the rotations, and of those whose tables are square.
GRID, SQUARE = (2, 3), (2, 2)
_CENTERS = {"coordinates": "centers", "unit": "turns", "base": 100.0}
_SAM = {"layout": "interleaved", "order": "xy"}
#: Model of transformers -> how it differs from rows first, T = 10,000 and halves.
TRANSFORMERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("dinov3_vit", "eomt_dinov3", "sapiens2"), _CENTERS),
    **dict.fromkeys(("edgetam_video", "inkling2", "sam2_video", "sam3", "sam3_tracker_video"), _SAM),
    "gemma4": {"layout": "half per axis", "order": "xy", "base": 100.0},
    "kimi_k25": {"order": "xy", "arrangement": "alternating"},
    "lfm3_vl": {"base": 1_000_000.0},
    "llama4": {"grid": SQUARE, "layout": "interleaved", "order": "xy", "offset": 1.0},
    "minimax_m3_vl": {"grid": (1, *GRID)},
    "pixtral": {"series": "strided"},
    "step3p7": {"order": "xy"},
    "vjepa2": {"layout": "tiled per axis"},
}
_FLUX = {"grid": (1, *GRID), "split": (8, 28, 28), "layout": "interleaved"}
_Z_IMAGE = _FLUX | {"split": (16, 24, 24), "base": 256.0}
_COSMOS = {"grid": (1, *GRID), "split": (22, 21, 21), "base": (10_000 * 2 ** (44 / 42), 10_000.0, 10_000.0)}
_PAIRS = {"arrangement": "alternating", "series": "pair"}
_IDEOGRAM = {"grid": (1, *GRID), "split": (24, 20, 20), "base": 5_000_000.0, "offset": 65_536.0} | _PAIRS
_LTX = {"split": (10, 10, 10), "arrangement": "alternating", "series": "growing", "unit": "quarter turns"}
_SHARE = {"coordinates": "share", "reference": (62.5, 64.0, 64.0), "still": "first channels"}
#: Model of diffusers -> the parameters of its rotation.
DIFFUSERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bria", "flux", "krea2", "longcat_image", "ovis_image", "qwenimage.scale_rope_false"), _FLUX),
    **dict.fromkeys(("chronoedit", "sana_video", "skyreels_v2", "wan", "wan_animate"), _FLUX | {"split": (22, 21, 21)}),
    **dict.fromkeys(("hunyuan_video", "hunyuan_video15", "motif_video"), _FLUX | {"base": 256.0}),
    **dict.fromkeys(("nucleusmoe_image", "qwenimage"), _FLUX | {"coordinates": "centered"}),
    **dict.fromkeys(("kandinsky", "kandinsky6", "kandinsky6_sr"), _FLUX | {"split": (8, 12, 12)}),
    "cogview4": {"grid": GRID, "coordinates": "floored", "reference": (256, 256)},
    "cosmos": _COSMOS,
    "ernie_image": _Z_IMAGE | {"layout": "crossed"},
    "flux2": {"grid": (1, *GRID, 1), "layout": "interleaved", "base": 2_000.0},
    "glm_image": {"grid": GRID},
    "hunyuanimage": {"grid": GRID, "layout": "interleaved", "base": 256.0},
    "ideogram4": _IDEOGRAM,
    "ltx": _FLUX | _LTX | _SHARE,
    "minimax_h3": {"grid": (1, *GRID), "split": (16, 16, 16)},
    "z_image": _Z_IMAGE,
}
#: What is no rotation by the place of a patch -> why.
NOTES = {
    "cogview4": ": no function of displacements, for coordinates are floored to 256 steps of the image",
    **dict.fromkeys(("ernie_image", "vjepa2"), ": no rotation, for the channels of a pair have different angles"),
}


#: What is of float32 -> what takes its place, so that no table of a library is rounded.
WIDE: dict[Any, Any] = {torch.float32: torch.float64, torch.complex64: torch.complex128, Tensor.float: Tensor.double}


class InFloat64(TorchFunctionMode):
    """Replaces float32 by float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return WIDE.get(value, value) if isinstance(value, torch.dtype) else value

        return WIDE.get(func, func)(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


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


def rotations() -> Iterator[Row]:
    """Yield the rotation of each class of transformers, and of those of diffusers that are described above."""
    for path, build in (rotations_of_transformers() | rotations_of_diffusers()).items():
        library, model, name = path.split(".")
        model += ".scale_rope_false" * name.endswith("(scale_rope=False)")
        if library == "diffusers" and model not in DIFFUSERS:
            continue
        try:
            code = build()
        except (NoInterface, AttributeError) as error:
            print(f"{path} is left out: {error}")
            continue
        parameters = {"grid": GRID} | (DIFFUSERS if library == "diffusers" else TRANSFORMERS).get(model, {})
        height, width = SQUARE if parameters["grid"] == SQUARE else GRID
        q = draw(height * width, code.channels)
        rotated = code.rotate(q[None, None], (height, width))[0, 0].detach()
        yield f"rope.{model}", "rotation", parameters, {"q": q}, rotated, f"{library}, {name}{NOTES.get(model, '')}"


def diffusion(model: str, name: str) -> Any:
    """Return a class or function of a transformer of diffusers, or a pipeline."""
    folder = "pipelines.{0}.pipeline_{0}" if name.endswith("Pipeline") else "models.transformers.transformer_{0}"
    return part(f"diffusers.{folder.format(model)}", name)


def in_attention(model: str, processor: str, image: Tensor, text: Tensor, tables: Any) -> Tensor:
    """Return the queries that a processor of diffusers passes to attention, of image and text tokens (N, d)."""
    module = importlib.import_module(f"diffusers.models.transformers.transformer_{model}")
    parts = [f"{name}_{letter}" for name in ("to", "norm", "norm_added") for letter in "qkv"]
    same = dict.fromkeys([*parts, "add_q_proj", "add_k_proj", "add_v_proj"], torch.clone)
    d = image.shape[1]
    layer = SimpleNamespace(heads=1, inner_dim=d, head_dim=d, added_kv_proj_dim=d, fused_projections=False, **same)
    attend = mock.Mock(side_effect=StopIteration)
    with mock.patch.object(module, "dispatch_attention_fn", attend), suppress(StopIteration):
        getattr(module, processor)()(layer, image[None], text[None], image_rotary_emb=tables)
    return attend.call_args.args[0][0, :, 0]


def texts() -> Iterator[Row]:
    """Yield rotations of a text and an image in one sequence, and the positions of their tokens."""
    count, tokens, axes = 2, GRID[0] * GRID[1], [16, 56, 56]
    ids = diffusion("flux", "FluxPipeline")._prepare_latent_image_ids(1, *GRID, "cpu", torch.float64)
    flux, flux2 = torch.cat([torch.zeros(count, 3), ids]), diffusion("flux2", "Flux2Pipeline")
    ids2 = [flux2._prepare_text_ids(torch.zeros(1, count, 1)), flux2._prepare_latent_ids(torch.zeros(1, 1, *GRID))]
    latent = torch.zeros(1, 16, 1, 2 * GRID[0], 2 * GRID[1])
    qwen = diffusion("qwenimage", "QwenEmbedRope")(10_000, axes, scale_rope=True)
    hunyuan = diffusion("hunyuan_video", "HunyuanVideoRotaryPosEmbed")(2, 1, axes, 256.0)(latent)
    last = diffusion("flux2", "Flux2PosEmbed")(2_000, [32] * 4)(torch.cat(ids2, 1)[0])
    glm = diffusion("glm_image", "GlmImageRotaryPosEmbed")(64, 2)(latent[:, :, 0])
    tables = {
        "flux": ("FluxAttnProcessor", {}, diffusion("flux", "FluxPosEmbed")(10_000, axes)(flux)),
        "flux2": ("Flux2AttnProcessor", {"text_at": "last"}, last),
        "qwenimage": ("QwenDoubleStreamAttnProcessor2_0", {"text_at": "after"}, qwen((1, *GRID), latent.device, count)),
        "hunyuan_video": ("HunyuanVideoAttnProcessor2_0", {"text_first": False}, hunyuan),
        "glm_image": ("GlmImageAttnProcessor", {}, glm),
    }
    for model, (processor, more, table) in tables.items():
        q = draw(count + tokens, 64 if model == "glm_image" else 128)
        words, patches = (q[:count], q[count:]) if "text_first" not in more else (q[tokens:], q[:tokens])
        rotated = in_attention(model, processor, patches, words, table)
        parameters = DIFFUSERS[model] | {"text": count} | more
        yield f"rope.{model}.text", "rotation", parameters, {"q": q}, rotated, f"diffusers, {processor}"
    film, frames, places = (2, 1, 2), torch.zeros(1, 16, 2, 2, 4), torch.cartesian_prod(*map(torch.arange, (2, 1, 2)))
    ltx = diffusion("ltx", "LTXVideoRotaryPosEmbed")(64)
    for model, table, layout in (
        ("cosmos", diffusion("cosmos", "CosmosRotaryPosEmbed")(128)(frames), -2),
        ("flux", diffusion("flux", "FluxPosEmbed")(10_000, axes)(places), -1),
        ("hunyuan_video", diffusion("hunyuan_video", "HunyuanVideoRotaryPosEmbed")(2, 1, axes, 256.0)(frames), -1),
        ("ltx", ltx(frames, *film, rope_interpolation_scale=(8 / 25, 32, 32)), -1),
        ("minimax_h3", diffusion("minimax_h3", "MiniMaxH3RotaryPosEmbed")(16)(places), -2),
        ("qwenimage", qwen(film, latent.device, count)[0], -1),
        ("wan", diffusion("wan", "WanRotaryPosEmbed")(128, (1, 2, 2), 8)(frames), -1),
        ("z_image", diffusion("z_image", "RopeEmbedder")(256.0, [32, 48, 48], [8] * 3)(places), -1),
    ):
        if not isinstance(table, tuple):
            table = table.real.repeat_interleave(2, -1), table.imag.repeat_interleave(2, -1)
        q, table = draw(4, 64 if model == "ltx" else 128), [each.reshape(4, -1) for each in table]
        turned, still = q[None, None].tensor_split([table[0].shape[1]], -1)
        turned = part("diffusers.models.embeddings", "apply_rotary_emb")(turned, table, use_real_unbind_dim=layout)
        parameters, rotated = DIFFUSERS[model] | {"grid": film}, torch.cat([turned, still], -1)[0, 0]
        yield f"rope.{model}.film", "rotation", parameters, {"q": q}, rotated, f"diffusers, {model}, film"
    z_image = diffusion("z_image", "ZImageTransformer2DModel")
    own, films, captions = z_image.__new__(z_image), [torch.zeros(4, 1, 8, 16)], [torch.zeros(32, 8)]  # no padding
    _, _, _, patches, words, *_ = z_image.patchify_and_embed(own, films, captions, 2, 1)
    krea = diffusion("krea2", "Krea2Pipeline").prepare_position_ids(count, *GRID, latent.device)
    ideogram = diffusion("ideogram4", "Ideogram4Pipeline")._prepare_ids([count], *GRID, count, latent.device)[0][0]
    before = {"grid": (1, 4, 8), "text": 32, "text_at": "before", "text_first": False}
    for model, more, positions in (
        ("flux", {}, flux),
        ("flux2", {"grid": (1, *GRID, 1), "text_at": "last"}, torch.cat(ids2, 1)[0]),
        ("krea2", {}, krea),
        ("z_image", before, torch.cat([patches[0], words[0]])),
        ("ideogram4", {"text_at": "index", "offset": 65_536.0}, ideogram),
    ):
        parameters, source = {"grid": (1, *GRID), "text": count} | more, f"diffusers, pipeline of {model}"
        yield f"positions.{model}", "token_positions", parameters, {}, positions.double(), source
    blocks = part("transformers.vision_utils", "get_vision_position_ids")(torch.tensor([[1, 4, 6]]), 2).double()
    yield "positions.blocks", "token_positions", {"grid": (4, 6), "merge": 2}, {}, blocks, "transformers, vision_utils"
