"""Resizing of models of timm in place: by their own `set_input_size`, and where the class has none, edited here.

Only tables of position, their caches and recorded sizes change; all other objects are kept.
"""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from operator import floordiv
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed
from timm.layers.helpers import to_2tuple
from timm.models._features import FeatureDictNet, FeatureGetterNet
from timm.models.convit import GPSA, ConVit
from timm.models.efficientformer import EfficientFormer
from timm.models.efficientformer_v2 import Attention2dDownsample, EfficientFormerV2
from timm.models.hiera import Hiera, Reroll
from timm.models.hieradet_sam2 import HieraDet
from timm.models.levit import AttentionDownsample, Levit
from timm.models.mlp_mixer import MlpMixer
from timm.models.naflexvit import NaFlexVit
from timm.models.twins import Twins
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import Tensor, nn
from torchvision.models.swin_transformer import SwinTransformer as TorchvisionSwin
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionViT

from graticule.checkpoints.skeleton import COMPARED, attributes, check_untouched
from graticule.encodings.sgu import resize_pairs
from graticule.external.convert.plain import naflex_resampler
from graticule.external.images import (
    evaluating,
    fit_of,
    image_channels,
    image_size,
    refused_size,
    window_of,
    without_values,
)
from graticule.hub.config import record_input
from graticule.layers.tokenizers import patch_grid
from graticule.position.grid import Grid
from graticule.position.places import Shape, by, ravel
from graticule.position.resampling import BICUBIC, build_resampler, resize_rows
from graticule.surgery.resize import LIBRARIES, restorer, same_layers, set_channels
from graticule.system.symbolic import ceiling


@LIBRARIES.register("timm")
def resize_timm(model: Any, img_size: Any, resampler: Any, patch_size: Any, channels: int | None) -> None:
    """Resize a model of timm in place, with timm's resampling of its tables."""
    kind = type(model).__name__
    if resampler is not None:
        raise ValueError(
            f"`resampler` must be left out with {kind}, whose tables timm resamples in its own way, got {resampler}; "
            "convert the model (graticule.convert) to choose it."
        )
    for part in _parts(model) or [model]:
        complete = _complete_model(part)
        if img_size is not None or patch_size is not None:
            resize_tables(complete, img_size and to_2tuple(img_size), patch_size and to_2tuple(patch_size))
        if channels is not None:
            set_channels(complete, channels)
        if (size := image_size(complete) if img_size is None else to_2tuple(img_size)) is not None:
            for holder in dict.fromkeys((complete, part, model)):
                record_input(holder, channels or image_channels(model), size)


def _parts(model: nn.Module) -> list[nn.Module]:
    """Return the models that can be resized in a model, or the model itself if it is one; in others, there is none."""
    if hasattr(model, "set_input_size") or isinstance(model, (FeatureDictNet, FeatureGetterNet, *_RESIZES)):
        return [model]
    return [part for child in model.children() for part in _parts(child)]


def _complete_model(model: Any) -> Any:
    """Return the model whose features one that was made with `features_only=True` returns, with the same parts."""
    if isinstance(model, FeatureGetterNet):
        return model.model
    if not isinstance(model, FeatureDictNet):
        return model
    # timm keeps only the parts, under other names: parts of a list are on their own
    parts: dict[str, Any] = {}
    for name, part in model.items():
        start, _, index = name.rpartition("_")
        if index.isdigit():
            parts.setdefault(start, nn.Sequential()).append(part)
        else:
            parts[name] = part
    home = sys.modules[type(list(model.values())[-1]).__module__]
    kinds = (kind for kind in vars(home).values() if isinstance(kind, type) and kind.__module__ == home.__name__)
    kind = next((kind for kind in kinds if hasattr(kind, "set_input_size") and hasattr(kind, "forward_features")), None)
    if kind is None:
        return model
    if (embed := parts.get("patch_embed")) is None:
        raise ValueError(
            "`model` must be made by timm.create_model(name, features_only=True, feature_cls='getter') to be resized, "
            f"got {type(model).__name__} with {', '.join(model)}, of which timm does not keep the model."
        )
    complete: Any = object.__new__(kind)
    nn.Module.__init__(complete)
    for name, part in parts.items():
        setattr(complete, name, part)
    stages = next(part for part in parts.values() if isinstance(part, nn.Sequential))
    complete.feature_info, complete.img_size, complete.training = (
        model.feature_info.info,
        embed.img_size,
        model.training,
    )
    # windows and the grid that they are scaled with
    complete._ref_window_sizes = [to_2tuple(window_of(stage)) for stage in stages]
    complete._ref_grid_size = tuple(embed.grid_size)
    return complete


def resize_tables(model: Any, size: Shape | None, patch: Shape | None = None) -> None:
    """Change the images or patches that the position of a model of timm is stored for; others are refused."""
    kind = type(model).__name__
    embed: Any = getattr(model, "patch_embed", getattr(model, "stem", None))
    edit = next((resize for known, resize in _RESIZES.items() if isinstance(model, known)), None)
    arguments = inspect.signature(model.set_input_size).parameters if hasattr(model, "set_input_size") else {}
    if edit is None and "img_size" not in arguments:
        raise ValueError(
            f"`model` must be of this library or have timm's `set_input_size`, got {kind}; of timm's other classes, "
            f"{', '.join(known.__name__ for known in _RESIZES)} are resized, the last two "
            "of torchvision. A model that accepts images of any size "
            "needs no resizing, and an attached position follows the size of each image."
        )
    if patch is not None and "patch_size" not in arguments:
        raise ValueError(f"`patch_size` must be left out with {kind}, which keeps its patches, got {by(patch)}.")
    side = patch or getattr(embed, "patch_size", None)
    size = size or embed.img_size
    if isinstance(side, tuple):
        patch_grid(size, side, fit=fit_of(model, embed))  # refuses other sizes with its own message
    _check_tables(model)

    def change(size: Shape, patch: Shape | None) -> None:
        if edit is None:
            with same_layers(model):
                model.set_input_size(img_size=size, **({} if patch is None else {"patch_size": patch}))
            return
        sizes = edit(model, size)
        sizes = {"img_size": size} if sizes is None else sizes
        if type(model).__module__.startswith("torchvision."):
            return
        for name, changes in (("_traits", {"img_size": size}), ("_model_args", sizes)):  # of timm, from 1.0.31 on
            setattr(model, name, {**getattr(model, name, {}), **changes})

    old, old_patch = _size_on_record(model, embed), patch and getattr(embed, "patch_size", None)
    if (old, old_patch) == (size, patch):
        return
    if old is not None:
        _check_untouched(model, change, (size, patch), (old, old_patch))
    change(size, patch)
    if not isinstance(side, tuple):  # as of MaxViT and CoAtNet, which set windows that their features may not have

        def run(size: Shape, copy: Any = model) -> None:
            if copy is not model:
                copy.set_input_size(img_size=size)
            with evaluating(copy):
                copy(next(copy.parameters()).new_zeros(1, image_channels(copy), *size))

        try:
            run(size)
        except (AssertionError, RuntimeError) as error:
            raise refused_size(kind, size, error, lambda size: run(size, without_values(model))) from error


def _size_on_record(model: Any, embed: Any) -> Shape | None:
    """Return the images that the position of a model of timm is stored for; None if they are not known."""
    if isinstance(model, NaFlexVit):  # whose table has its grid as its shape
        return None
    size = getattr(embed, "img_size", None) or getattr(model, "_traits", {}).get("img_size") or image_size(model)
    return size and to_2tuple(size)


def _check_untouched(model: nn.Module, change: Callable[..., None], *sizes: tuple[Any, Any]) -> None:
    """Check that what timm replaces is what it makes of the own size, the last of `sizes`, and undo the changes."""
    before = {name: attributes(part) for name, part in model.named_modules()}
    values = {id(value): value.clone() for value in model.buffers()}  # some are written in place
    restore = restorer(model)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            for size, patch in sizes:
                change(size, patch)
        for name, part in model.named_modules():
            for key, expected in attributes(part).items():
                value = before[name].get(key, expected)
                value = values.get(id(value), value)
                if isinstance(expected, nn.Parameter) or (key == "rel_indices" and value.shape != expected.shape):
                    continue  # resampled twice; displacements of ConViT, which has none before it is called
                if value is not expected and isinstance(expected, COMPARED):
                    check_untouched(model, f"{name}.{key}".lstrip("."), value, expected)
    finally:
        restore()


def _check_tables(model: nn.Module) -> None:
    """Check that the tables of a model have the grids that it has on record, from which they are resampled."""
    kind = type(model).__name__
    for name, part in model.named_modules():
        if isinstance(part, PatchEmbed) and part.img_size is not None:
            count = ceiling if part.dynamic_img_pad else floordiv
            grid = tuple(map(count, part.img_size, part.patch_size))
            if (part.grid_size, part.num_patches) != (grid, math.prod(grid)):
                raise ValueError(
                    f"`{name}` of {kind} must have `grid_size` {grid} and `num_patches` {math.prod(grid)}, as its "
                    f"`img_size` says, to be resized, got {part.grid_size} and {part.num_patches}."
                )
    for name, value, shape in _tables(model):
        holder, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if leaf not in holder._parameters and leaf not in holder._buffers:
            raise ValueError(f"`{name}` of {kind} must be a tensor of its own to be resized, got one that is computed.")
        if tuple(value.shape) != shape:
            raise ValueError(
                f"`{name}` of {kind} must be {shape}, for the grid that the model has on record, to be resized, got "
                f"{tuple(value.shape)}; tell it the images of the table first: "
                "model.patch_embed.set_input_size(img_size=(height, width))."
            )
    embed: Any = getattr(model, "patch_embed", None)
    if type(embed) is PatchEmbed and {embed.proj.kernel_size, embed.proj.stride} != {tuple(embed.patch_size)}:
        raise ValueError(
            f"`patch_embed.proj` of {kind} must have kernels and strides of {by(embed.patch_size)}, as its patches, to "
            f"be resized, got {by(embed.proj.kernel_size)} and {by(embed.proj.stride)}."
        )


def _tables(model: Any) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """Yield the name of each table, its value, and its shape by the grid on record."""
    table, patches = getattr(model, "pos_embed", None), getattr(getattr(model, "patch_embed", None), "num_patches", 0)
    if isinstance(table, Tensor):
        shape = tuple(table.shape)  # of a map, which is of any size
        if isinstance(model, Hiera) and model.pos_embed_win is None:
            shape = (1, math.prod(model.tokens_spatial_shape), shape[-1])
        elif table.ndim == 3 and patches:
            has_rows = not getattr(model, "no_embed_class", isinstance(model, ConVit))
            shape = (1, patches + has_rows * getattr(model, "num_prefix_tokens", 0), model.embed_dim)
        yield "pos_embed", table, shape
    for name, part in model.named_modules():
        bias, window = getattr(part, "relative_position_bias_table", None), getattr(part, "window_size", None)
        if isinstance(bias, Tensor) and window is not None:
            sides = tuple(2 * side - 1 for side in to_2tuple(window))
            extra = 3 if getattr(part, "prefix_tokens", "beit" in type(part).__module__) else 0
            shape = (bias.shape[0], *sides) if bias.ndim == 3 else (sides[0] * sides[1] + extra, bias.shape[-1])
            yield f"{name}.relative_position_bias_table", bias, shape
        if isinstance(offsets := getattr(part, "attention_biases", None), Tensor):
            yield f"{name}.attention_biases", offsets, (part.num_heads, math.prod(_resolution(part)))
        feat, cache = getattr(part, "feat_shape", None), getattr(part, "pos_embed", None)
        if feat is not None and isinstance(cache, Tensor):
            yield f"{name}.pos_embed", cache, (feat[0] * feat[1], cache.shape[-1])


def _put(owner: Any, name: str, value: Tensor) -> None:
    """Replace a parameter by a table of another grid, which may have as many rows, as trainable as the old one."""
    old = getattr(owner, name)
    setattr(owner, name, nn.Parameter(value.detach().to(old.dtype).contiguous(), old.requires_grad))


def _resize_map(owner: Any, name: str, grid: Shape, resampler: Any = BICUBIC) -> None:
    """Resample a table that is a map, (1, H, W, D)."""
    table = getattr(owner, name).detach()
    if table.shape[1:3] != grid:
        _put(owner, name, resampler(table.permute(0, 3, 1, 2), grid).permute(0, 2, 3, 1))


def _resize_sam(model: Any, size: Shape) -> None:
    """Resize timm's encoder of Segment Anything: its table, and the tables of displacements of its global layers."""
    model.patch_embed.set_input_size(img_size=size)
    grid = model.patch_embed.grid_size
    if model.pos_embed is not None:
        _resize_map(model, "pos_embed", grid)
    if model.rope_global is not None:
        model.rope_global.update_feat_shape(grid)
    for block in model.blocks:
        if block.window_size == 0 and block.attn.use_rel_pos:
            for name, side in zip(("rel_pos_h", "rel_pos_w"), grid, strict=True):
                rows = getattr(block.attn, name).detach().T[None]
                if rows.shape[2] != 2 * side - 1:
                    _put(block.attn, name, F.interpolate(rows, 2 * side - 1, mode="linear")[0].T)


def _resize_mixer(model: Any, size: Shape) -> None:
    """Resize MLP-Mixer, ResMLP or gMLP: the weights of their layers over tokens, as the conversion does."""
    old = Grid(*model.stem.grid_size)
    model.stem.set_input_size(img_size=size)
    new = Grid(*model.stem.grid_size)
    if old == new:
        return
    sides, scale = (old.shape, new.shape), old.patches / new.patches
    for block in dict.fromkeys(model.blocks):  # a block may be at several places
        if hasattr(block, "mlp_tokens"):
            first, last = block.mlp_tokens.fc1, block.mlp_tokens.fc2
            _put(first, "weight", resize_rows(first.weight.detach(), *sides) * scale)
            _put(last, "weight", resize_rows(last.weight.detach().T, *sides).T)
        else:
            first = last = block.linear_tokens if hasattr(block, "linear_tokens") else block.mlp_channels.gate.proj
            _put(last, "weight", resize_pairs(last.weight.detach(), old, new))
        if last.bias is not None:
            _put(last, "bias", resize_rows(last.bias.detach()[None], *sides)[0])
        first.in_features = last.out_features = new.patches


def _resize_convit(model: Any, size: Shape) -> None:
    """Resize ConViT: its table, and the displacements of its gated layers, which it computes for squares alone."""
    old = model.patch_embed.grid_size
    model.patch_embed.set_input_size(img_size=size)
    grid = Grid(*model.patch_embed.grid_size)
    if model.use_pos_embed and old != grid.shape:
        _put(model, "pos_embed", resize_rows(model.pos_embed[0].T.detach(), old, grid.shape).T[None])
    places = grid.coordinates()
    offsets = (places[None] - places[:, None]).flip(-1)  # (N, N, 2), columns and rows from query to key
    indices = torch.cat([offsets, offsets.square().sum(-1, keepdim=True)], -1)[None]
    gates = [part for part in model.modules() if isinstance(part, GPSA)]
    for part in gates:
        part.rel_indices = indices.to(part.qk.weight)
    if gates and grid.height != grid.width:
        warnings.warn(
            f"ConVit computes displacements for squares alone: they are set for {by(grid.shape)} patches, and are not "
            "saved with the weights; graticule.convert(model).save_pretrained(folder) saves all.",
            stacklevel=2,
        )


def _resize_twins(model: Any, size: Shape) -> None:
    """Record the sizes of Twins, whose positional convolutions take any."""
    for embed in model.patch_embeds:
        embed.img_size, step = size, embed.patch_size
        size = embed.H, embed.W = size[0] // step[0], size[1] // step[1]
        embed.num_patches = embed.H * embed.W


def _resize_naflex(model: Any, size: Shape) -> dict[str, Shape]:
    """Resize the table of NaFlexVit, by the resampler that it uses for each image; rotations are computed for any."""
    embeds = model.embeds
    grid = Grid.of_image(size, tuple(embeds.patch_size)).shape
    if embeds.pos_embed_type not in ("learned", "none") or getattr(embeds, "pos_embed_align_corners", False):
        raise ValueError(
            "`model` must have a learned table, not aligned at its corners, to be resized, got NaFlexVit with "
            f"{embeds.pos_embed_type!r}; it accepts images of any size as it is."
        )
    if embeds.pos_embed is not None:
        _resize_map(embeds, "pos_embed", grid, build_resampler(naflex_resampler(embeds)))
    embeds.default_img_size, embeds.pos_embed_grid_size = size, grid
    return {"pos_embed_grid_size": grid}


def _resize_offsets(model: Any, size: Shape) -> None:
    """Resize LeViT or EfficientFormer: tables of absolute offsets, as timm does in TinyViT, and their indices."""
    stages = [(info["reduction"], stage) for info, stage in zip(model.feature_info, model.stages, strict=False)]
    step = stages[0][0] if isinstance(model, Levit) else stages[-1][0]
    _tokens(size, (step, step), (1, 1), "strides")  # at others the grids of convolutions and tables would differ
    for reduction, part in [(reduction, part) for reduction, stage in stages for part in stage.modules()]:
        if not hasattr(part, "attention_biases"):
            continue
        merges = isinstance(part, AttentionDownsample | Attention2dDownsample)
        step = reduction // 2 if merges else reduction * 2 if getattr(part, "upsample", None) else reduction
        grid = ceiling(size[0], step), ceiling(size[1], step)
        table, old = part.attention_biases.detach(), _resolution(part)
        if old != grid:
            _put(part, "attention_biases", resize_rows(table, old, grid))
        queries = tuple(ceiling(side, 2) for side in grid)
        part.resolution, part.attention_bias_cache = grid, {}
        sizes = {"resolution": grid, "N": math.prod(grid), "resolution2": queries, "N2": math.prod(queries)}
        for inner in part.modules():  # with the part that takes every second token
            vars(inner).update({name: value for name, value in sizes.items() if name in vars(inner)})
        if index := getattr(part, "_compute_attention_bias_idxs", None):  # of queries on another grid
            part.attention_bias_idxs = index(table.device)
        else:
            part.attention_bias_idxs = ravel(Grid(*grid).offsets(table.device).abs().unbind(-1), grid)
    if isinstance(model, EfficientFormer) and size != (224, 224):
        warnings.warn(
            f"timm builds EfficientFormer for tables of 7 x 7 alone: weights for {by(size)} pixels must be loaded "
            "into a model that is resized before.",
            stacklevel=2,
        )


def _resolution(part: Any) -> Shape:
    """Return the grid of the keys of an attention; EfficientFormer does not record its 7 x 7."""
    return to_2tuple(getattr(part, "resolution", 7))


def _resize_torchvision(model: Any, size: Shape) -> None:
    """Resize torchvision's ViT, whose class only knows squares, as its `interpolate_embeddings`."""
    if size[0] != size[1]:
        raise ValueError(f"`img_size` must be square for torchvision's {type(model).__name__}, got {by(size)}.")
    side = model.patch_size
    old, new = (Grid.of_image(image, (side, side)).shape for image in (to_2tuple(model.image_size), size))
    if old != new:
        rows = model.encoder.pos_embedding.detach()
        table = F.interpolate(rows[:, 1:].mT.unflatten(2, old), new, mode="bicubic", align_corners=True)
        _put(model.encoder, "pos_embedding", torch.cat([rows[:, :1], table.flatten(2).mT], 1))
    model.image_size, model.seq_length = size[0], math.prod(new) + 1


def _resize_hieradet(model: Any, size: Shape) -> dict[str, Shape]:
    """Check the size for SAM 2's encoder, which resamples its table of training for each image."""
    _tokens(size, model.patch_embed.proj.stride, model.pos_embed_window.shape[-2:], "windows")
    return {}


def _resize_hiera(model: Any, size: Shape) -> None:
    """Resize Hiera: its table, unless it resamples that for each image, and the order of its tokens."""
    shape = _tokens(size, model.patch_stride, model.mask_unit_size, "mask units")
    old = tuple(model.tokens_spatial_shape)
    if model.pos_embed is not None and model.pos_embed_win is None and old != shape:
        _put(model, "pos_embed", resize_rows(model.pos_embed[0].T.detach(), old, shape).T[None])
    model.tokens_spatial_shape = model.unroll.size = list(shape)
    model.mask_spatial_shape = [side // step for side, step in zip(shape, model.mask_unit_size, strict=True)]
    order = Reroll(size, model.patch_stride, model.unroll.schedule, model.stage_ends, model.q_pool)
    model.reroll.size, model.reroll.schedule = order.size, order.schedule


#: How models of a class without `set_input_size` are edited for images of (height, width); returns the arguments that
#: build such a model, if they are others than `img_size`.
_RESIZES: Mapping[type[nn.Module], Callable[[Any, Shape], dict[str, Shape] | None]] = {
    VisionTransformerSAM: _resize_sam,
    MlpMixer: _resize_mixer,
    ConVit: _resize_convit,
    Twins: _resize_twins,
    NaFlexVit: _resize_naflex,
    Levit: _resize_offsets,
    EfficientFormer: _resize_offsets,
    EfficientFormerV2: _resize_offsets,
    HieraDet: _resize_hieradet,
    Hiera: _resize_hiera,
    TorchvisionViT: _resize_torchvision,
    TorchvisionSwin: lambda model, size: {},  # its windows stay, and it pads images of any size
}


def _tokens(size: Shape, stride: Shape, window: Shape, name: str) -> Shape:
    """Return the grid of tokens of an image, which must have whole windows."""
    unit = tuple(step * side for step, side in zip(stride, window, strict=True))
    if any(side % step for side, step in zip(size, unit, strict=True)):
        raise ValueError(f"`img_size` must be a multiple of the {name}, {by(unit)} pixels, got {by(size)}.")
    return tuple(side // step for side, step in zip(size, stride, strict=True))
