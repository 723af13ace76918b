"""Compute the cases of models with relative biases: iRPE, timm's `vit_relpos`, Swin with a table, Swin V2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graticule import Grid
from graticule.backbones import SwinTransformer, SwinTransformerV2, VisionTransformer
from graticule.encodings import Irpe
from graticule.factory import build_position

Tensors = dict[str, Tensor]

METHODS = {"product": "product", "euc": "euclidean", "quant": "quant", "cross": "cross"}


def irpe_options(config: dict[str, Any]) -> dict[str, Any]:
    """Convert iRPE's configuration to our options."""
    mode = {"ctx": "contextual", "bias": "bias"}[config["mode"]]
    names = {"method": METHODS[config["method"]], "on": config["rpe_on"], "mode": mode, "ratio": config["ratio"]}
    return {**names, "shared_heads": config["shared_head"]}


def buckets(encoding: Any) -> Tensors:
    """Return the buckets under their recorded names."""
    names = ("bucket_rows", "bucket_cols") if encoding.method == "cross" else ("bucket",)
    return {name: index.double() for name, index in zip(names, encoding.index, strict=True)}


def compute_irpe(kwargs: dict[str, Any], weights: Tensors, images: Tensor) -> Tensors:
    """Compute a case of DeiT with iRPE, including the bias of each layer."""
    options = ", ".join(f"{name}={value!r}" for name, value in irpe_options(kwargs.pop("rpe_config")).items())
    norm = partial(nn.LayerNorm, eps=kwargs.pop("norm_eps"))
    model: Any = VisionTransformer(
        partial(build_position, encoding=f"learnable + irpe({options})"), norm_layer=norm, **kwargs
    )
    model.double().eval().load_state_dict(weights)
    found: Tensors = {}

    def record(attention: Any, given: tuple[Any, ...], _: Any, name: str) -> None:
        x, position, *_ = given
        queries = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1))[:, :, 0].transpose(1, 2)
        found[name] = position.bias(queries * attention.scale)

    for layer, block in enumerate(model.blocks):
        block.attn.register_forward_hook(partial(record, name=f"rpe_k_layer_{layer}"))
    found["output"] = model(images)
    (encoding, *_) = [module for module in model.modules() if isinstance(module, Irpe)]
    return {**found, **buckets(encoding)}


def compute_irpe_alone(kwargs: dict[str, Any], weights: Tensors, queries: Tensor) -> Tensors:
    """Compute a case of only the module, on the keys."""
    config = kwargs["rpe_config"]
    grid = Grid(*kwargs["grid"], prefix=config["skip"])
    encoding = Irpe(grid, kwargs["num_heads"], kwargs["head_dim"], **irpe_options(config)).double()
    names = {own: encoding.published_names(own)[-1].removeprefix("rpe_k.") for own, _ in encoding.named_parameters()}
    encoding.load_state_dict({own: weights[theirs] for own, theirs in names.items()})
    made: Any = encoding(grid).bias
    return {"output": made(queries), **buckets(encoding)}


def compute_relpos(kwargs: dict[str, Any], weights: Tensors, images: Tensor) -> Tensors:
    """Compute a case of timm's ViT with relative positions."""
    mlp = kwargs.pop("rel_pos_type") == "mlp"
    encoding = f"mlp_bias(hidden={kwargs.pop('rel_pos_dim')})" if mlp else "relative_bias(prefix_rows=True)"
    given = {"class_token": False, "global_pool": "avg", **kwargs}
    model: Any = VisionTransformer(partial(build_position, encoding=encoding), **given)
    model.double().eval().load_state_dict(weights)
    grid = model.grid
    found = {"output": model(images)}
    found |= {f"bias_layer_{layer}": position.bias for layer, position in enumerate(model.position(grid))}
    first = model.position.encodings.get_submodule("0")
    if mlp:
        return {**found, "coords": first.coordinates(grid), "index": grid.offset_index().double()}
    rows = torch.arange(len(first.relative_position_bias_table), dtype=torch.float64)
    first.relative_position_bias_table.copy_(rows[:, None].expand(-1, first.num_heads))
    return {**found, "index": first(grid)[0]}  # with row numbers as the table, the bias is the index of each pair


def compute_swin_ape(kwargs: dict[str, Any], weights: Tensors, images: Tensor) -> Tensors:
    """Compute a case of Microsoft's Swin with a learnable table in addition to its biases."""
    names = ("img_size", "patch_size", "embed_dim", "depths", "num_heads", "window_size", "mlp_ratio", "num_classes")
    given = {name: kwargs[name] for name in names}
    model: Any = SwinTransformer(partial(build_position, encoding="relative_bias + learnable"), **given)
    (table,) = [name for name, _ in model.named_parameters() if name.endswith("pos_embed")]
    ours: Tensors = {}
    for name, value in weights.items():
        stage, _, rest = name.removeprefix("layers.").partition(".downsample.")
        if rest:  # before the next stage
            name = f"layers.{int(stage) + 1}.downsample.{rest}"
        if not name.endswith(("attn_mask", "relative_position_index")):
            ours[table if name == "absolute_pos_embed" else name] = value
    model.double().eval().load_state_dict(ours)
    found = {"output": model(images)}
    return {**found, **{f"bias_layer_{i}": layer.bias for i, layer in enumerate(model.position(model.grid))}}


def compute_swin_v2(kwargs: dict[str, Any], weights: Tensors, images: Tensor) -> Tensors:
    """Compute a case of timm's Swin V2: cosine attention with log-spaced continuous biases."""
    model: Any = SwinTransformerV2(partial(build_position, encoding="continuous_bias"), **kwargs)
    model.double().eval().load_state_dict(weights)
    found = {"output": model(images)}
    layers = model.position(model.grid)
    encodings = [module for module in model.position.modules() if hasattr(module, "cpb_mlp")]
    grids = model.position_grids(model.grid)
    at = [(stage, index) for stage, depth in enumerate(kwargs["depths"]) for index in range(depth)]
    for layer, ((stage, index), position, encoding) in enumerate(zip(at, layers, encodings, strict=True)):
        found[f"bias_layer_{layer}"] = position.bias
        found[f"coords_layer_{layer}"] = encoding.coordinates(encoding.grid)
        (windows,) = model.where(stage, index, grids[stage])
        if any(windows.shift):
            found[f"attn_mask_layer_{layer}"] = masks(windows)
    return found


def masks(windows: Any) -> Tensor:
    """Return the mask of every window, (windows, M, M), 0 and -100 as recorded."""
    size = windows.window.tokens
    strips = []
    for strip in windows.kinds(torch.zeros(1, windows.grid.tokens, 1)):
        row = []
        for part, seen in strip:
            rows, columns = part.shape[1] // windows.window.height, part.shape[2] // windows.window.width
            mask = torch.zeros(size, size) if seen is None else -100.0 * ~seen
            row.append(mask.double().expand(rows, columns, -1, -1))
        strips.append(torch.cat(row, 1))
    return torch.cat(strips).flatten(0, 1)


#: (reference, class) -> function that computes its cases.
COMPUTE: dict[tuple[str, str], Callable[[dict[str, Any], Tensors, Tensor], Tensors]] = {
    ("microsoft/Cream", "iRPE/DeiT-with-iRPE VisionTransformer"): compute_irpe,
    ("microsoft/Cream", "iRPE"): compute_irpe_alone,
    ("timm", "timm.models.VisionTransformerRelPos"): compute_relpos,
    ("microsoft/Swin-Transformer", "SwinTransformer"): compute_swin_ape,
    ("timm", "timm.models.SwinTransformerV2"): compute_swin_v2,
}
