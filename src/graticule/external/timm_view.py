"""View of a model of another library, such as timm: its blocks, grids and attention are found by structure."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from graticule.backbones.window_attention import window_tokens
from graticule.external.attention_map import AttentionMap
from graticule.external.timm_position import Part, find_parts
from graticule.external.view import Edit, ModelView, Pass, Size, Unavailable, chosen_layers, evaluating
from graticule.position.grid import Grid, Windows

#: Names of parameters that look like position information.
_NAMES = re.compile(r"pos_embed|rel_pos|relative_position|rope|pos_block|pos_proj|attention_biases")
#: Attributes in which models hold their blocks; the first that exists is used, and a stage may have lists of its own.
_LISTS = ("blocks", "layers", "stages", "encoder")


class TimmView(ModelView):
    """A model whose blocks are found by structure: modules in lists named blocks, layers or stages.

    model: maps images (B, C, height, width) to logits.
    img_size: (height, width) in pixels; that of the model by default.
    """

    def __init__(self, model: nn.Module, img_size: Size | None = None) -> None:
        self.model = model
        self.blocks = find_blocks(model)
        if not self.blocks:
            raise ValueError(
                "`model` must be one of our backbones, or a model with blocks in a list named blocks, layers or "
                f"stages, as in timm, got {type(model).__name__}."
            )
        self.prefix = int(getattr(model, "num_prefix_tokens", 0))
        found = img_size or own_size(model)
        if found is None:
            raise ValueError(
                f"`model` must have an attribute img_size, (height, width) in pixels, got {type(model).__name__}, "
                "which has none."
            )
        self.img_size: Size = found
        self._grids: dict[Size, list[Grid]] = {}

    @property
    def parts(self) -> list[Part]:
        """The parts of the model that hold position information, as far as their structure is known."""
        return find_parts(self.model)

    def run(self, images: Tensor, edit: Edit | None = None) -> Pass:
        """Compute all layers on images (B, C, height, width); `edit` may replace the tokens after each layer."""
        size: Size = (images.shape[-2], images.shape[-1])
        found: dict[int, tuple[Tensor, Grid]] = {}

        def keep(layer: int, module: nn.Module, args: Any, output: Any) -> Any:
            given = output[0] if isinstance(output, tuple) else output
            last = _tokens_last(given, module)
            tokens, grid = self._tokens(given, size, last)
            changed = tokens if edit is None else edit(layer, tokens, grid)
            found[layer] = changed, grid
            if edit is None:
                return None
            replaced = (changed if last else changed.mT).reshape(given.shape)
            return (replaced, *output[1:]) if isinstance(output, tuple) else replaced

        with evaluating(self.model), ExitStack() as hooks:
            for layer, block in enumerate(self.blocks):
                hooks.callback(block.register_forward_hook(partial(keep, layer)).remove)
            output = self.model(images)
        if isinstance(output, tuple | list):
            output = output[0]
        logits = isinstance(output, Tensor) and output.ndim == 2 and getattr(self.model, "num_classes", 1) > 0
        return Pass([found[layer] for layer in range(len(self.blocks))], output if logits else None)

    def content(self, images: Tensor) -> tuple[Tensor, Grid]:
        """Return the embedded patches before any position information, (B, H * W, D), and their grid."""
        stem = getattr(self.model, "patch_embed", None) or next(iter(getattr(self.model, "patch_embeds", [])), None)
        if stem is None:
            raise Unavailable(f"{type(self.model).__name__} has no patch_embed, whose output is needed")
        found: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            found.append(output[0] if isinstance(output, tuple) else output)

        with evaluating(self.model), ExitStack() as hooks:
            hooks.callback(stem.register_forward_hook(keep).remove)
            self.model(images)
        size = (images.shape[-2], images.shape[-1])
        return self._tokens(found[0], size, _tokens_last(found[0], stem), 0)

    def grids(self, img_size: Size) -> list[Grid]:
        """Return the grid after each layer, for images of `img_size`, found in a forward pass."""
        if img_size not in self._grids:
            stem = next((one for one in self.model.modules() if isinstance(one, nn.Conv2d)), None)
            channels = 3 if stem is None else stem.in_channels
            weight = next(self.model.parameters())
            blank = torch.zeros(1, channels, *img_size, device=weight.device, dtype=weight.dtype)
            try:
                layers = self.run(blank).layers
            except (AssertionError, RuntimeError, TypeError, IndexError) as error:  # raised by models for a wrong size
                raise ValueError(f"`img_size` {img_size[0]} x {img_size[1]} is refused: {_line(error)}") from error
            self._grids[img_size] = [grid for _, grid in layers]
        return self._grids[img_size]

    def sized(self, img_size: Size) -> TimmView:
        """Return a view that takes images of another size, by the model's own `set_input_size` if it has one."""
        if img_size == self.img_size:
            return self
        model = shared_copy(self.model)
        if hasattr(model, "set_input_size"):
            windows = {}
            if "window_size" in inspect.signature(model.set_input_size).parameters:
                sides = [one.window_size for one in model.modules() if hasattr(one, "window_size")]
                windows = {"window_size": sides[0]} if sides else {}
            try:
                model.set_input_size(img_size, **windows)
            except (AssertionError, ValueError, RuntimeError, TypeError) as error:
                raise ValueError(f"`img_size` {img_size[0]} x {img_size[1]} is refused: {_line(error)}") from error
        view = TimmView(model, img_size)
        view.grids(img_size)
        return view

    def without_position(self) -> TimmView:
        """Return a view of a copy whose tables and biases are zero, and whose rotations are by angle 0."""
        return self._with(lambda part, model: part.zero(model))

    def shuffled(self, seed: int = 0) -> TimmView:
        """Return a view of a copy in which each patch has the position of another one, the same in all layers."""
        return self._with(lambda part, model: part.shuffle(model, seed))

    def placed_at(self, img_size: Size) -> TimmView:
        """Return a view in which each patch has the position of the nearest patch of a larger image."""
        self._some_parts()
        try:
            larger = self.sized(img_size).model
        except ValueError as error:
            raise Unavailable(str(error)) from None
        patch = self.coarsest_patch
        step = len({grid.shape for grid in self.grids(self.img_size)}) - 1
        shapes = [Grid(size[0] // patch[0] << step, size[1] // patch[1] << step) for size in (self.img_size, img_size)]
        return self._with(lambda part, model: part.take(model, larger, shapes[0], shapes[1]))

    def attention(self, images: Tensor, layers: Sequence[int] | None = None) -> list[AttentionMap]:
        """Compute the attention weights of chosen layers, all by default, on a copy without the fused kernel."""
        model = shared_copy(self.model)
        view = TimmView(model, self.img_size)
        places = [(layer, _attention(block)) for layer, block in enumerate(view.blocks)]
        attentions = {layer: module for layer, module in places if module is not None}
        if not attentions:
            raise Unavailable(
                f"the attention of {type(self.model).__name__} is not known: no block has a module with `attn_drop`"
            )
        if layers is not None:
            chosen_layers(layers, len(self.blocks))
            if missing := [layer for layer in layers if layer not in attentions]:
                raise ValueError(f"`layers` must have attention, got {missing[0]}, which has none that is known.")
        found: dict[int, Tensor] = {}

        def keep(layer: int, module: nn.Module, args: tuple[Any, ...]) -> None:
            found[layer] = args[0]

        chosen = list(attentions) if layers is None else list(layers)
        with ExitStack() as hooks:
            for layer in set(chosen):
                attention = attentions[layer]
                if hasattr(attention, "fused_attn"):
                    attention.fused_attn = False
                hooks.callback(attention.attn_drop.register_forward_pre_hook(partial(keep, layer)).remove)
            grids = [grid for _, grid in view.run(images).layers]
        return [_map(layer, found[layer], grids[layer], attentions[layer], view.blocks[layer]) for layer in chosen]

    def variants(self) -> dict[str, Callable[[Tensor], object]]:
        """Return forward passes of the model and of a copy without its position information."""
        return {"computed": self.model, "without": self.removed().model.eval()}

    def removed(self) -> TimmView:
        """Return a view of a copy, for timing, without the parts of the position that the model can run without."""
        model = shared_copy(self.model)
        grids = self.grids(self.img_size)
        taken = 0
        for part in self._some_parts():
            candidate = shared_copy(model)
            try:
                if part.remove(candidate) and TimmView(candidate, self.img_size).grids(self.img_size) == grids:
                    model, taken = candidate, taken + 1
            except (AttributeError, ValueError, RuntimeError, TypeError):  # the model needs it
                continue
        if not taken:
            raise Unavailable("the model cannot be run without its position information")
        return TimmView(model, self.img_size)

    @property
    def unknown_parameters(self) -> list[str]:
        """Names of parameters that look like position information and belong to no known part."""
        known = tuple(part.module for part in self.parts)
        named = [name for name, _ in self.model.named_parameters() if _NAMES.search(name)]
        return [name for name in named if name.rpartition(".")[0] not in known and not name.startswith(known or "?")]

    @property
    def position_parameters(self) -> dict[str, int]:
        """Map each kind of part of the position to the number of its parameters."""
        counts: dict[str, int] = {}
        for part in self.parts:
            counts[part.kind] = counts.get(part.kind, 0) + part.parameters(self.model)
        return counts

    def _some_parts(self) -> list[Part]:
        parts = self.parts
        if not parts:
            raise Unavailable(f"{type(self.model).__name__} has no position information whose structure is known")
        return parts

    def _with(self, change: Callable[[Part, nn.Module], None]) -> TimmView:
        """Return a view of a copy whose parts are changed."""
        parts = self._some_parts()
        model = shared_copy(self.model)
        for part in parts:
            change(part, model)
        return TimmView(model, self.img_size)

    def _tokens(self, x: Tensor, size: Size, last: bool, prefix: int | None = None) -> tuple[Tensor, Grid]:
        """Return the output of a block as tokens (B, N, D), with their grid; `last`: whether channels are last."""
        if x.ndim == 4:
            if last:
                return x.flatten(1, 2), Grid(x.shape[1], x.shape[2])
            return x.flatten(2).mT, Grid(x.shape[2], x.shape[3])
        if x.ndim != 3:
            raise Unavailable(f"a block returns {x.ndim} axes, neither a sequence of tokens nor a map")
        ahead = self.prefix if prefix is None else prefix
        return x, _grid_of(x.shape[1], size, ahead)


def shared_copy(model: nn.Module) -> Any:
    """Return a copy of `model` that shares its parameters and buffers."""
    memo = {id(value): value for value in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, memo)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model in their order, through all stages; none if they are not found."""
    for name in _LISTS:
        held = getattr(model, name, None)
        if isinstance(held, nn.ModuleList | nn.Sequential) and len(held):
            return [block for stage in held for block in _of_stage(stage)]
        if name == "encoder" and isinstance(held, nn.Module):
            return find_blocks(held)
    return []


def _of_stage(stage: nn.Module) -> list[nn.Module]:
    if isinstance(stage, nn.ModuleList | nn.Sequential):
        return [block for part in stage for block in _of_stage(part)]
    held = getattr(stage, "blocks", None)
    return _of_stage(held) if isinstance(held, nn.ModuleList | nn.Sequential) else [stage]


def _tokens_last(x: Tensor, module: nn.Module) -> bool:
    """Return whether channels are the last axis: of a sequence, or of a map (B, H, W, D) rather than (B, D, H, W).

    The number of channels is that of a norm or a convolution of `module`, which returned it.
    """
    if x.ndim != 4:
        return True
    inner: list[Any] = list(module.modules())
    sizes = [one.weight.shape[0] for one in inner if _has_channels(one)]
    return not sizes or (x.shape[-1] in sizes and x.shape[1] not in sizes)


def _has_channels(module: nn.Module) -> bool:
    norm = isinstance(module, nn.LayerNorm | nn.BatchNorm2d | nn.GroupNorm | nn.Conv2d)
    return norm and isinstance(module.weight, Tensor)


def _grid_of(tokens: int, size: Size, prefix: int) -> Grid:
    """Return the grid of `tokens` tokens of an image of (height, width) pixels.

    Raises:
        Unavailable: if they are not the patches of such an image, with prefix tokens before them.
    """
    for ahead in dict.fromkeys((prefix, 0)):  # prefix tokens may join in the last layers only
        patches = tokens - ahead
        height = round(math.sqrt(patches * size[0] / size[1])) if patches > 0 else 0
        if height and patches % height == 0 and abs(patches / height * size[0] / size[1] - height) < 1:
            return Grid(height, patches // height, ahead)
    raise Unavailable(f"{tokens} tokens are not a grid of an image of {size[0]} x {size[1]} pixels")


def own_size(model: nn.Module) -> Size | None:
    """Return the (height, width) in pixels that a model is built for; None if it is not known."""
    stem = getattr(model, "patch_embed", None) or next(iter(getattr(model, "patch_embeds", [])), None)
    configured = (getattr(model, "default_cfg", None) or {}).get("input_size")
    for given in (getattr(stem, "img_size", None), getattr(model, "img_size", None), configured and configured[1:]):
        if isinstance(given, int):
            return given, given
        if isinstance(given, tuple | list) and len(given) == 2:
            return int(given[0]), int(given[1])
    return None


def _attention(block: nn.Module) -> Any:
    """Return the first attention within a block that has a dropout module for its weights, where they can be read."""
    return next((one for one in block.modules() if isinstance(getattr(one, "attn_drop", None), nn.Module)), None)


def _map(layer: int, weights: Tensor, grid: Grid, attention: Any, block: nn.Module) -> AttentionMap:
    """Infer the grids of queries and keys from the shape of the weights, (B * windows, heads, n, m)."""
    queries, keys = weights.shape[-2:]
    window = getattr(attention, "window_size", None) or getattr(attention, "ws", None)
    inner = grid
    if queries != grid.tokens and window is not None:
        inner = Grid(*((window, window) if isinstance(window, int) else window))
    factor = math.isqrt(inner.patches // max(keys - inner.prefix, 1)) or 1  # keys may be of a coarser grid
    coarse = Grid(max(inner.height // factor, 1), max(inner.width // factor, 1), inner.prefix)
    if (inner.tokens, coarse.tokens) != (queries, keys):
        raise Unavailable(f"attention of {queries} queries and {keys} keys is not between patches")
    each = weights.flatten(0, -4) if weights.ndim > 4 else weights
    if not torch.allclose(each.sum(-1), torch.ones((), device=each.device, dtype=each.dtype), atol=1e-3):
        raise Unavailable("the weights of its attention are mixed over the heads, so rows do not sum to 1")
    windows = None if inner is grid else _window_tokens(grid, inner, getattr(block, "shift_size", (0, 0)))
    return AttentionMap(layer, each.double().cpu().numpy(), inner, coarse, windows)


def _window_tokens(grid: Grid, window: Grid, shift: tuple[int, int]) -> NDArray[np.int64]:
    """Return the tokens of each window, (L, M), -1 for padding; the map is rolled by `shift` and then cut."""
    rolled = np.roll(np.arange(grid.patches).reshape(grid.shape), (-shift[0], -shift[1]), (0, 1)).ravel()
    tokens = window_tokens(Windows(Grid(*grid.shape), window)).numpy()
    return np.where(tokens < 0, -1, rolled[tokens])


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
