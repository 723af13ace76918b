"""Record what public code computes for films, volumes and images of several sizes, as cases in `golden/`.

    python tests/parity/record_films.py [CASE ...]

It needs timm, torchvision and transformers, and of packages that the project does not depend on vit-pytorch 1.26,
einops, rotary-embedding-torch 0.9 and MONAI 1.6; the tests read the cases alone. Weights are drawn at random and stored
in float32, in which they are exact; everything is computed in float64, requests for float32 in the code included.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

GOLDEN = Path(__file__).parent / "golden"
#: Name of a case -> function that returns its reference, class, arguments, tensors and note.
CASES: dict[str, Callable[[], tuple[str, str, dict[str, Any], dict[str, Tensor], str]]] = {}
FILM: dict[str, Any] = {"dim": 24, "depth": 2, "heads": 2, "mlp_dim": 48, "num_classes": 5, "channels": 1}
SHAPES = {"input_shape": (4, 16, 24), "patch_size": (2, 8, 8)}


class Wide(TorchFunctionMode):
    """Answers requests for float32 with float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wide = [torch.float64 if one is torch.float32 else one for one in args]
        named = {key: torch.float64 if one is torch.float32 else one for key, one in (kwargs or {}).items()}
        return func(*wide, **named)


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register a case by the name of its function."""
    CASES[function.__name__] = function
    return function


def rounded(value: Tensor) -> Tensor:
    """Round to float32, as float64; by NumPy, which `Wide` does not change."""
    return torch.from_numpy(value.detach().numpy().astype("float32").astype("float64"))


def draw(*shape: int) -> Tensor:
    """Draw normal numbers that are exact in float32, as float64."""
    return rounded(torch.randn(*shape, dtype=torch.float64))


def filled(model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """Draw all weights of a model, those of norms around 1, and return it with them as tensors of a case."""
    model = model.double().eval()
    for name, parameter in model.named_parameters():
        scale = 0.5 if parameter.ndim == 1 or "pos" in name else parameter[0].numel() ** -0.5
        around = 1.0 if name.endswith(("gamma", "norm.weight", "norm1.weight", "norm2.weight")) else 0.0
        if parameter.requires_grad:
            parameter.data = rounded(around + scale * draw(*parameter.shape))
    learned = [name for name, _ in model.named_parameters()]
    return model, {f"weight.{name}": value for name, value in model.state_dict().items() if name in learned}


def patches_of(image: Tensor, side: int) -> Tensor:
    """Return the patches of an image (C, H, W) row by row, channels last, (N, side^2 C)."""
    cut = image.unfold(1, side, side).unfold(2, side, side)  # (C, H, W, side, side)
    return cut.permute(1, 2, 3, 4, 0).flatten(2).flatten(0, 1)


def padded(images: list[Tensor], side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return patches (B, N, side^2 C), padded to the longest, their (y, x), (B, N, 2), and which are valid, (B, N)."""
    each = [patches_of(image, side) for image in images]
    longest = max(map(len, each)) + 2
    patches = torch.stack([nn.functional.pad(one, (0, 0, 0, longest - len(one)), value=3.0) for one in each])
    places = torch.zeros(len(images), longest, 2, dtype=torch.long)
    for row, image in zip(places, images, strict=True):
        sides = [torch.arange(n // side) for n in image.shape[1:]]
        grid = torch.stack(torch.meshgrid(*sides, indexing="ij"), -1).flatten(0, 1)
        row[: len(grid)] = grid
    return patches, places, torch.arange(longest) < torch.tensor(list(map(len, each)))[:, None]


def images() -> list[Tensor]:
    """Return three images of different sizes, the last of the size of the first."""
    return [draw(3, 32, 24), draw(3, 16, 40), draw(3, 32, 24)]


def inputs(each: list[Tensor]) -> dict[str, Tensor]:
    """Return images as tensors of a case."""
    return {f"input_{index}": image for index, image in enumerate(each)}


@case
def film_mrope_timm() -> Any:
    from timm.layers.pos_embed_sincos import RotaryEmbeddingMRope

    kwargs = {"dim": 24, "mrope_section": (3, 5, 4), "temperature": 1000.0}
    module, shape = RotaryEmbeddingMRope(**kwargs).double(), (3, 5)
    module.inv_freq = module._compute_inv_freq()
    note = "output: sines, then cosines, of each channel of a head, for a grid of `shape`."
    return (
        f"timm {version('timm')}",
        "RotaryEmbeddingMRope",
        {**kwargs, "shape": shape},
        {"output": module.get_embed(shape)},
        note,
    )


def axial(**kwargs: Any) -> Any:
    from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb

    shape, queries = (2, 3, 4), draw(2, 2, 24, 24)
    freqs = RotaryEmbedding(**kwargs).double().get_axial_freqs(*shape)  # (2, 3, 4, 24)
    tensors = {"input": queries, "output": apply_rotary_emb(freqs, queries.unflatten(2, shape)).flatten(2, 4)}
    kwargs = {**kwargs, "shape": shape}
    return (
        f"rotary-embedding-torch {version('rotary-embedding-torch')}",
        "get_axial_freqs",
        kwargs,
        tensors,
        ("input: queries of two samples and two heads on a grid of `shape`; output: the same, rotated."),
    )


@case
def film_axial_language() -> Any:
    return axial(dim=8, freqs_for="lang", theta=100)


@case
def film_axial_pixels() -> Any:
    return axial(dim=8, freqs_for="pixel", max_freq=6)


def vit_nd(name: str, **kwargs: Any) -> Any:
    import vit_pytorch.vit_nd as learned
    import vit_pytorch.vit_nd_rotary as rotary

    kwargs = {"ndim": 3, **SHAPES, **FILM, "dim_head": 12, **kwargs}
    rotary._phi = lambda axes: functools.reduce(lambda x, _: (1 + x) ** (1 / (axes + 1)), range(99), 2.0)
    model, weights = filled((learned if name == "vit_nd" else rotary).ViTND(**kwargs))
    film = draw(2, 1, *kwargs["input_shape"])
    note = "no bias of queries, keys and values; a norm of the patches; LayerNorm eps 1e-5." + (
        " The directions are computed with the fixed point of `_phi`, whose ten steps stop 1e-8 before it."
        if name == "vit_nd_rotary"
        else ""
    )
    source = f"vit-pytorch {version('vit-pytorch')}"
    return source, f"{name}.ViTND", kwargs, {"input": film, "output": model(film), **weights}, note


@case
def film_vit_nd() -> Any:
    return vit_nd("vit_nd", pool="cls")


@case
def film_vit_nd_rotary() -> Any:
    return vit_nd("vit_nd_rotary", rope_min_freq=0.3, rope_max_freq=3.0, rope_p_zero_freqs=0.2)


@case
def film_vit_nd_rotary_causal() -> Any:
    return vit_nd("vit_nd_rotary", rope_min_freq=0.3, rope_max_freq=3.0, causal_dims=(0,))


@case
def film_monai_vit() -> Any:
    from monai.networks.nets import ViT

    kwargs: dict[str, Any] = {"in_channels": 1, "img_size": (8, 16, 24), "patch_size": (4, 8, 8), "hidden_size": 24}
    kwargs |= {"mlp_dim": 48, "num_layers": 2, "num_heads": 2, "classification": True, "num_classes": 5}
    model, weights = filled(ViT(**kwargs))
    volume = draw(2, 1, *kwargs["img_size"])
    note = "a table without a row for the class token, a classifier with tanh, LayerNorm eps 1e-5."
    return f"monai {version('monai')}", "ViT", kwargs, {"input": volume, "output": model(volume)[0], **weights}, note


@case
def film_monai_sincos() -> Any:
    from monai.networks.blocks.pos_embed_utils import build_sincos_position_embedding

    kwargs = {"grid_size": (2, 3, 4), "embed_dim": 24}
    note = "output: the table, (1, N, D): sines, then cosines, of the second axis, then of the first, then of the last."
    table = build_sincos_position_embedding(**kwargs)
    return f"monai {version('monai')}", "build_sincos_position_embedding", kwargs, {"output": table.detach()}, note


def naflex(**given: Any) -> Any:
    from timm.models.naflexvit import NaFlexVit

    kwargs: dict[str, Any] = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0}
    kwargs |= {"num_classes": 5, "class_token": True, "reg_tokens": 1, "global_pool": "avg", "fc_norm": True}
    model, weights = filled(NaFlexVit(**kwargs, **given))
    row = images()
    patches, places, valid = padded(row, 8)
    output = model({"patches": patches, "patch_coord": places, "patch_valid": valid})
    note = "images of several sizes in one batch, padded with 3 and masked; output: of each image, (B, 5)."
    kwargs |= given
    return f"timm {version('timm')}", "NaFlexVit", kwargs, {**inputs(row), "output": output, **weights}, note


@case
def packed_naflex_learned() -> Any:
    return naflex(pos_embed="learned", pos_embed_grid_size=(4, 5))


@case
def packed_naflex_factorized() -> Any:
    return naflex(pos_embed="factorized", pos_embed_grid_size=(4, 4))


def naflex_rope(**kwargs: Any) -> Any:
    return naflex(pos_embed="none", attn_type="rope", **kwargs)


@case
def packed_naflex_axial() -> Any:
    return naflex_rope(rope_type="axial", rope_temperature=100.0)


@case
def packed_naflex_mixed() -> Any:
    return naflex_rope(rope_type="mixed", rope_temperature=10.0)


@case
def packed_naflex_mrope() -> Any:
    return naflex_rope(rope_type="mrope", rope_mrope_section=(2, 2, 2), rope_rotate_half=True)


@case
def packed_siglip2() -> Any:
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    kwargs = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    kwargs |= {"patch_size": 8, "num_patches": 16}
    model, weights = filled(Siglip2VisionModel(Siglip2VisionConfig(**kwargs)))
    row = images()
    patches, _, valid = padded(row, 8)
    shapes = torch.tensor([[side // 8 for side in image.shape[1:]] for image in row])
    output = model(patches, valid.long(), shapes).pooler_output
    note = "images of several sizes in one batch, padded with 3 and masked; output: the pooled output, (B, D)."
    source = f"transformers {version('transformers')}"
    return source, "Siglip2VisionModel", kwargs, {**inputs(row), "output": output, **weights}, note


@torch.no_grad()
def main(names: list[str]) -> None:
    """Record the cases of these names, all by default."""
    for seed, (name, function) in enumerate(CASES.items(), 300):
        if names and name not in names:
            continue
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float64)
        with Wide():
            reference, kind, kwargs, tensors, note = function()
        exact = {
            one for one, value in tensors.items() if value.is_floating_point() and torch.equal(value, rounded(value))
        }
        tensors = {
            one: value.detach().to(torch.float32 if one in exact else value.dtype).clone().contiguous()
            for one, value in tensors.items()
        }
        save_file(tensors, GOLDEN / f"{name}.safetensors")
        facts = {"case": name, "reference": reference, "class": kind, "kwargs": kwargs, "seed": seed, "note": note}
        facts["tensors"] = {one: list(value.shape) for one, value in tensors.items() if not one.startswith("weight.")}
        (GOLDEN / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
        print(name, sum(value.nbytes for value in tensors.values()) // 1024, "KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
