"""Compare recorded outputs of reference implementations with ours.

    python tests/parity/check.py                                          # all recorded cases, half a minute
    python tests/parity/check.py CASE.safetensors [CASE.safetensors ...]

A case is two files: `CASE.safetensors` (input, weights under their published names, outputs) and `CASE.json`
(reference, class, keyword arguments). A model of timm is built by its class with those arguments, and converted by
`graticule.convert`; one of other code is built by our class, whose arguments are those of the case by the names in
`PORTS`, and loads the weights under their published names. All are computed in float64. An argument that ours does not
have is an error that names it. Prints the largest difference of each tensor; exits 1 above 1e-9.

A family with cases of other code has an entry in `PORTS`; timm's need none.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import released_dense
import released_posmlp
import released_videos
import timm
import torch
from released_dense import Tensors
from released_videos import Arguments
from safetensors.torch import load_file
from torch import Tensor, nn

import graticule
from graticule import Grid, backbones
from graticule.encodings.build import build_position
from graticule.encodings.conditional import Peg
from graticule.encodings.irpe import Irpe
from graticule.registry.specs import parse_sum

TOLERANCE = 1e-9
#: Recorded cases that are not of models; other tests compare them.
_OTHERS = ("deit_distillation", "deit_rasampler", "deit_schedule", "pyramid_drop_path")
_OTHERS += ("sincos2d_timm_float64",)
RECORDED = [
    path for path in sorted((Path(__file__).parent / "golden").glob("*.safetensors")) if path.stem not in _OTHERS
]


class UnknownClassError(Exception):
    """Raised if there is no port of the class of a case, or not of an option of it."""


class Port(NamedTuple):
    """Our counterpart of a class of other code."""

    backbone: Any  # our class
    position: Callable[[Arguments], tuple[str, str]]  # encoding and joining, whose arguments are removed
    names: Mapping[str, str] = {}  # their name of an argument -> ours; the others have the same name
    options: Mapping[str, Any] = {}  # further arguments of ours
    fixed: Mapping[str, Any] = {}  # arguments of theirs that can have only this value
    #: Converts the weights to a layout that our model loads.
    layout: Callable[[Tensors, Arguments], Tensors] = lambda weights, kwargs: weights


def always(encoding: str) -> Callable[[Arguments], tuple[str, str]]:
    return lambda kwargs: (encoding, "default")


def lape(kwargs: Arguments) -> tuple[str, str]:
    """Return the position of LaPE's models."""
    sines = {"1D_sin": "sinusoidal_1d", "2D_sin": "sinusoidal_2d"}
    encodings = {"learnable": "learnable", **sines, "2D_RPE": "relative_bias"}
    joinings = {"basic": "default", "share": "shared", "unshare": "unshared", "LaPE": "lape", "LN": "lape"}
    return encodings[kwargs.pop("pe", "learnable")], joinings[kwargs.pop("join_type", "basic")]


def compact(kwargs: Arguments) -> tuple[str, str]:
    kinds = {"learnable": "learnable", "sine": "sinusoidal_1d", "none": "none"}
    return kinds[kwargs.pop("positional_embedding", "learnable")], "default"


def irpe(kwargs: Arguments) -> tuple[str, str]:
    return f"learnable + irpe({irpe_options(kwargs.pop('rpe_config'))})", "default"


def irpe_options(config: Arguments) -> str:
    """Convert iRPE's configuration to our options."""
    method = {"product": "product", "euc": "euclidean", "quant": "quant", "cross": "cross"}[config["method"]]
    mode = {"ctx": "contextual", "bias": "bias"}[config["mode"]]
    shared, ratio = config["shared_head"], config["ratio"]
    return f"method={method!r}, on={config['rpe_on']!r}, mode={mode!r}, ratio={ratio!r}, shared_heads={shared!r}"


def swin(kwargs: Arguments) -> tuple[str, str]:
    """Return the position of Microsoft's Swin, and of naver's with rotary encodings."""
    encodings = ["relative_bias"] if kwargs.pop("use_rpb", "rope_mixed" not in kwargs) else []
    if "rope_mixed" in kwargs:
        encodings.append(rotary(kwargs)[0])
    return " + ".join([*encodings, *["learnable"] * kwargs.pop("ape", False)]) or "none", "default"


def rotary(kwargs: Arguments) -> tuple[str, str]:
    name = "rope_mixed" if kwargs.pop("rope_mixed") else "rope"
    return f"{name}(preset='rope_vit', base={kwargs.pop('rope_theta')})", "default"


def rope_vit(weights: Tensors, kwargs: Arguments) -> Tensors:
    """Name the frequencies of naver's ViT like timm's."""
    renamed = {name: value for name, value in weights.items() if not name.startswith("freqs_t_")}
    if "freqs" in renamed:
        renamed["rope.freqs"] = renamed.pop("freqs").unflatten(-1, (kwargs["num_heads"], -1))
    return renamed


def rope_swin(weights: Tensors, kwargs: Arguments) -> Tensors:
    """Stack the frequencies of the blocks of a stage."""
    stacked = {name: value for name, value in weights.items() if not re.search(r"\.rope_(freqs|t_[xy])$", name)}
    for stage, depth in enumerate(kwargs["depths"]):
        names = [f"layers.{stage}.blocks.{block}.attn.rope_freqs" for block in range(depth)]
        if names[0] in weights:
            stacked[f"position.stages.{stage}.encoding.freqs"] = torch.stack([weights[name] for name in names], 1)
    return stacked


#: Arguments of compact transformers -> ours.
COMPACT = {
    **{"embedding_dim": "embed_dim", "num_layers": "depth", "kernel_size": "patch_size", "stride": "conv_stride"},
    **{"n_conv_layers": "conv_layers", "padding": "conv_padding", "n_input_channels": "in_chans"},
    **{"dropout": "proj_drop_rate", "attention_dropout": "attn_drop_rate", "stochastic_depth": "drop_path_rate"},
}
TOKEN = {"global_pool": "token"}
COMPACTS = {"ViTLite": TOKEN, "CVT": {"global_pool": "seq"}, "CCT": {"global_pool": "seq", "tokenizer": "convolutions"}}
VIT, PVT = backbones.VisionTransformer, backbones.PyramidVisionTransformer
#: Some arguments of Microsoft's code change no number.
UNUSED = {"qk_scale": None, "use_checkpoint": False, "fused_window_process": False}
SWIN = Port(backbones.SwinTransformer, swin, options={"shift": "microsoft"}, fixed=UNUSED)
ROPE_VIT = {"block_layers": "RoPE_Layer_scale_init_Block", "Attention_block": "RoPEAttention"}
IMAGE_TO_TOKENS = {"hybrid_backbone": "Image2Tokens()"}
PORTS: dict[tuple[str, str], Port] = {
    ("Ingrid725/LaPE", "VisionTransformer"): Port(VIT, lape),
    ("Ingrid725/LaPE", "DistilledVisionTransformer"): Port(backbones.DistilledVisionTransformer, lape),
    ("whai362/PVT", PVT.__name__): Port(PVT, always("learnable(resampler='bilinear')"), options=TOKEN),
    ("Meituan-AutoML/Twins", "CPVTV2"): Port(PVT, always("peg"), options={"global_pool": "avg"}),
    **{
        ("SHI-Labs/Compact-Transformers", name): Port(backbones.CompactTransformer, compact, COMPACT, options)
        for name, options in COMPACTS.items()
    },
    ("yitu-opensource/T2T-ViT", "T2T_ViT"): Port(backbones.T2tVisionTransformer, always("sinusoidal_1d")),
    ("coeusguo/ceit", "CeIT"): Port(backbones.CeitTransformer, always("learnable"), fixed=IMAGE_TO_TOKENS),
    ("microsoft/Cream", "iRPE/DeiT-with-iRPE VisionTransformer"): Port(VIT, irpe),
    ("microsoft/Swin-Transformer", "SwinTransformer"): SWIN,
    ("naver-ai/rope-vit", "RoPESwinTransformer"): SWIN._replace(layout=rope_swin),
    ("naver-ai/rope-vit", "deit rope_vit_models"): Port(
        VIT, rotary, options={"init_values": 1e-4}, fixed=ROPE_VIT, layout=rope_vit
    ),
}


def build(case: Arguments, weights: Tensors) -> nn.Module:
    """Build our model of a case with its weights, in float64 and evaluation mode."""
    kwargs = dict(case["kwargs"])
    if "norm_eps" in kwargs:
        kwargs["norm_layer"] = partial(nn.LayerNorm, eps=kwargs.pop("norm_eps"))
    if _source(case) == "timm" and case["class"].startswith("timm.models."):
        return graticule.convert(build_timm(case["class"].rpartition(".")[2], kwargs, weights))
    port = PORTS.get((_source(case), case["class"]))
    if port is None:
        known = ", ".join(f"{cls} of {source}" for source, cls in [*PORTS, *COMPUTE, *WITH_INPUTS])
        raise UnknownClassError(
            f"no port of {case['class']} of {_source(case)}; there are all of timm that `convert` accepts, and {known}"
        )
    for name, value in port.fixed.items():
        if kwargs.pop(name, value) != value:
            raise UnknownClassError(f"`{name}` can only be {value}, got {case['kwargs'][name]}")
    encoding, joining = port.position(kwargs)
    position = partial(build_position, encoding=encoding, joining=joining)
    model = port.backbone(position, **port.options, **{port.names.get(name, name): kwargs[name] for name in kwargs})
    model.double().eval().load_state_dict(port.layout(weights, case["kwargs"]), strict=True)
    return model


def build_timm(name: str, kwargs: Arguments, weights: Tensors | None) -> nn.Module:
    """Build a model of timm by the name of its class; arguments that are classes are given by their names."""
    files = [module for path, module in sys.modules.items() if path.startswith("timm.models.")]
    kind = next((getattr(file, name) for file in files if hasattr(file, name)), None)
    if kind is None:
        raise UnknownClassError(f"timm {timm.__version__} has no {name}")
    for key, value in kwargs.items():
        if key.endswith(("_layer", "_fn")) and isinstance(value, str):
            kwargs[key] = getattr(sys.modules[kind.__module__], value, None) or getattr(timm.layers, value)
    model = kind(**kwargs).double().eval()
    if weights is not None:
        model.load_state_dict(weights, strict=True)
    return model


@torch.no_grad()
def outputs(model: Any, images: Tensor) -> Tensors:
    """Compute the output and, under their recorded names, everything that a case may record of the position."""
    values: Tensors = {}

    def bias(attention: Any, arguments: tuple[Any, ...], _: Any, name: str) -> None:
        x, position, *_ = arguments
        queries = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1))[:, :, 0].transpose(1, 2)
        values[name] = position.bias(queries * attention.scale)

    grid, tables = model.grid, []
    for layer, position in enumerate(model.position(grid)):
        values |= {} if position.after_norm is None else {f"pe_layer_{layer}": position.after_norm}
        if isinstance(position.bias, Tensor):
            values[f"bias_layer_{layer}"] = position.bias
        elif position.bias is not None:
            model.blocks[layer].attn.register_forward_hook(partial(bias, name=f"rpe_k_layer_{layer}"))
        if position.rotary is not None:
            tables.append(position.rotary.table[..., -grid.within.patches :, :])
            sines, cosines = (part[..., ::2] for part in tables[-1].chunk(2, -1))
            values |= {f"rope_cos_layer_{layer}": cosines, f"rope_sin_layer_{layer}": sines}
    if tables and len({table.shape for table in tables}) == 1:
        same = all(torch.equal(table, tables[0]) for table in tables)
        values["rope"] = tables[0] if same else torch.stack(tables)
        sines, cosines = (part[..., ::2] for part in values["rope"].chunk(2, -1))
        values |= {"rope_cos": cosines, "rope_sin": sines}
    values["output"] = model(images)
    layer = 0
    for module in model.position.modules():
        if isinstance(module, Irpe):
            values |= buckets(module)
        elif hasattr(module, "coordinates") and hasattr(module, "patch_bias"):
            values |= {f"coords_layer_{layer}": module.coordinates(module.grid), "coords": module.coordinates(grid)}
            values["index"] = grid.offset_index().double()
            layer += 1
        elif hasattr(module, "relative_position_bias_table"):
            values["index"] = rows_of(module)
    if isinstance(model, backbones.SwinTransformer):
        values |= masks(model)
    return values


def buckets(encoding: Any) -> Tensors:
    names = ("bucket_rows", "bucket_cols") if encoding.method == "cross" else ("bucket",)
    return {name: index.double() for name, index in zip(names, encoding.index, strict=True)}


def rows_of(encoding: Any) -> Tensor:
    """Return the index of each pair: the bias of a table of row numbers."""
    table = encoding.relative_position_bias_table
    before = table.clone()
    table.copy_(torch.arange(len(table), dtype=torch.float64)[:, None].expand_as(table))
    index: Tensor = encoding(encoding.grid)[0]
    table.copy_(before)
    return index


def masks(model: Any) -> Tensors:
    """Return the mask of every window of the shifted layers of Swin, (windows, M, M), 0 and -100 as recorded."""
    values: Tensors = {}
    blocks = [(stage, index) for stage, depth in enumerate(model.depths) for index in range(depth)]
    grids = model.position_grids(model.grid)
    for layer, (stage, index) in enumerate(blocks):
        (windows,) = model.block_arguments(stage, grids[stage])[index]
        strips = []
        for strip in windows.kinds(torch.zeros(1, windows.grid.tokens, 1)):
            row = []
            for part, near in strip:
                side = windows.window.tokens
                mask = torch.zeros(side, side) if near is None else -100.0 * ~near
                shape = part.shape[1] // windows.window.height, part.shape[2] // windows.window.width
                row.append(mask.double().expand(*shape, -1, -1))
            strips.append(torch.cat(row, 1))
        if any(windows.shift):
            values[f"attn_mask_layer_{layer}"] = torch.cat(strips).flatten(0, 1)
    return values


def compute_irpe(kwargs: Arguments, weights: Tensors, queries: Tensor) -> Tensors:
    config = kwargs["rpe_config"]
    grid = Grid(*kwargs["grid"], prefix=config["skip"])
    if kwargs["on"] not in ("q", "k") or config["mode"] != "ctx":
        raise UnknownClassError(f"iRPE alone is contextual, on queries or keys, got {kwargs}")
    spec = parse_sum(f"irpe({irpe_options({**config, 'rpe_on': kwargs['on']})})", "encoding")
    encoding = Irpe(grid, kwargs["num_heads"], kwargs["head_dim"], **spec[0].options).double()
    prefix = f"rpe_{kwargs['on']}."
    names = {name: encoding.published_names(name)[-1].removeprefix(prefix) for name, _ in encoding.named_parameters()}
    encoding.load_state_dict({name: weights[published] for name, published in names.items()})
    made: Any = encoding(grid).bias
    return {"output": made(queries), **buckets(encoding)}


def compute_peg(kwargs: Arguments, weights: Tensors, x: Tensor) -> Tensors:
    """Compute a case of a PEG on a grid; those of stride 2 are no position encoding and are not supported."""
    if kwargs["s"] != 1 or kwargs["in_chans"] != kwargs["embed_dim"]:
        raise UnknownClassError(f"a PEG keeps grid and channels, got {kwargs}")
    peg = Peg(kwargs["embed_dim"]).double()
    peg.load_state_dict({name.removeprefix("peg."): value for name, value in weights.items()})
    return {"output": peg(x, Grid(*kwargs["grid"]))}


#: (reference, class) -> function that computes the outputs of its cases from their arguments and weights.
COMPUTE: dict[tuple[str, str], Callable[..., Tensors]] = {
    **{(released_posmlp.SOURCE, kind): compute for kind, compute in released_posmlp.COMPUTE.items()},
    ("microsoft/Cream", "iRPE"): compute_irpe,
    ("Meituan-AutoML/Twins", "PosCNN"): compute_peg,
}
#: The same for cases of several inputs, from their tensors.
WITH_INPUTS: dict[tuple[str, str], Callable[..., Tensors]] = {**released_dense.COMPUTE, **released_videos.COMPUTE}


def _source(case: Arguments) -> str:
    return str(case["reference"].split("@")[0].split(" ")[0])


def differences(path: Path) -> dict[str, float]:
    """Return the largest absolute difference of every recorded output of the case at `path`; inf if ours is missing."""
    case = json.loads(path.with_suffix(".json").read_text())
    tensors = {name: t.double() if t.is_floating_point() else t for name, t in load_file(path).items()}
    weights = {name.removeprefix("weight."): t for name, t in tensors.items() if name.startswith("weight.")}
    recorded = {name: t.double() for name, t in tensors.items() if not name.startswith(("weight.", "input"))}
    key = _source(case), case["class"]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # timm computes tables in it
    try:
        with torch.no_grad():
            if key in WITH_INPUTS:
                ours = WITH_INPUTS[key](case["kwargs"], weights, tensors)
            elif key in COMPUTE:
                ours = COMPUTE[key](case["kwargs"], weights, tensors["input"])
            else:
                ours = outputs(build(case, weights), tensors["input"])
    finally:
        torch.set_default_dtype(default)
    return {
        name: (ours[name].reshape(value.shape) - value).abs().max().item()
        if name in ours and ours[name].numel() == value.numel()
        else float("inf")
        for name, value in recorded.items()
    }


def main(paths: list[str]) -> int:
    """Check the given cases, or all that are recorded; returns 0 if all agree to `TOLERANCE`, 1 otherwise."""
    failed = False
    for path in map(Path, paths) if paths else RECORDED:
        for name, difference in differences(path).items():
            agrees = difference <= TOLERANCE  # a NaN does not
            failed |= not agrees
            print(f"{'ok  ' if agrees else 'FAIL'} {path.stem:32s} {name:16s} {difference:.3e}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
