"""The structure of any model of images: its blocks, grids, prefix tokens, and the sites of its position information.

`find_structure` finds it by one recorded pass, without knowing the library that the model comes from."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor, nn

from graticule.external.images import Size, check_takes_images, image_channels, image_size, refused_size, without_values
from graticule.external.tracer import PositionTracer, PositionUse
from graticule.external.view import Unavailable
from graticule.position.grid import Grid

#: Names of modules in lists of blocks, for models without attention.
_LISTED = re.compile(r"(?:^|\.)(?:blocks|layers?|stages)\.[^.]+$")

#: One more than the largest number of prefix tokens.
_PREFIX = 17

Kind = Literal["absolute table", "bias of displacements", "positional attention", "rotary", "relative terms"]
#: Kinds with one value for each pair of tokens.
OF_PAIRS = ("bias of displacements", "positional attention", "relative terms")


@dataclass(frozen=True)
class PositionSite:
    """A site of position information: a constant that is added to tokens or to logits, or that rotates queries or keys.

    index: its number among the uses of a pass.
    kind: its form.
    constant: its value at the size of the pass; None where terms of the queries are added to logits.
    axes: axes of the tokens, counted from the end: one, rows and columns of a map, or queries and keys.
    sine: whether it is the factor of a rotation that is 0 for angle 0.
    source_parameters: names of the parameters and buffers that it is computed from.
    layer: index of the block that it is in, counted from 0; None outside of blocks.
    """

    index: int
    kind: Kind
    constant: Tensor | None
    shape: torch.Size
    axes: tuple[int, ...]
    sine: bool
    source_parameters: frozenset[str]
    layer: int | None

    def heads(self) -> Tensor:
        """Return the rows of a table, or of the factors of each head, (h, N, D)."""
        assert self.constant is not None
        first, last = (axis % self.constant.ndim for axis in (self.axes[0], self.axes[-1]))
        rows = self.constant.flatten(first, last).movedim(first, -2)
        return rows.reshape(-1, *rows.shape[-2:])

    def rows(self) -> Tensor:
        """Return the rows of a table, (N, D)."""
        return self.heads()[0]

    def without(self, value: Tensor) -> Tensor:
        """Return the constant that gives no position: angle 0 of a rotation, and else zeros."""
        return torch.ones_like(value) if self.kind == "rotary" and not self.sine else torch.zeros_like(value)

    def moved(self, value: Tensor, source: Callable[[int], Tensor]) -> Tensor:
        """Return the constant with the rows of other tokens; `source` maps a number of tokens to their indices."""
        if self.kind in OF_PAIRS:
            for axis in self.axes:
                value = value.index_select(axis, source(value.shape[axis]).to(value.device))
            return value
        return select(value, self.axes, [self.shape[axis] for axis in self.axes], source)


def select(value: Tensor, axes: Sequence[int], sides: Sequence[int], source: Callable[[int], Tensor]) -> Tensor:
    """Select tokens along one axis, or along the flattened axes of a map."""
    shape = list(value.shape)
    for axis, side in zip(axes, sides, strict=True):
        shape[axis] = side if value.shape[axis] == 1 else value.shape[axis]
    first, last = axes[0] % value.ndim, axes[-1] % value.ndim
    flat = value.expand(shape).flatten(first, last)
    index = source(flat.shape[first]).to(value.device)
    sides = shape[first : last + 1] if len(index) == flat.shape[first] else [len(index)]
    return flat.index_select(first, index).unflatten(first, sides)


@dataclass(frozen=True, eq=False)
class Structure:
    """The structure of a model at one size of the images.

    model: the model.
    img_size: (height, width) in pixels.
    channels: of the images.
    blocks: names of the blocks in the order of their calls, through all stages.
    norms: name of the first norm of the input of each block, with weight, bias and eps, if there is one.
    grids: the grid after each block, with the prefix tokens before it.
    stem: (H, W) of the map that the images are cut into; None without a convolution before the blocks.
    sites: of the position information.
    attention: indices of the blocks with attention.
    orders: for each block the index of the token of each patch, (H * W,), if they are not row by row, else None.
    """

    model: nn.Module
    img_size: Size
    channels: int
    blocks: tuple[str, ...]
    norms: tuple[tuple[Tensor | None, Tensor | None, float] | None, ...]
    grids: tuple[Grid, ...]
    stem: Size | None
    sites: tuple[PositionSite, ...]
    attention: tuple[int, ...]
    orders: tuple[Tensor | None, ...]

    @property
    def prefix(self) -> int:
        """The number of tokens before the patches."""
        return max((grid.prefix for grid in self.grids), default=0)

    @property
    def grid(self) -> Grid:
        return self.grids[0]

    @property
    def patch_size(self) -> Size:
        """(height, width) in pixels of a patch of the first block."""
        return self.img_size[0] // self.grid.height, self.img_size[1] // self.grid.width

    def modules(self) -> list[nn.Module]:
        """Return the blocks."""
        return [self.model.get_submodule(name) for name in self.blocks]

    def of_kind(self, kind: Kind) -> list[PositionSite]:
        """Return the sites of a kind."""
        return [site for site in self.sites if site.kind == kind]

    def ahead(self, tokens: int) -> int:
        """Return the number of prefix tokens among `tokens` tokens; 0 if they are in a window."""
        exact = [grid.prefix for grid in self.grids if grid.tokens == tokens]
        some = [tokens - grid.patches for grid in self.grids if 0 <= tokens - grid.patches <= grid.prefix]
        return next(iter([*exact, *some]), 0)

    @cached_property
    def at(self) -> dict[int, PositionSite]:
        """Map the index of a use to the site that it is."""
        return {site.index: site for site in self.sites}

    @property
    def position_parameters(self) -> dict[str, int]:
        """Map each kind of position information to the number of the parameters that it is computed from."""
        sizes = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        counts: dict[str, int] = {}
        for site in self.sites:  # each parameter counts for the first site
            counts[site.kind] = counts.get(site.kind, 0) + sum(sizes.pop(name, 0) for name in site.source_parameters)
        return counts


def find_structure(model: nn.Module, img_size: Size | None = None, images: Tensor | None = None) -> Structure:
    """Find the structure of a model of images by one pass, in evaluation mode; the model is not changed.

    Position information is what is the same for all images and differs between tokens where it meets tensors that
    depend on the image: tables are added to tokens, biases to logits, and rotations multiply queries and keys. Masks
    of windows are none. Blocks are the modules of the innermost lists that call attention, and all others in lists of
    the same name; without attention, the modules of lists named blocks, layers or stages.

    Args:
        model: takes images (B, C, height, width).
        img_size: (height, width) in pixels; the model's by default.
        images: the images of the pass; two black ones by default.

    Raises:
        ValueError: if the model takes no single images, no size is known, it refuses the size, or no blocks are
            found.
    """
    check_takes_images(model)
    size = img_size or image_size(model)
    if size is None:
        raise ValueError(
            f"`model` must have an attribute img_size, (height, width) in pixels, got {type(model).__name__}, "
            "which has none."
        )
    channels = image_channels(model)
    if images is None:
        weight = next(model.parameters(), torch.empty(0))
        images = torch.zeros(2, channels, *size, device=weight.device, dtype=weight.dtype)
    tracer = PositionTracer(model)
    try:
        tracer.run(images)
    except (AssertionError, RuntimeError, TypeError, IndexError, ValueError) as error:  # for a wrong size

        def run(size: Size) -> None:
            without_values(model)(images.new_empty(1, channels, *size, device="meta"))

        raise refused_size(type(model).__name__, size, error, run) from error
    blocks = called_blocks(tracer)
    if not blocks:
        raise ValueError(
            "`model` must be one of our backbones, or a model with attention in a list of blocks, or with a list named "
            f"blocks, layers or stages, as in timm, got {type(model).__name__}."
        )
    outputs = [tracer.called[name] for name in blocks]
    if other := next((len(x) for x in outputs if len(x) != len(images)), 0):  # tokens of each image, in several parts
        raise Unavailable(f"a block returns {other} samples for {len(images)} images")
    cut = stem_map(tracer, blocks)
    stem = None if cut is None else (cut.shape[2], cut.shape[3])
    grids: list[Grid] = []
    before = None if stem is None else Grid(*stem)
    for name, x in zip(blocks, outputs, strict=True):
        before = _grid_after(x, size, before, tokens_last(x, model.get_submodule(name)))
        grids.append(before)
    layer_of = {name: layer for layer, name in enumerate(blocks)}
    return Structure(
        model,
        size,
        channels,
        blocks,
        tuple(tracer.norms.get(name) for name in blocks),
        tuple(grids),
        stem,
        tuple(_sites(tracer.uses, grids, layer_of)),
        tuple(sorted({layer_of[name] for call in tracer.attentions for name in call.within if name in layer_of})),
        _token_orders(model, images, tracer, cut, blocks, grids),
    )


def called_blocks(tracer: PositionTracer) -> tuple[str, ...]:
    """Return the names of the blocks in the order in which they return."""
    patterns = {pattern_of(call.within[-1]) for call in tracer.attentions if call.within}
    if not patterns:
        listed = [pattern_of(name) for name in tracer.called if _LISTED.search(name)]
        patterns = {max(listed, key=listed.count)} if listed else set()
    called = [name for name in tracer.called if pattern_of(name) in patterns]
    return tuple(name for name in called if tracer.called[name].ndim != 3 or tracer.called[name].shape[1] > 1)


def pattern_of(name: str) -> str:
    """Return the name of a module with * for its numbers, which is the same for all blocks of a list."""
    return re.sub(r"\d+", "*", name)


def stem_map(tracer: PositionTracer, blocks: Sequence[str]) -> Tensor | None:
    """Return the last map (B, D, H, W) of a convolution before the blocks with at most as many patches as tokens."""
    first = tracer.called[blocks[0]]
    tokens = first.shape[1] if first.ndim == 3 else first[0].numel()
    start = list(tracer.called).index(blocks[0])
    before = [x for within, x, called in tracer.maps if called <= start and not set(within) & set(blocks)]
    maps = [x for x in before if 1 < x.shape[2] * x.shape[3] <= tokens]
    return maps[-1] if maps else None


def _grid_after(x: Tensor, size: Size, before: Grid | None, last: bool) -> Grid:
    """Return the grid of the output of a block, a sequence (B, N, D) or a map; `before` is the grid of an earlier one.

    Raises:
        Unavailable: if there is none.
    """
    if x.ndim == 4:
        height, width = (x.shape[1], x.shape[2]) if last else (x.shape[2], x.shape[3])
        if abs(width * size[0] / size[1] - height) >= 1:
            raise Unavailable(f"a block returns {height} x {width} tokens for {size[0]} x {size[1]} pixels, no map")
        return Grid(height, width)
    if x.ndim != 3:
        raise Unavailable(f"a block returns {x.ndim} axes, neither a sequence of tokens nor a map")
    tokens = x.shape[1]
    if before is not None and 0 <= tokens - before.patches < min(before.patches, _PREFIX):
        return Grid(*before.shape, prefix=tokens - before.patches)
    # prefix tokens may leave, and a class token may join in a later stage
    for ahead in range(_PREFIX) if before is None else dict.fromkeys((before.prefix, 0, 1)):
        patches = tokens - ahead
        height = round(math.sqrt(patches * size[0] / size[1])) if patches > 0 else 0
        if height and patches % height == 0 and abs(patches / height * size[0] / size[1] - height) < 1:
            return Grid(height, patches // height, prefix=ahead)
    raise Unavailable(f"{tokens} tokens are not a grid of an image of {size[0]} x {size[1]} pixels")


def tokens_last(x: Tensor, module: nn.Module) -> bool:
    """Return whether channels are the last axis: of a sequence, or of a map (B, H, W, D) rather than (B, D, H, W).

    `module` returned it, and has a norm or a convolution of as many channels.
    """
    if x.ndim != 4:
        return True
    layers = [
        part for part in module.modules() if isinstance(part, nn.LayerNorm | nn.BatchNorm2d | nn.GroupNorm | nn.Conv2d)
    ]
    sizes = [layer.weight.shape[0] for layer in layers if isinstance(layer.weight, Tensor)]
    return not sizes or (x.shape[-1] in sizes and x.shape[1] not in sizes)


def _sites(uses: Sequence[PositionUse], grids: Sequence[Grid], layer_of: dict[str, int]) -> Iterator[PositionSite]:
    """Yield the sites of position information among the uses of a pass."""
    counts = {count for grid in grids for count in (grid.patches, grid.tokens)}
    shapes = {grid.shape for grid in grids}
    keys = {index: use.shape[-1] for use in uses for index in use.terms}
    for index, use in enumerate(uses):
        layer = next((layer_of[name] for name in use.within if name in layer_of), None)
        kind: Kind | None = None
        axes: tuple[int, ...] = (-2, -1)
        sine = False
        if use.kind in ("logits", "weights"):
            kind = "bias of displacements" if use.kind == "logits" else "positional attention"
        elif use.kind == "relative":
            kind = "relative terms"
        elif use.kind == "projected" and index in keys:
            kind, axes = "relative terms", (-2,) if use.shape[-2] == keys[index] else (-3, -2)
        elif use.kind in ("added", "multiplied"):
            axes = _token_axes(use, counts, shapes)
            if axes and use.kind == "added":
                kind = "absolute table"
            elif axes and use.constant is not None and use.constant.is_complex():
                kind = "rotary"
            elif axes and use.other is not None:
                kind, sine = "rotary", use.age > uses[use.other].age
        if kind is not None:
            yield PositionSite(index, kind, use.constant, use.shape, axes, sine, use.source_parameters, layer)


def _token_axes(use: PositionUse, counts: set[int], shapes: set[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the axes of the tokens: two of a map, or one of a sequence; () if there are none."""
    dims = len(use.shape)
    for axis in range(1 - dims, -1):
        if (use.shape[axis], use.shape[axis + 1]) in shapes and {axis, axis + 1} & set(use.axes):
            return axis, axis + 1
    for axis in use.axes:
        if axis != -1 and use.shape[axis] in counts:
            return (axis,)
    return (-2,) if dims == 3 and use.kind == "added" and -2 in use.axes else ()


def added_tensors(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return the floating parameters and buffers whose values are added to tokens, or to logits, by name.

    They are in the order of the model; a value may be resampled or normalized before it is added.
    """
    tracer = PositionTracer(model)
    tracer.run(images)
    added = {name for use in tracer.uses if use.kind in ("added", "logits") for name in use.source_parameters}
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    return {name: value for name, value in tensors.items() if name in added and value.is_floating_point()}


def _token_orders(
    model: nn.Module,
    images: Tensor,
    tracer: PositionTracer,
    cut: Tensor | None,
    blocks: Sequence[str],
    grids: Sequence[Grid],
) -> tuple[Tensor | None, ...]:
    """Return the index of the token of each patch after each block, (H * W,); None where they are row by row.

    The map that the images are cut into is replaced, and attention is silenced, so that a token depends only on the
    patches in its place. For each binary digit of their rows and columns,
    one map changes the patches with a one, another those with a zero. Only the first digits are tried, unless these
    show another order, as of Hiera, whose tokens are in the order of its windows.
    """
    shape, unknown = grids[0].shape, (None,) * len(blocks)
    if cut is None or cut.shape[2:] != shape or len(images) < 2 or tracer.called[blocks[0]].ndim != 3:
        return unknown
    stem = next(index for index, (_, x, _) in enumerate(tracer.maps) if x is cut)
    noise = torch.randn(cut.shape[1:], generator=torch.Generator().manual_seed(0)).to(cut)
    digits = [range(max(1, (side - 1).bit_length())) for side in shape]
    read_places = partial(_read_places, model, images, (stem, noise), blocks, grids)
    if all(places is None for places in read_places([axis[-1:] for axis in digits])):
        return unknown
    layers = read_places(digits)
    return tuple(
        None if places is None or len(places.unique()) < len(places) else places.argsort() for places in layers
    )


def _read_places(
    model: nn.Module,
    images: Tensor,
    stem: tuple[int, Tensor],
    blocks: Sequence[str],
    grids: Sequence[Grid],
    digits: Sequence[Sequence[int]],
) -> list[Tensor | None]:
    """Return the place of each token in the grid after each block, (H * W,), by some digits of rows and columns.

    None where tokens are row by row or a map, or the grid is not the first one after halving its sides.
    """
    index, noise = stem
    height, width = grids[0].shape
    place = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))  # (2, H, W)
    ones = torch.stack([place[axis] >> digit & 1 for axis in (0, 1) for digit in digits[axis]]).bool()
    masks = torch.cat([ones[:1] & False, ones, ~ones]).to(noise)[:, None]
    tracer = PositionTracer(model, stem=(index, noise * (1 + masks)))
    tracer.run(images[:1].expand(len(masks), -1, -1, -1))
    layers: list[Tensor | None] = []
    for name, grid in zip(blocks, grids, strict=True):
        x, halvings = tracer.called[name], (height // grid.height).bit_length() - 1
        if x.ndim != 3 or (grid.height << halvings, grid.width << halvings) != (height, width):
            layers.append(None)
            continue
        of_ones, of_zeros = (x[1:] - x[:1])[:, grid.prefix :].norm(dim=-1).cpu().chunk(2)  # (digits, N) each
        scales = [
            scale * (1 << digit >> halvings)
            for scale, chosen in zip((grid.width, 1), digits, strict=True)
            for digit in chosen
        ]
        step = 1 << halvings
        both = torch.stack([(of_ones > of_zeros).long(), ones[:, ::step, ::step].flatten(1).long()])
        places, by_rows = (both * torch.tensor(scales)[:, None]).sum(1)
        layers.append(None if torch.equal(places, by_rows) else places)
    return layers
