"""Compare recorded outputs of reference implementations with ours.

    python tests/parity/check.py CASE.safetensors [CASE.safetensors ...]

A case is two files: `CASE.safetensors` (input, weights under their published names, outputs) and `CASE.json`
(reference, class, keyword arguments). The model is built in float64 by the class's entry in `BUILDERS`, and
every recorded output is compared with ours. Prints the largest difference of each tensor; exits 1 above 1e-9.

A new family adds its class to `BUILDERS`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import released_biases
import released_posmlp
import released_rope
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from graticule.backbones import (
    CeitTransformer,
    CompactTransformer,
    DistilledVisionTransformer,
    GMlp,
    PyramidVisionTransformer,
    SwinTransformer,
    T2tVisionTransformer,
    VisionTransformer,
)
from graticule.backbones.registry import checkpoint_filter_fn
from graticule.encodings import Peg
from graticule.factory import build_position
from graticule.grid import Grid

TOLERANCE = 1e-9

#: LaPE's names -> ours
ENCODINGS = {
    "learnable": "learnable",
    "1D_sin": "sinusoidal_1d",
    "2D_sin": "sinusoidal_2d",
    "2D_RPE": "relative_bias",
}
JOININGS = {"basic": "default", "share": "shared", "unshare": "unshared", "LaPE": "lape", "LN": "lape"}


class UnknownClassError(Exception):
    """Raised if no model is registered for the class of a case."""


def build_lape(kwargs: dict[str, Any], distilled: bool = False) -> nn.Module:
    """Build our model for keyword arguments of LaPE's code."""
    position = partial(
        build_position,
        encoding=ENCODINGS[kwargs.pop("pe", "learnable")],
        joining=JOININGS[kwargs.pop("join_type", "basic")],
    )
    return (DistilledVisionTransformer if distilled else VisionTransformer)(position, **kwargs)


def build_timm(kwargs: dict[str, Any], distilled: bool = False) -> nn.Module:
    """Build our model for keyword arguments of timm."""
    position = partial(build_position, encoding="none" if kwargs.pop("pos_embed", "learn") == "none" else "learnable")
    return (DistilledVisionTransformer if distilled else VisionTransformer)(position, **kwargs)


def build_pvt(kwargs: dict[str, Any], peg: bool = False) -> nn.Module:
    """Build our model for keyword arguments of PVT's code, or of Twins' with PEG and global average pooling."""
    position = partial(build_position, encoding="peg" if peg else "learnable(resampler='bilinear')")
    return PyramidVisionTransformer(position, global_pool="avg" if peg else "token", **kwargs)


def build_gmlp(kwargs: dict[str, Any]) -> nn.Module:
    """Build our model for keyword arguments of timm's MlpMixer as a gMLP."""
    if (kwargs.pop("block_layer"), kwargs.pop("mlp_layer")) != ("SpatialGatingBlock", "GatedMlp"):
        raise UnknownClassError("of MlpMixer there is only gMLP, with SpatialGatingBlock and GatedMlp")
    return GMlp(partial(build_position, encoding="sgu"), **kwargs)


def build_swin(kwargs: dict[str, Any]) -> nn.Module:
    """Build our model for keyword arguments of timm's Swin."""
    return SwinTransformer(partial(build_position, encoding="relative_bias"), **kwargs)


def build_compact(kwargs: dict[str, Any], family: str) -> nn.Module:
    """Build our model for keyword arguments of the code of compact transformers."""
    kinds = {"learnable": "learnable", "sine": "sinusoidal_1d", "none": "none"}
    position = partial(build_position, encoding=kinds[kwargs.pop("positional_embedding")])
    named = {
        "embed_dim": "embedding_dim",
        "depth": "num_layers",
        "patch_size": "kernel_size",
        "conv_layers": "n_conv_layers",
        "conv_stride": "stride",
        "conv_padding": "padding",
    }
    given = {own: kwargs.pop(theirs) for own, theirs in named.items() if theirs in kwargs}
    if family == "cct":
        given["tokenizer"] = "convolutions"
    return CompactTransformer(position, global_pool="token" if family == "vit_lite" else "seq", **given, **kwargs)


def build_t2t(kwargs: dict[str, Any]) -> nn.Module:
    """Build our model for keyword arguments of T2T-ViT's code."""
    return T2tVisionTransformer(partial(build_position, encoding="sinusoidal_1d"), **kwargs)


def build_ceit(kwargs: dict[str, Any]) -> nn.Module:
    """Build our model for keyword arguments of CeiT's code."""
    if kwargs.pop("hybrid_backbone") != "Image2Tokens()":
        raise UnknownClassError("of CeiT there is the stem Image2Tokens alone")
    return CeitTransformer(partial(build_position, encoding="learnable"), **kwargs)


class PegAlone(nn.Module):
    """A PEG on a fixed grid, as a model of tokens."""

    def __init__(self, dim: int, grid: Grid) -> None:
        super().__init__()
        self.peg = Peg(dim)
        self.grid = grid

    def forward(self, x: Tensor) -> Tensor:
        """Apply the PEG to x: (B, N, D)."""
        return self.peg(x, self.grid)


def build_peg(kwargs: dict[str, Any]) -> nn.Module:
    """Build a PEG on the grid of the case; those of stride 2 are no position encoding and are not supported."""
    if kwargs["s"] != 1 or kwargs["in_chans"] != kwargs["embed_dim"]:
        raise UnknownClassError(f"a PEG keeps grid and channels, got {kwargs}")
    return PegAlone(kwargs["embed_dim"], Grid(*kwargs["grid"]))


BUILDERS: dict[tuple[str, str], Callable[[dict[str, Any]], nn.Module]] = {
    ("Ingrid725/LaPE", "VisionTransformer"): build_lape,
    ("Ingrid725/LaPE", "DistilledVisionTransformer"): partial(build_lape, distilled=True),
    ("whai362/PVT", "PyramidVisionTransformer"): build_pvt,
    ("SHI-Labs/Compact-Transformers", "ViTLite"): partial(build_compact, family="vit_lite"),
    ("SHI-Labs/Compact-Transformers", "CVT"): partial(build_compact, family="cvt"),
    ("SHI-Labs/Compact-Transformers", "CCT"): partial(build_compact, family="cct"),
    ("yitu-opensource/T2T-ViT", "T2T_ViT"): build_t2t,
    ("coeusguo/ceit", "CeIT"): build_ceit,
    ("Meituan-AutoML/Twins", "CPVTV2"): partial(build_pvt, peg=True),
    ("Meituan-AutoML/Twins", "PosCNN"): build_peg,
    ("timm", "timm.models.VisionTransformer"): build_timm,
    ("timm", "timm.models.SwinTransformer"): build_swin,
    ("timm", "timm.models.MlpMixer"): build_gmlp,
    ("timm", "timm.models.VisionTransformerDistilled"): partial(build_timm, distilled=True),
}


#: (reference, class) -> function that computes the outputs of its cases from their arguments and weights.
COMPUTE: dict[tuple[str, str], Callable[..., dict[str, Tensor]]] = {
    **{(released_posmlp.SOURCE, kind): compute for kind, compute in released_posmlp.COMPUTE.items()},
    **released_rope.COMPUTE,
    **released_biases.COMPUTE,
}


def _source(case: dict[str, Any]) -> str:
    """Return the reference of a case, without its version."""
    return str(case["reference"].split("@")[0].split(" ")[0])


def build(case: dict[str, Any]) -> nn.Module:
    """Build our model of a case, in float64 and evaluation mode, with random weights."""
    reference = _source(case)
    try:
        builder = BUILDERS[reference, case["class"]]
    except KeyError:
        known = ", ".join(f"{cls} of {source}" for source, cls in BUILDERS)
        raise UnknownClassError(f"no builder for {case['class']} of {reference}; there are: {known}") from None
    kwargs = dict(case["kwargs"])
    if "norm_eps" in kwargs:
        kwargs["norm_layer"] = partial(nn.LayerNorm, eps=kwargs.pop("norm_eps"))
    return builder(kwargs).double().eval()


@torch.no_grad()
def outputs(model: nn.Module, images: Tensor, names: list[str]) -> dict[str, Tensor]:
    """Compute the named outputs: `output`, and `pe_layer_L`, which layer L adds after its norm."""
    found = {"output": model(images)}
    position_of: Any = getattr(model, "position", lambda grid: [])
    for layer, position in enumerate(position_of(model.grid)):
        if position.inner is not None:
            found[f"pe_layer_{layer}"] = position.inner
    return {name: found[name] for name in names if name in found}


def differences(path: Path) -> dict[str, float]:
    """Return the largest absolute difference of every recorded output of the case at `path`; inf if ours is missing."""
    case = json.loads(path.with_suffix(".json").read_text())
    tensors = load_file(path)
    weights = {name.removeprefix("weight."): t for name, t in tensors.items() if name.startswith("weight.")}
    weights = {name: t.double() if t.is_floating_point() else t for name, t in weights.items()}
    recorded = {name: t.double() for name, t in tensors.items() if not name.startswith("weight.") and name != "input"}

    compute = COMPUTE.get((_source(case), case["class"]))
    if compute is not None:
        with torch.no_grad():
            return _compared(compute(case["kwargs"], weights, tensors["input"].double()), recorded)
    model = build(case)
    if hasattr(model, "position"):
        weights = checkpoint_filter_fn(weights, model)
    model.load_state_dict(weights, strict=True)
    return _compared(outputs(model, tensors["input"].double(), list(recorded)), recorded)


def _compared(ours: dict[str, Tensor], recorded: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: (ours[name].reshape(value.shape) - value).abs().max().item()
        if name in ours and ours[name].numel() == value.numel()
        else float("inf")
        for name, value in recorded.items()
    }


def main(paths: list[str]) -> int:
    """Check every case; returns 0 if all agree to `TOLERANCE`, 1 otherwise."""
    if not paths or {"-h", "--help"} & set(paths):
        print(__doc__)
        return 0 if paths else 1
    failed = False
    for path in map(Path, paths):
        try:
            found = differences(path)
        except (UnknownClassError, SafetensorError, OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            print(f"FAIL {path.stem}: {type(error).__name__}: {error}")
            failed = True
            continue
        for name, difference in found.items():
            agrees = difference <= TOLERANCE  # a NaN does not
            failed |= not agrees
            print(f"{'ok  ' if agrees else 'FAIL'} {path.stem:32s} {name:16s} {difference:.3e}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
