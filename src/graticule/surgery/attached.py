"""A position that is attached to a transformer of another library: a module, and the hooks that apply it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from graticule.checkpoints.load import PublishedNames, register_names
from graticule.position.bias import Bias
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.position import Position

if TYPE_CHECKING:
    from graticule.surgery.change import Certificate


@dataclass(frozen=True)
class Survey:
    """Tokens and blocks of a module, found by one forward pass.

    blocks: names of the blocks, in order.
    norm: name, in a block, of the norm before attention.
    image: (height, width) of the input images, in pixels; None for other inputs.
    tokens: N.
    dim: D.
    sequence_first: whether tokens are (N, B, D) instead of (B, N, D).
    patches: name of the convolution that cuts images or films into patches; None if there is none.
    shape: of its output, (H, W) or (T, H, W).
    receivers: names, in the first block, of the modules called with the normalized tokens, in order of their calls.
    called: names, in the first block, of all modules that are called.
    """

    blocks: tuple[str, ...]
    norm: str
    image: tuple[int, int] | None
    tokens: int
    dim: int
    sequence_first: bool
    patches: str | None
    shape: tuple[int, ...] | None
    receivers: tuple[str, ...]
    called: frozenset[str]


def first_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first tensor among the arguments of a call."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


@dataclass
class Removed:
    """A parameter or buffer that zeros replace, with the information for restoring it.

    name: its name in the module.
    value: the parameter or buffer.
    order: the names of the parameters, or buffers, of its owner, in order.
    persistent: whether a buffer was in the state dict; None for a parameter.
    """

    name: str
    value: Tensor
    order: tuple[str, ...]
    persistent: bool | None


def take_out(module: nn.Module, name: str) -> Removed:
    """Replace a parameter or buffer by zeros that are not in the state dict."""
    owner, leaf = _owner(module, name)
    parameter = leaf in owner._parameters
    holder: Any = owner._parameters if parameter else owner._buffers
    persistent = None if parameter else leaf not in owner._non_persistent_buffers_set
    removed = Removed(name, holder[leaf], tuple(holder), persistent)
    if parameter:
        del owner._parameters[leaf]
    owner.register_buffer(leaf, torch.zeros_like(removed.value, requires_grad=False), persistent=False)
    return removed


def put_back(module: nn.Module, removed: Removed) -> None:
    """Restore a parameter or buffer, on the device and with the dtype of the zeros."""
    owner, leaf = _owner(module, removed.name)
    zeros = owner.get_buffer(leaf)
    del owner._buffers[leaf]
    owner._non_persistent_buffers_set.discard(leaf)
    removed.value.data = removed.value.data.to(zeros.device, zeros.dtype)
    holder: Any = owner._parameters if removed.persistent is None else owner._buffers
    values = {**holder, leaf: removed.value}
    order = [name for name in removed.order if name in values]
    order += [name for name in values if name not in order]
    holder.clear()
    holder.update((name, values[name]) for name in order)
    if removed.persistent is False:
        owner._non_persistent_buffers_set.add(leaf)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


#: Layout of queries in the output of a module: (B, N, h * d); (B, N, 3 * h * d), before keys and values; (B, h, N, d).
Queries = Literal["channels", "fused", "heads"]


class Ways(NamedTuple):
    """Access of position to the attention of a block. Names are relative to the block.

    attention: the module that receives the normalized tokens; None if there is none.
    multihead: whether it is PyTorch's, which takes queries, keys and values as arguments.
    queries_keys: the two projections to queries and to keys.
    fused: the single projection to queries, keys and values, in this order.
    mask: name of the argument of `attention` that is added to the logits, (B, h, N, N) or broadcast to it.
    scale: the last module before the logits whose output has the queries, and their layout in it.
    num_heads: h; None if it was not found.
    why: for `queries_keys`, `bias` and `query_scale`, the reason if there is no access.
    """

    attention: str | None
    multihead: bool = False
    queries_keys: tuple[str, str] | None = None
    fused: str | None = None
    mask: str | None = None
    scale: tuple[str, Queries] | None = None
    num_heads: int | None = None
    why: dict[str, str] = {}  # noqa: RUF012 (never changed)


#: The arguments of PyTorch's attention, in order.
_ARGUMENTS = tuple(inspect.signature(nn.MultiheadAttention.forward).parameters)[1:]


@dataclass(eq=False)
class _Call:
    """The grid of a call of the module, and the position of each layer."""

    grid: Grid
    layers: list[LayerPosition]


class AttachedPosition(PublishedNames):
    """Module that computes the position for the grid of each call, and passes it to the blocks by hooks.

    The convolution that cuts images into patches determines the grid. Without one, the grid is fixed.

    Hooks are methods of this module with the index of the layer bound to them. So they are copied with the module, and
    the hooks of a copy use the position of the copy.

    Args:
        position: the position of the blocks.
        grid: the grid that it is built for.
        found: the survey of the module.
        patch: (height, width) in pixels of a patch; None if no convolution cuts images into patches.
    """

    def __init__(self, position: Position, grid: Grid, found: Survey, patch: tuple[int, int] | None) -> None:
        super().__init__()
        self.position = position
        self.grid = grid
        self.patch_size = patch
        self.dynamic = found.patches is not None and found.shape == grid.shape
        self.sequence_first = found.sequence_first
        self.removed: list[Removed] = []
        #: The arguments of `attach` and the size of the images, for files that describe the module.
        self.created: dict[str, Any] = {}
        #: Report of what it keeps of the removed embedding; None if it starts as initialized.
        self.certificate: Certificate | None = None
        self._handles: list[Any] = []
        self._start_calls()
        register_names(self)

    def _start_calls(self) -> None:
        #: `now` is the current call of each thread; all of those that activation checkpointing may need again.
        self._thread = threading.local()
        self._unfinished: WeakSet[_Call] = WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the calls, whose tensors cannot be copied."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_thread", "_unfinished")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        cast("Any", super().__setstate__)(state)
        self._start_calls()

    def forward(self, x: Any) -> Any:
        """Return x unchanged: if this is attached to a `Sequential`, it is called as its last layer."""
        return x

    def grid_at(self, image: tuple[int, ...]) -> Grid:
        """Return the grid of an image of `image` = (height, width), in pixels."""
        if not self.dynamic or self.patch_size is None:
            raise ValueError(
                f"`img_size` must be left out for a module attached with a fixed `patch_grid`, got {image}."
            )
        return Grid.of_image(image, self.patch_size, self.grid.prefix)

    def set_grid(self, grid: Grid) -> None:
        """Change the grid that parameters are stored for."""
        self.position.set_grid(grid)
        self.grid = grid

    def install(self, module: nn.Module, found: Survey, ways: Ways, given: Sequence[LayerPosition]) -> None:
        """Register the hooks that the layers need for the positions `given`."""
        if self.dynamic and found.patches is not None:
            self._keep(module.get_submodule(found.patches).register_forward_hook(self._compute))
        self._keep(module.register_forward_hook(self._forget))
        for layer, (name, one) in enumerate(zip(found.blocks, given, strict=True)):
            block = module.get_submodule(name)
            self._keep(block.register_forward_pre_hook(self._recall, with_kwargs=True))
            if layer == 0 or one.added_to_stream is not None or one.map_before is not None:
                self._keep(block.register_forward_pre_hook(partial(self._enter, layer), with_kwargs=True))
            if one.map_after is not None:
                self._keep(block.register_forward_hook(partial(self._leave, layer)))
            if one.after_norm is not None:
                self._keep(block.get_submodule(found.norm).register_forward_hook(partial(self._add_inner, layer)))
            if one.queries_keys is not None:
                self._install_queries_keys(block, ways, layer)
            if one.bias is not None and ways.attention is not None and ways.mask is not None:
                attention = block.get_submodule(ways.attention)
                heads = ways.num_heads if ways.multihead else None
                hook = partial(self._add_bias, layer, ways.mask, _index(attention, ways.mask), heads)
                self._keep(attention.register_forward_pre_hook(hook, with_kwargs=True))
            if one.query_scale is not None and ways.scale is not None:
                of_queries, how = ways.scale
                self._keep(
                    block.get_submodule(of_queries).register_forward_hook(partial(self._scale_queries, layer, how))
                )

    def _install_queries_keys(self, block: nn.Module, ways: Ways, layer: int) -> None:
        if ways.multihead and ways.attention is not None:
            attention = block.get_submodule(ways.attention)
            hook = partial(self._add_to_arguments, layer)
            self._keep(attention.register_forward_pre_hook(hook, with_kwargs=True))
        elif ways.queries_keys is not None:
            for name in ways.queries_keys:
                self._keep(block.get_submodule(name).register_forward_pre_hook(partial(self._add_to_input, layer)))
        elif ways.fused is not None:
            self._keep(block.get_submodule(ways.fused).register_forward_hook(partial(self._project_again, layer)))

    def uninstall(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _keep(self, handle: object) -> None:
        self._handles.append(handle)

    # Hooks; the arguments after the bound ones are those of PyTorch's hooks

    def _compute(self, module: nn.Module, args: object, output: Tensor) -> None:
        """Compute the position for the grid of patches, output: (B, D, H, W) or (B, D, T, H, W)."""
        self._set(Grid(*output.shape[2:], prefix=self.grid.prefix))

    def _forget(self, module: nn.Module, args: object, output: object) -> None:
        """Release the position, unless activation checkpointing may need it again in the backward pass."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            self._thread.now = None

    def _recall(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Bind the call to the tokens of a block; activation checkpointing computes the block again from them."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        tokens, name = first_tensor(args, kwargs), f"_call_{id(self)}"
        if tokens is None:
            return
        if torch._C._current_graph_task_id() == -1:
            setattr(tokens, name, getattr(self._thread, "now", None))
        elif (call := getattr(tokens, name, None)) is not None:
            self._thread.now = call

    def _enter(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply `added_to_stream` and `map_before` to the input tokens of a block."""
        tokens = first_tensor(args, kwargs)
        assert tokens is not None
        if layer == 0:
            if not self.dynamic:
                self._set(self.grid)
            self._check(tokens)
        x = self._layer(layer).enter_block(self._batch_first(tokens))
        return _replaced(tokens, self._batch_first(x), args, kwargs)

    def _leave(self, layer: int, module: nn.Module, args: Any, output: Any) -> Any:
        """Apply `map_after` to the output tokens of a block, which may return more than these."""
        if isinstance(output, tuple):
            return (self._leave(layer, module, args, output[0]), *output[1:])
        return self._batch_first(self._layer(layer).leave_block(self._batch_first(output)))

    def _add_inner(self, layer: int, module: nn.Module, args: object, output: Tensor) -> Tensor:
        """Add `after_norm` to the normalized tokens."""
        inner = self._layer(layer).after_norm
        return output if inner is None else output + self._rows(inner)

    def _add_to_input(self, layer: int, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Add `queries_keys` to the input of a projection to queries or keys."""
        return (args[0] + self._queries_keys(layer), *args[1:])

    def _add_to_arguments(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add `queries_keys` to the queries and keys that PyTorch's attention is called with."""
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        table = self._queries_keys(layer)
        return (), {**given, "query": given["query"] + table, "key": given["key"] + table}

    def _project_again(self, layer: int, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Project the input plus `queries_keys` to queries and keys; values are projected from the input alone."""
        shifted = module.forward(args[0] + self._queries_keys(layer))
        queries, keys, _ = shifted.chunk(3, -1)
        return torch.cat([queries, keys, output.chunk(3, -1)[2]], -1)

    def _add_bias(
        self,
        layer: int,
        name: str,
        index: int,
        heads: int | None,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Add `bias` to the mask of attention, if any; with `heads`, (B * h, N, N), as PyTorch's module expects."""
        held, tokens = self._layer(layer).bias, first_tensor(args, kwargs)
        assert held is not None and tokens is not None
        bias = Bias.of(held).table().to(tokens.dtype)
        batch = tokens.shape[1 if self.sequence_first else 0]
        bias = bias[None] if heads is None else bias.repeat(batch, 1, 1)
        mask = args[index] if index < len(args) else kwargs.get(name)
        if mask is not None and mask.dtype == torch.bool:  # True masks a key in PyTorch's module, not elsewhere
            mask = bias.masked_fill(~mask if heads is None else mask, float("-inf"))
        else:
            mask = bias if mask is None else bias + mask
        if index < len(args):
            return (*args[:index], mask, *args[index + 1 :]), kwargs
        return args, {**kwargs, name: mask}

    def _scale_queries(self, layer: int, how: Queries, module: nn.Module, args: object, output: Tensor) -> Tensor:
        """Multiply the queries by `query_scale`, (N,) or (h, N)."""
        scale = self._layer(layer).query_scale
        if scale is None:
            return output
        if how == "heads":
            return (output * scale[..., None]).type_as(output)
        queries, *others = output.chunk(3, -1) if how == "fused" else (output,)
        of_heads = scale.reshape(-1, scale.shape[-1]).T  # (N, h), or (N, 1) for all heads
        of_channels = of_heads.repeat_interleave(queries.shape[-1] // of_heads.shape[1], 1)
        queries = (queries * self._rows(of_channels)).type_as(output)
        return torch.cat([queries, *others], -1) if others else queries

    def _queries_keys(self, layer: int) -> Tensor:
        table = self._layer(layer).queries_keys
        assert table is not None
        return self._rows(table)

    def _set(self, grid: Grid) -> None:
        """Compute the position of each layer for a call of this thread."""
        self._thread.now = call = _Call(grid, self.position(grid))
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._unfinished.add(call)

    def _layer(self, layer: int) -> LayerPosition:
        call = getattr(self._thread, "now", None)
        if call is None and torch.is_grad_enabled():  # activation checkpointing, in a thread of the backward pass
            calls = list(self._unfinished)
            if len({each.grid for each in calls}) > 1:
                raise RuntimeError(
                    "`module` must not be trained with activation checkpointing by several threads on images of "
                    f"several sizes, got grids of {' and '.join(str(each.grid.shape) for each in calls)}."
                )
            call = calls[0] if calls else None
        if call is None:
            raise RuntimeError(
                "`module` must be called as a whole, which computes the attached position for its patches, got a call "
                "of one of its blocks."
            )
        layers: list[LayerPosition] = call.layers
        return layers[layer]

    def _check(self, tokens: Tensor) -> None:
        """Check that the tokens (B, N, D) or (N, B, D) are those of the grid."""
        found = tokens.shape[0 if self.sequence_first else 1]
        call = getattr(self._thread, "now", None)
        if call is not None and found != call.grid.tokens:
            raise ValueError(
                f"the attached position is for {call.grid.tokens} tokens, {self.grid.prefix} before the patches, got "
                f"{found}: no tokens must be dropped or added between the patches and the first block."
            )

    def _rows(self, table: Tensor) -> Tensor:
        """Return a table (N, D) in the shape in which it is added to tokens."""
        return table[:, None] if self.sequence_first else table

    def _batch_first(self, tokens: Tensor) -> Tensor:
        """Convert tokens of the module to (B, N, D), or back."""
        return tokens.transpose(0, 1) if self.sequence_first else tokens

    def extra_repr(self) -> str:
        removed = f", instead of {', '.join(each.name for each in self.removed)}" if self.removed else ""
        if removed and self.certificate is not None:
            removed += f", of which {self.certificate.summary()}"
        return f"grid={self.grid.shape}, prefix={self.grid.prefix}{removed}"


def _replaced(old: Tensor, new: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return arguments with a tensor replaced."""
    return tuple(new if value is old else value for value in args), {
        name: new if value is old else value for name, value in kwargs.items()
    }


def _index(attention: nn.Module, name: str) -> int:
    """Return the index of an argument of `attention` among the positional ones."""
    return list(inspect.signature(attention.forward).parameters).index(name)
