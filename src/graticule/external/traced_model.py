"""Views of any model of images: a backbone, or a model whose structure is found by a recorded pass."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.backbones.token_model import TokenModel
from graticule.checkpoints.read import check_whole
from graticule.external.attention_map import AttentionMap
from graticule.external.backbone_view import BackboneView
from graticule.external.debiased import Debiased
from graticule.external.images import (
    Size,
    call,
    evaluating,
    image_size,
    refused_size,
    set_input_size,
    window_of,
    without_values,
)
from graticule.external.structure import OF_PAIRS, Structure, find_structure, select, stem_map, tokens_last
from graticule.external.tracer import Change, PositionTracer
from graticule.external.view import Edit, ModelView, Pass, Unavailable, chosen_layers, nearest, permutation, unpooled
from graticule.position.grid import Grid
from graticule.position.windows import Windows
from graticule.surgery.resize import resize, shared_copy

#: Names of parameters that look like position information.
_NAMES = re.compile(r"pos_embed|rel_pos|relative_position|rope|pos_block|pos_proj|attention_biases|position_embedding")


class TracedModel(ModelView):
    """A model whose structure is found by a recorded pass.

    model: maps images (B, C, height, width) to logits or features.
    img_size: (height, width) in pixels; the model's by default.

    A view with another position has `constants` and `queries`, the changes of `PositionTracer`.
    """

    constants: Change | None = None
    queries: Change | None = None

    def __init__(self, model: nn.Module, img_size: Size | None = None) -> None:
        self.model = model
        self.structure = find_structure(model, img_size or image_size(model))
        self.img_size: Size = self.structure.img_size
        self._structures = {self.img_size: self.structure}

    @property
    def blocks(self) -> list[nn.Module]:
        return self.structure.modules()

    def run(self, images: Tensor, edit: Edit | None = None) -> Pass:
        structure = self._at((images.shape[-2], images.shape[-1]))
        layers: dict[int, tuple[Tensor, Grid]] = {}

        def keep(layer: int, module: nn.Module, args: Any, output: Any) -> Any:
            x = output[0] if isinstance(output, tuple) else output
            channels_last = tokens_last(x, module)
            grid, order = structure.grids[layer], structure.orders[layer]
            tokens = _moved(x if x.ndim == 3 else x.flatten(1, 2) if channels_last else x.flatten(2).mT, grid, order)
            changed = tokens if edit is None else edit(layer, tokens, grid)
            layers[layer] = changed, grid
            if edit is None:
                return None
            changed = _moved(changed, grid, None if order is None else order.argsort())
            replaced = (changed if channels_last else changed.mT).reshape(x.shape)
            return (replaced, *output[1:]) if isinstance(output, tuple) else replaced

        with evaluating(self.model), ExitStack() as hooks:
            for layer, block in enumerate(self.blocks):
                hooks.callback(block.register_forward_hook(partial(keep, layer)).remove)
            output = call(self.model, images) if self.constants is None else self._tracer().run(images)
        logits = _logits(self.model, output)
        if self.debiased is not None and logits is not None:
            logits = None  # of features that an edit changes, or of a model without a head of its own
            if edit is None and hasattr(self.model, "forward_head"):
                with evaluating(self.model), self._following(images):
                    features = self.debiased.clean(unpooled(self.model, images), structure.grids[-1])
                    logits = self.debiased.forward_head(features)
        return Pass([layers[layer] for layer in range(len(self.blocks))], logits)

    def patch_embeddings(self, images: Tensor) -> tuple[Tensor, Grid]:
        tracer = PositionTracer(self.model)
        tracer.run(images)
        patches = stem_map(tracer, self.structure.blocks)
        if patches is None:
            raise Unavailable(f"{type(self.model).__name__} has no convolution that cuts images into patches")
        return patches.flatten(2).mT, Grid(patches.shape[2], patches.shape[3])

    def grids(self, img_size: Size) -> list[Grid]:
        return list(self._at(img_size).grids)

    def _at(self, img_size: Size) -> Structure:
        if img_size not in self._structures:
            self._structures[img_size] = find_structure(self.model, img_size)
        return self._structures[img_size]

    def resized_to(self, img_size: Size) -> TracedModel:
        """Return a view that takes images of another size, by the model's own `set_input_size` if it has one."""
        if img_size == self.img_size:
            return self
        model = shared_copy(self.model)
        if hasattr(model, "set_input_size"):
            try:
                set_input_size(model, img_size)
            except (AssertionError, ValueError, RuntimeError, TypeError) as error:
                run = partial(set_input_size, without_values(self.model))
                raise refused_size(type(model).__name__, img_size, error, run) from error
        elif type(model).__module__.startswith("timm."):
            with suppress(ValueError):  # others take any size, or refuse it in the forward pass
                resize(model, (img_size[0], img_size[1]))
        view = TracedModel(model, img_size)
        view.debiased = self.debiased
        return view

    def without_position(self) -> TracedModel:
        """Return a view in which tables, biases and terms are zero, and rotations are by angle 0."""
        sites = self.structure.at
        return self._with(lambda index, value: sites[index].without(value) if index in sites else value)

    def shuffled(self, seed: int = 0) -> TracedModel:
        sites = self.structure.at

        def order(tokens: int) -> Tensor:
            ahead = self.structure.ahead(tokens)
            return torch.cat([torch.arange(ahead), permutation(tokens - ahead, seed) + ahead])

        def shuffle(index: int, value: Tensor) -> Tensor:
            site = sites.get(index)
            if site is None or (site.kind == "relative terms" and site.constant is not None):
                return value  # terms of queries get the position of these back
            return site.moved(value, order)

        def move(index: int, queries: Tensor) -> Tensor:
            """Move queries, (..., D) or (B, H, W, D), to the places whose terms they get."""
            site = sites.get(index)
            if site is None or site.kind != "relative terms":
                return queries
            sides = [queries.shape[axis] for axis in site.axes]
            return select(queries, site.axes, sides, lambda tokens: order(tokens).argsort())

        return self._with(shuffle, move)

    def with_position_of(self, other: TracedModel) -> TracedModel:
        return self._with(partial(take_position, self.structure, other.structure))

    def attention(self, images: Tensor, layers: Sequence[int] | None = None) -> list[AttentionMap]:
        """Compute the attention weights of chosen layers, all by default: of the first attention of each block."""
        if not self.structure.attention:
            raise Unavailable(f"the attention of {type(self.model).__name__} is not known: no block computes a softmax")
        if layers is not None:
            chosen_layers(layers, len(self.blocks))
            if missing := [layer for layer in layers if layer not in self.structure.attention]:
                raise ValueError(f"`layers` must have attention, got {missing[0]}, which has none that is known.")
        tracer = self._tracer(keep=True)
        tracer.run(images)
        calls = [(name, call.weights) for call in reversed(tracer.attentions) for name in call.within]
        first = {name: weights for name, weights in calls if weights is not None}
        structure = self._at((images.shape[-2], images.shape[-1]))
        maps = []
        for layer in self.structure.attention if layers is None else layers:
            weights, order = first[self.structure.blocks[layer]], structure.orders[layer]
            if order is not None:
                if weights.shape[-1] != len(order):
                    raise Unavailable(f"the attention of {type(self.model).__name__} is not between tokens row by row")
                weights = weights[..., order[:, None], order]
            maps.append(_map(layer, weights, structure.grids[layer], self.blocks[layer]))
        return maps

    def features(self, images: Tensor, layers: Sequence[tuple[Tensor, Grid]]) -> Tensor:
        with self._following(images):
            return super().features(images, layers)

    @property
    def unknown_parameters(self) -> list[str]:
        """Names of parameters that look like position information and are part of no site that was found."""
        known = {name for site in self.structure.sites for name in site.source_parameters}
        return [name for name, _ in self.model.named_parameters() if _NAMES.search(name) and name not in known]

    @property
    def position_parameters(self) -> dict[str, int]:
        return self.structure.position_parameters

    def _tracer(self, keep: bool = False) -> PositionTracer:
        return PositionTracer(self.model, self.constants, self.queries, keep)

    def _following(self, images: Tensor) -> AbstractContextManager[None]:
        return nullcontext() if self.constants is None else self._tracer().following(images)

    def _with(self, constants: Change, queries: Change | None = None) -> TracedModel:
        """Return a view of the same model with changed position."""
        if not self.structure.sites:
            raise Unavailable(f"{type(self.model).__name__} has no position information whose structure is known")
        view = copy.copy(self)
        view.constants, view.queries = constants, queries
        return view


def take_position(structure: Structure, source: Structure, index: int, value: Tensor) -> Tensor:
    """Give each patch the position information of the nearest patch of images of another size."""
    site, other = structure.at.get(index), source.at.get(index)
    if site is None or (site.kind == "relative terms" and site.constant is None):
        return value
    if other is None or other.constant is None or site.constant is None:
        raise Unavailable(f"its {site.kind} cannot be taken from other sizes")
    constant = other.constant.to(value)
    if constant.shape == site.constant.shape and site.kind in OF_PAIRS:
        return constant.expand_as(value)
    if site.kind == "relative terms":
        raise Unavailable("its relative terms cannot be taken from other sizes")
    moved = other.moved(constant, lambda tokens: _places(structure, source, tokens))
    return moved.reshape(value.shape) if moved.numel() == value.numel() else moved[:1].expand_as(value)


def _places(structure: Structure, source: Structure, tokens: int) -> Tensor:
    """Return the index of the nearest of `tokens` tokens of images of another size for each token."""
    for grid, wide in zip(structure.grids, source.grids, strict=True):
        ahead = tokens - wide.patches
        if 0 <= ahead <= wide.prefix:
            return torch.cat([torch.arange(ahead), nearest(grid, wide) + ahead])
    raise Unavailable(f"position information has {tokens} rows where there are {source.grid.tokens} tokens")


def _logits(model: nn.Module, output: Any) -> Tensor | None:
    """Return the logits among the outputs of a model, (B, classes); None if there are none."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    if isinstance(output, tuple | list):
        output = output[0]
    classes = getattr(model, "num_classes", 1) > 0
    return output if isinstance(output, Tensor) and output.ndim == 2 and classes else None


def _moved(tokens: Tensor, grid: Grid, order: Tensor | None) -> Tensor:
    """Return tokens (B, N, D) with the patches in another order, or as they are without one."""
    if order is None:
        return tokens
    ahead, patches = grid.split(tokens)
    return torch.cat([ahead, patches[:, order.to(tokens.device)]], 1)


def _map(layer: int, weights: Tensor, grid: Grid, block: nn.Module) -> AttentionMap:
    """Infer the grids of queries and keys from the shape of the weights, (B * windows, heads, n, m)."""
    queries, keys = weights.shape[-2:]
    window, inner = window_of(block), grid
    if queries != grid.tokens and window is not None:
        inner = Grid(*window)
    factor = math.isqrt(inner.patches // max(keys - inner.prefix, 1)) or 1  # keys may be of a coarser grid
    coarse = Grid(max(inner.height // factor, 1), max(inner.width // factor, 1), prefix=inner.prefix)
    if (inner.tokens, coarse.tokens) != (queries, keys):
        raise Unavailable(f"attention of {queries} queries and {keys} keys is not between patches")
    weights = weights.flatten(0, -4) if weights.ndim > 4 else weights
    if not torch.allclose(weights.sum(-1), weights.new_ones(()), atol=1e-3):
        raise Unavailable("the weights of its attention are mixed over the heads, so rows do not sum to 1")
    windows = None
    if inner is not grid:  # the map is rolled by the shift and then cut
        down, right = window_of(block, ("shift_size",)) or (0, 0)
        rolled = np.roll(np.arange(grid.patches).reshape(grid.shape), (-down, -right), (0, 1)).ravel()
        tokens = Windows(Grid(*grid.shape), inner).tokens().numpy()
        windows = np.where(tokens < 0, -1, rolled[tokens])
    return AttentionMap(layer, weights.double().cpu().numpy(), inner, coarse, windows)


def view_of(model: nn.Module, img_size: Size | None = None) -> ModelView:
    """Return the view of a backbone of this library, or of another model.

    A model that `graticule.convert` takes is converted, so that its view is a backbone's, with the same outputs;
    the structure of any other model is found by a recorded pass.

    Args:
        model: takes images (B, C, height, width).
        img_size: (height, width) in pixels; the model's by default. A model of another library that is
            built for another size is copied.

    Raises:
        ValueError: if no blocks are found, no image size is known, or the model refuses it.
    """
    check_whole(model)
    if isinstance(model, Debiased):
        view = view_of(model.backbone, img_size)
        view.debiased = model
        return view
    if isinstance(model, Backbone) or hasattr(model, "each_layer"):
        return BackboneView(cast("Backbone", model), img_size)
    if isinstance(model, TokenModel):
        raise ValueError(f"`model` must take images, got {type(model).__name__}, which takes texts.")
    model = getattr(model, "_orig_mod", model)  # of torch.compile, whose functions are not recorded
    converted = convert_stock(model)
    if converted is not None:
        return BackboneView(converted, img_size)
    view = TracedModel(model, image_size(model) or img_size)
    return view if img_size is None else view.resized_to(img_size)


def convert_stock(model: nn.Module) -> Backbone | None:
    """Return a model of another library as one of ours; None if it does not convert."""
    from graticule.external.convert.conversion import convert  # of no use for a backbone

    try:
        return convert(model)
    except ValueError:
        return None
