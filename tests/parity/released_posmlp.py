"""Compute the cases of PosMLP's released code with our modules, in the layout of the cases.

Units, gates and blocks are parts of a PosMLP of one block, whose weights are loaded under the published names. Hidden
channels are permuted at input and output: the code mixes the first half and interleaves its groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from released_dense import Tensors
from torch import Tensor

from graticule.backbones.gmlp import GMlp
from graticule.backbones.posmlp import PosMlp
from graticule.checkpoints.load import published_state_dict
from graticule.encodings.build import build_position
from graticule.encodings.forms.mixing import MixingPosition
from graticule.encodings.gqpe import QuadraticMixing
from graticule.layers.gating import GatingUnit, mix_tokens
from graticule.position.displacement import Displacements
from graticule.position.grid import Grid
from graticule.position.windows import Windows
from graticule.registry.specs import Spec

SOURCE = "Zhicaiwww/PosMLP"
BLOCK = "levels.0.encoder.0."
#: Arguments of the code's units, gates and blocks, and those of its pyramid.
KNOWN = {"win_size", "gamma", "generalized", "symmetric", "quadratic", "pos_only", "use_softmax", "absolute_bias"}
KNOWN |= {"dim", "chunks", "norm_eps", "mlp_ratio", "gate_unit", "layer_idx", "num_blocks"}
PYRAMID = {"img_size", "num_levels", "embed_dims", "depths", "num_classes", "stem", "pool_layer", "stem_norm"}
PYRAMID |= {"downsample_norm", "depth_conv", "shift", "drop_rate", "drop_path_rate"}


def encoding_of(kwargs: dict[str, Any]) -> str:
    if kwargs.get("gate_unit") == "SGU":
        return "sgu"
    if kwargs.get("quadratic", True):
        return "ggqpe"
    return "glrpe" if kwargs.get("pos_only", True) else "lrpe_m"


def spec_of(kwargs: dict[str, Any]) -> str:
    """Return the encoding of a gate with options: a quadratic one has its form."""
    encoding = encoding_of(kwargs)
    options: dict[str, Any] = {}
    if not kwargs.get("absolute_bias", True) or (encoding == "sgu" and kwargs.get("layer_idx", 0) > 25):
        options["bias"] = False
    if encoding == "lrpe_m":
        options["group_tables"] = True
    elif encoding == "ggqpe":
        generalized, symmetric = kwargs.get("generalized", True), kwargs.get("symmetric", True)
        options["form"] = "gamma_released" if generalized and not symmetric else "gamma_gamma_t"
        options |= {} if generalized else {"form": "alpha_released"}
        options |= {} if kwargs.get("use_softmax", True) else {"softmax": False}
    return str(Spec(encoding, options))


def contiguous(half: int, groups: int, halves: int = 1) -> Tensor:
    """Return the indices of our channels in theirs."""
    order = torch.arange(half).view(-1, groups).T.flatten()
    return torch.cat([order + half * part for part in reversed(range(halves))])


def pairs(mixing: Tensor | Displacements) -> Tensor:
    return mixing if isinstance(mixing, Tensor) else mixing.matrix()


class Part:
    """A PosMLP of one block with the weights of a case, which are those below `prefix`."""

    def __init__(self, kwargs: dict[str, Any], weights: Tensors, dim: int, ratio: float, prefix: str) -> None:
        side, encoding = kwargs["win_size"], encoding_of(kwargs)
        if not isinstance(side, int):
            (side,) = set(side)  # windows of the code are squares
        if unknown := sorted(kwargs.keys() - KNOWN):
            raise ValueError(f"{', '.join(unknown)} is no known argument of PosMLP's parts")
        if kwargs.get("chunks", 2) > 2:
            raise ValueError("a chain of gates is not supported: `chunks` must be 1 or 2 in a block")
        if "pos.token_proj_n_bias" in "".join(weights) and not kwargs.get("absolute_bias", True):
            weights = {name: value for name, value in weights.items() if not name.endswith("token_proj_n_bias")}
        self.grid = Grid(side, side)
        self.groups = kwargs.get("gamma", 1)
        combine = "nonsplit" if kwargs.get("chunks", 2) == 1 else "gate"
        sizes: dict[str, Any] = {"img_size": 4 * side, "embed_dim": dim, "depths": (1,), "windows": (side,)}
        sizes |= {"groups": (self.groups,), "mlp_ratios": (ratio,), "combine": combine, "num_classes": 0}
        norm = encoding == "sgu" or any("gate_unit.norm." in name for name in weights)
        self.model = PosMlp(partial(build_position, encoding=spec_of(kwargs)), gate_norm=norm, **sizes)
        self.model.double().eval()
        published = {BLOCK + prefix + name: value for name, value in weights.items()}
        state = published_state_dict(self.model)
        computed = ("rel_indices", "relative_position_index")
        if extra := {name for name in published if not name.endswith(computed)} - state.keys():
            raise KeyError(f"ours has no {', '.join(sorted(extra))}")
        self.model.load_state_dict({**state, **published}, strict=True)
        (self.position,) = self.model.position(self.grid)
        (mixing,) = (part for part in self.model.position.modules() if isinstance(part, MixingPosition))
        (self.encoding,) = mixing.encodings

    def logits(self) -> Tensor:
        return self.encoding.displacements(self.grid)._replace(softmax=False).matrix()

    def mixed(self, tokens: Tensor) -> Tensor:
        """Mix tokens (B, windows, N, C) in their layout."""
        order = contiguous(tokens.shape[-1], self.groups)
        mixed = mix_tokens(tokens.flatten(0, 1)[..., order], self.position.mixing, self.position.spatial_bias)
        return self.permute_back(mixed)

    def permute_back(self, x: Tensor) -> Tensor:
        """Permute the channels of one half, or all if they are not split, to their order."""
        return x[..., contiguous(x.shape[-1], self.groups).argsort()]


def unit(kwargs: dict[str, Any], weights: Tensors, x: Tensor) -> Tensors:
    """Compute QuaMap and LearnedPosMap."""
    part = Part({"quadratic": "attention_centers" in weights, **kwargs}, weights, 2 * x.shape[-1], 1, "gate_unit.pos.")
    outputs = {"output": part.mixed(x), "weights": pairs(part.position.mixing)}
    return outputs | ({"logits": part.logits()} if isinstance(part.encoding, QuadraticMixing) else {})


def unit_1d(kwargs: dict[str, Any], weights: Tensors, x: Tensor) -> Tensors:
    """Compute QuaMap1D: form alpha on a grid of one row, with centers along it."""
    encoding = QuadraticMixing(Grid(1, kwargs["win_size"]), kwargs["gamma"], "alpha").double()
    center = torch.cat([weights["attention_centers"], torch.zeros_like(weights["attention_centers"])], 1)
    encoding.load_state_dict({"center": center, "matrix": weights["attention_spreads"][:, 0]})
    order = contiguous(x.shape[-1], kwargs["gamma"])
    mixed = mix_tokens(x.flatten(0, 1)[..., order], encoding(encoding.grid), weights["token_proj_n_bias"].flatten())
    logits = encoding.displacements(encoding.grid)._replace(softmax=False).matrix()
    return {"output": mixed[..., order.argsort()], "weights": encoding(encoding.grid), "logits": logits}


def gate(kwargs: dict[str, Any], weights: Tensors, x: Tensor) -> Tensors:
    split = kwargs.get("chunks", 2) == 2
    part = Part(kwargs, weights, kwargs["dim"], 1, "gate_unit.")
    half = kwargs["dim"] // (2 if split else 1)
    hidden = x.flatten(0, 1)[..., contiguous(half, part.groups, 2 if split else 1)]
    gating = part.model.block(0, 0).mlp_channels.gate
    outputs = {
        "output": part.permute_back(gating(hidden, part.position)),
        "mixed": part.mixed(x[..., :half]),
        "weights": pairs(part.position.mixing),
    }
    if isinstance(part.encoding, QuadraticMixing):
        outputs["logits"] = part.logits()
    else:
        outputs["table_part"] = part.encoding.second(part.grid)
    return outputs


def dense_gate(kwargs: dict[str, Any], weights: Tensors, x: Tensor) -> Tensors:
    """Compute SGU: with more than two chunks, a chain of our units, each of the previous output and the next chunk."""
    outputs: Tensors = {}
    first, *others = x.flatten(0, 1).chunk(kwargs["chunks"], -1)
    for step, chunk in enumerate(others):
        names = {"weight": f"norm_list.{step}.weight", "bias": f"norm_list.{step}.bias"}
        gating = GatingUnit(2 * chunk.shape[-1], partial(torch.nn.LayerNorm, eps=kwargs["norm_eps"])).double()
        gating.norm.load_state_dict({name: weights[published] for name, published in names.items()})
        dense = {f"proj_list.0.{kind}": weights[f"proj_list.{step}.{kind}"] for kind in names}
        norm = {f"norm_list.0.{kind}": weights[published] for kind, published in names.items()}
        part = Part(
            {**kwargs, "gate_unit": "SGU", "chunks": 2}, {**dense, **norm}, 2 * chunk.shape[-1], 1, "gate_unit."
        )
        outputs[f"normed_{step + 1}"] = gating.norm(first)
        outputs[f"mixed_{step + 1}"] = mix_tokens(gating.norm(first), part.position.mixing, part.position.spatial_bias)
        first = gating(torch.cat([chunk, first], -1), part.position)
    return {**outputs, "output": first}


def block(kwargs: dict[str, Any], weights: Tensors, x: Tensor) -> Tensors:
    """Compute PosMLPLayer."""
    part = Part(kwargs, weights, kwargs["dim"], kwargs["mlp_ratio"], "")
    ours = part.model.block(0, 0)
    seen: Tensors = {}
    mlp = ours.mlp_channels
    mlp.act.register_forward_hook(lambda _, __, y: seen.update(hidden=y))
    mlp.gate.norm.register_forward_hook(lambda _, __, y: seen.update(normed=y))
    mlp.gate.register_forward_hook(lambda _, __, y: seen.update(gated=y))
    output = ours(x.flatten(0, 1), part.position)
    split = 1 if mlp.gate.combine == "nonsplit" else 2
    hidden = seen["hidden"][..., contiguous(seen["hidden"].shape[-1] // split, part.groups, split).argsort()]
    mixed = mix_tokens(seen["normed"], part.position.mixing, part.position.spatial_bias)
    return {
        "output": output,
        "hidden": hidden,
        "normed": part.permute_back(seen["normed"]),
        "mixed": part.permute_back(mixed),
        "gated": part.permute_back(seen["gated"]),
    }


def pyramid_model(kwargs: dict[str, Any]) -> PosMlp:
    """Build our model for keyword arguments of the released PosMLP."""
    encoding = encoding_of(kwargs)
    linear = "stem" in kwargs
    if unknown := sorted(kwargs.keys() - KNOWN - PYRAMID):
        raise ValueError(f"{', '.join(unknown)} is no known argument of PosMLP")
    sizes = {name: kwargs[name] for name in ("drop_rate", "drop_path_rate") if name in kwargs}
    merging = "linear" if linear else "conv" if kwargs.get("depth_conv", True) else "dense_conv"
    named = {"embed_dims": "embed_dim", "win_size": "windows", "gamma": "groups", "mlp_ratio": "mlp_ratios"}
    size = kwargs["img_size"]
    options = {option: kwargs[argument] for argument, option in named.items()}
    return PosMlp(
        partial(build_position, encoding=spec_of(kwargs)),
        img_size=size if isinstance(size, int) else tuple(size),
        depths=kwargs["depths"],
        num_classes=kwargs["num_classes"],
        patch_embedding="linear" if linear else "conv",
        patch_merging=merging,
        stem_norm="layer" if kwargs.get("stem_norm") == "LN" else "batch",
        merging_norm="batch" if kwargs.get("downsample_norm") == "BN" else "layer",
        gate_norm=encoding == "sgu",
        combine="nonsplit" if kwargs.get("chunks") == 1 else "gate",
        shift="released" if kwargs.get("shift") and kwargs.get("num_blocks", 1) != 1 else None,
        **options,
        **sizes,
    )


def mask(windows: Windows) -> Tensor:
    """Return the code's mask of the logits of rolled windows, (windows, N, N): -200 between our separate windows."""
    piece = torch.zeros(windows.grid.shape, dtype=torch.int64)  # every token's window as we cut them
    tiles = [tile for strip in windows.tiles() for tile in strip]
    for number, tile in enumerate(tiles):
        at = piece[tile.rows, tile.columns]
        y, x = (torch.arange(side) // part for side, part in zip(at.shape, tile.part.shape, strict=True))
        at.copy_((number * windows.grid.height + y[:, None]) * windows.grid.width + x)
    rolled = piece.roll([-shift for shift in windows.shift], (0, 1))
    height, width = windows.window.shape
    pieces = rolled.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2).flatten(2).flatten(0, 1)
    return torch.where(pieces[:, :, None] == pieces[:, None], 0.0, -200.0).double()


def pyramid(kwargs: dict[str, Any], weights: Tensors, images: Tensor) -> Tensors:
    """Compute PosMLP: logits, masks, and the maps after the stem, every stage and the last norm."""
    model = pyramid_model(kwargs).double().eval()
    model.load_state_dict(dict(weights), strict=True)
    outputs = {"stem": model.grid.to_map(model.embed(images))}
    ends = torch.tensor(model.depths).cumsum(0).tolist()
    for layer, (tokens, grid) in enumerate(model.each_layer(images), start=1):
        stage = next(stage for stage, end in enumerate(ends) if layer <= end)
        (windows,) = model.block_arguments(stage, grid)[layer - 1 - (ends[stage] - model.depths[stage])]
        if any(windows.shift):
            outputs[f"mask_layer_{layer - 1}"] = mask(windows)
        if layer in ends:
            outputs[f"stage_{ends.index(layer)}"] = grid.to_map(tokens)
    return {**outputs, "features": grid.to_map(model.norm(tokens)), "output": model(images)}


def gmlp(kwargs: dict[str, Any], weights: Tensors, images: Tensor) -> Tensors:
    """Compute the gMLP of an earlier commit: logits and the tokens after each block."""
    sizes = {name: kwargs[name] for name in ("img_size", "patch_size", "embed_dim", "num_blocks", "mlp_ratio")}
    position = partial(build_position, encoding="ggqpe")
    model = GMlp(position, num_classes=kwargs["num_classes"], stem_norm=True, gate_norm=False, **sizes)
    model.double().eval().load_state_dict(dict(weights), strict=True)
    layers = {f"layer_{layer}": tokens for layer, (tokens, _) in enumerate(model.each_layer(images))}
    return {**layers, "output": model(images)}


COMPUTE: dict[str, Callable[[dict[str, Any], Tensors, Tensor], Tensors]] = {
    "QuaMap": unit,
    "LearnedPosMap": unit,
    "QuaMap1D": unit_1d,
    "PoSGU": gate,
    "SGU": dense_gate,
    "PosMLPLayer": block,
    "nest_gmlp_det.GmlpLayer": block,
    "PosMLP": pyramid,
    "gmlp.MlpMixer": gmlp,
}
