"""The rotations of vectors/, of vision encoders and diffusion transformers, and the positions of their tokens."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from evidence.position_codes import NoInterface, part, rotations_of_diffusers, rotations_of_transformers

#: Name, inputs, output (or a function of it).
Row = tuple[str, dict[str, Any], Any]
VECTORS = Path(__file__).parents[1] / "vectors"
#: Name -> what is declared of a vector: its convention, parameters, dtype and source.
DECLARED: dict[str, dict[str, Any]] = json.loads((VECTORS / "vectors.json").read_text(encoding="utf-8"))["vectors"]
#: Grid of images.
GRID = (2, 3)


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
    """Yield the rotation of each class of transformers and diffusers that is declared."""
    for path, build in (rotations_of_transformers() | rotations_of_diffusers()).items():
        _, model, name = path.split(".")
        vector = f"rope.{model}{'.scale_rope_false' * name.endswith('(scale_rope=False)')}"
        if vector not in DECLARED:
            print(f"{path} is left out: vectors.json declares no {vector}")
            continue
        try:
            code = build()
        except (NoInterface, AttributeError) as error:
            print(f"{path} is left out: {error}")
            continue
        height, width = (side for side in DECLARED[vector]["parameters"]["grid"] if side > 1)
        q = draw(height * width, code.channels)
        yield vector, {"q": q}, code.rotate(q[None, None], (height, width))[0, 0].detach()


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
        "flux": ("FluxAttnProcessor", diffusion("flux", "FluxPosEmbed")(10_000, axes)(flux)),
        "flux2": ("Flux2AttnProcessor", last),
        "qwenimage": ("QwenDoubleStreamAttnProcessor2_0", qwen((1, *GRID), latent.device, count)),
        "hunyuan_video": ("HunyuanVideoAttnProcessor2_0", hunyuan),
        "glm_image": ("GlmImageAttnProcessor", glm),
    }
    for model, (processor, table) in tables.items():
        q = draw(count + tokens, 64 if model == "glm_image" else 128)
        words, patches = (q[tokens:], q[:tokens]) if model == "hunyuan_video" else (q[:count], q[count:])
        yield f"rope.{model}.text", {"q": q}, in_attention(model, processor, patches, words, table)
    video, frames, places = (2, 1, 2), torch.zeros(1, 16, 2, 2, 4), torch.cartesian_prod(*map(torch.arange, (2, 1, 2)))
    ltx = diffusion("ltx", "LTXVideoRotaryPosEmbed")(64)
    for model, table, layout in (
        ("cosmos", diffusion("cosmos", "CosmosRotaryPosEmbed")(128)(frames), -2),
        ("flux", diffusion("flux", "FluxPosEmbed")(10_000, axes)(places), -1),
        ("hunyuan_video", diffusion("hunyuan_video", "HunyuanVideoRotaryPosEmbed")(2, 1, axes, 256.0)(frames), -1),
        ("ltx", ltx(frames, *video, rope_interpolation_scale=(8 / 25, 32, 32)), -1),
        ("minimax_h3", diffusion("minimax_h3", "MiniMaxH3RotaryPosEmbed")(16)(places), -2),
        ("qwenimage", qwen(video, latent.device, count)[0], -1),
        ("wan", diffusion("wan", "WanRotaryPosEmbed")(128, (1, 2, 2), 8)(frames), -1),
        ("z_image", diffusion("z_image", "RopeEmbedder")(256.0, [32, 48, 48], [8] * 3)(places), -1),
    ):
        if not isinstance(table, tuple):
            table = table.real.repeat_interleave(2, -1), table.imag.repeat_interleave(2, -1)
        q, table = draw(4, 64 if model == "ltx" else 128), [each.reshape(4, -1) for each in table]
        turned, still = q[None, None].tensor_split([table[0].shape[1]], -1)
        turned = part("diffusers.models.embeddings", "apply_rotary_emb")(turned, table, use_real_unbind_dim=layout)
        yield f"rope.{model}.video", {"q": q}, torch.cat([turned, still], -1)[0, 0]
    z_image = diffusion("z_image", "ZImageTransformer2DModel")
    own, videos, captions = z_image.__new__(z_image), [torch.zeros(4, 1, 8, 16)], [torch.zeros(32, 8)]  # no padding
    _, _, _, patches, words, *_ = z_image.patchify_and_embed(own, videos, captions, 2, 1)
    krea = diffusion("krea2", "Krea2Pipeline").prepare_position_ids(count, *GRID, latent.device)
    ideogram = diffusion("ideogram4", "Ideogram4Pipeline")._prepare_ids([count], *GRID, count, latent.device)[0][0]
    for model, positions in (
        ("flux", flux),
        ("flux2", torch.cat(ids2, 1)[0]),
        ("krea2", krea),
        ("z_image", torch.cat([patches[0], words[0]])),
        ("ideogram4", ideogram),
    ):
        yield f"positions.{model}", {}, positions.double()
    blocks = part("transformers.vision_utils", "get_vision_position_ids")(torch.tensor([[1, 4, 6]]), 2)
    yield "positions.blocks", {}, blocks.double()
