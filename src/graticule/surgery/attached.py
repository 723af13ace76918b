"""A position that is attached to a transformer of another library: a module, and the hooks that apply it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from graticule.checkpoints.load import PublishedNames, leave_meta, register_names
from graticule.position.bias import Bias
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.position import Position

if TYPE_CHECKING:
    from graticule.surgery.change import Certificate


class Hook(NamedTuple):
    """A hook on a module of a block that applies a field of the position of its layer.

    module: the name of the module in the block; empty for the block itself.
    method: of `AttachedPosition`, called with the index of the layer, `arguments`, and the arguments of PyTorch's
        hooks.
    before: whether it is called before the module, with its arguments, or after it, with its output.
    """

    module: str
    method: Callable[..., Any]
    before: bool
    arguments: tuple[Any, ...] = ()


def first_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the first tensor among the arguments of a call."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


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
    order = dict.fromkeys((*removed.order, *values))
    holder.clear()
    holder.update((name, values[name]) for name in order if name in values)
    if removed.persistent is False:
        owner._non_persistent_buffers_set.add(leaf)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


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
        patch: (height, width) in pixels of a patch; None if no convolution cuts images into patches.
        dynamic: whether the grid follows each image.
        sequence_first: whether tokens are (N, B, D) instead of (B, N, D).
    """

    def __init__(
        self, position: Position, grid: Grid, patch: tuple[int, int] | None, dynamic: bool, sequence_first: bool
    ) -> None:
        super().__init__()
        self.position = position
        self.grid = grid
        self.patch_size = patch
        self.dynamic = dynamic
        self.sequence_first = sequence_first
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

    def install(
        self,
        module: nn.Module,
        patches: str | None,
        blocks: Sequence[str],
        hooks: Mapping[str, tuple[Hook, ...]],
        positions: Sequence[LayerPosition],
    ) -> None:
        """Register the hooks of each field that the `positions` of the layers have.

        `patches` and `blocks` are names: of the convolution that cuts images into patches, if any, and of the blocks.
        """
        if self.dynamic and patches is not None:
            self._handles.append(module.get_submodule(patches).register_forward_hook(self._compute))
        self._handles.append(module.register_forward_hook(self._forget))
        self._handles.append(module.register_load_state_dict_pre_hook(leave_meta))
        self._handles.append(module.register_load_state_dict_post_hook(self._clear))
        for layer, (name, position) in enumerate(zip(blocks, positions, strict=True)):
            block = module.get_submodule(name)
            self._handles.append(block.register_forward_pre_hook(self._recall, with_kwargs=True))
            fields = {field for field, value in position._asdict().items() if value is not None}
            if layer == 0:
                fields.add("added_to_stream")  # where the tokens are checked
            for hook in dict.fromkeys(hook for field in hooks if field in fields for hook in hooks[field]):
                part = block.get_submodule(hook.module)
                function = partial(MethodType(hook.method, self), layer, *hook.arguments)
                if hook.before:
                    self._handles.append(part.register_forward_pre_hook(function, with_kwargs=True))
                else:
                    self._handles.append(part.register_forward_hook(function))

    def uninstall(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    # Hooks; after the bound arguments, they take the arguments of PyTorch's hooks

    def _clear(self, module: nn.Module, keys: object) -> None:
        """Set to zero what replaces removed tensors, which `to_empty` left as uninitialized memory."""
        device = next((value.device for value in module.parameters() if not value.is_meta), torch.device("meta"))
        for removed in self.removed:
            owner, leaf = _owner(module, removed.name)
            zeros = owner.get_buffer(leaf)
            setattr(owner, leaf, torch.zeros_like(zeros, device=device if zeros.is_meta else None))

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
        if torch._C._current_graph_task_id() == -1:
            setattr(tokens, name, getattr(self._thread, "now", None))
        elif (call := getattr(tokens, name, None)) is not None:
            self._thread.now = call

    def enter(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply `added_to_stream` and `map_before` to the input tokens of a block."""
        tokens = first_tensor(args, kwargs)
        if layer == 0:
            if not self.dynamic:
                self._set(self.grid)
            call, count = getattr(self._thread, "now", None), tokens.shape[0 if self.sequence_first else 1]
            if call is not None and count != call.grid.tokens:
                raise ValueError(
                    f"the attached position is for {call.grid.tokens} tokens, {self.grid.prefix} before the patches, "
                    f"got {count}: no tokens must be dropped or added between the patches and the first block."
                )
        x = self._batch_first(self._layer(layer).enter_block(self._batch_first(tokens)))
        values = {name: x if value is tokens else value for name, value in kwargs.items()}
        return tuple(x if value is tokens else value for value in args), values

    def leave(self, layer: int, module: nn.Module, args: Any, output: Any) -> Any:
        """Apply `map_after` to the output tokens of a block, which may return more than these."""
        if isinstance(output, tuple):
            return (self.leave(layer, module, args, output[0]), *output[1:])
        return self._batch_first(self._layer(layer).leave_block(self._batch_first(output)))

    def add_after_norm(self, layer: int, module: nn.Module, args: object, output: Tensor) -> Tensor:
        """Add `after_norm` to the normalized tokens."""
        return self._batch_first(self._layer(layer).add_after_norm(self._batch_first(output)))

    def add_to_input(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add `queries_keys` to the input of a projection to queries or keys."""
        return (args[0] + self._queries_keys(layer), *args[1:]), kwargs

    def add_to_arguments(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add `queries_keys` to the queries and keys that PyTorch's attention is called with."""
        arguments = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        table = self._queries_keys(layer)
        return (), {**arguments, "query": arguments["query"] + table, "key": arguments["key"] + table}

    def project_again(self, layer: int, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Project the input plus `queries_keys` to queries and keys; values are projected from the input alone."""
        shifted = module.forward(args[0] + self._queries_keys(layer))
        queries, keys, _ = shifted.chunk(3, -1)
        return torch.cat([queries, keys, output.chunk(3, -1)[2]], -1)

    def add_bias(
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
        layer_bias, tokens = self._layer(layer).bias, first_tensor(args, kwargs)
        assert layer_bias is not None
        bias = Bias.of(layer_bias).table().to(tokens.dtype)
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

    def scale_queries(self, layer: int, parts: int, module: nn.Module, args: object, output: Tensor) -> Tensor:
        """Multiply queries, (B, h, N, d) or the first part of the channels of (B, N, D), by `query_scale`."""
        scale = self._layer(layer).query_scale  # (N,) or (h, N)
        if scale is None:
            return output
        if output.ndim > 3:
            return (output * scale[..., None]).type_as(output)
        queries, *others = output.chunk(parts, -1)
        of_heads = scale.reshape(-1, scale.shape[-1]).T  # (N, h), or (N, 1) for all heads
        of_channels = of_heads.repeat_interleave(queries.shape[-1] // of_heads.shape[1], 1)
        return torch.cat([(queries * self._rows(of_channels)).type_as(output), *others], -1)

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
            if len({call.grid for call in calls}) > 1:
                raise RuntimeError(
                    "`module` must not be trained with activation checkpointing by several threads on images of "
                    f"several sizes, got grids of {' and '.join(str(call.grid.shape) for call in calls)}."
                )
            call = calls[0] if calls else None
        if call is None:
            raise RuntimeError(
                "`module` must be called as a whole, which computes the attached position for its patches, got a call "
                "of one of its blocks."
            )
        layers: list[LayerPosition] = call.layers
        return layers[layer]

    def _rows(self, table: Tensor) -> Tensor:
        """Return a table (N, D) in the shape in which it is added to tokens."""
        return table[:, None] if self.sequence_first else table

    def _batch_first(self, tokens: Tensor) -> Tensor:
        """Convert tokens of the module to (B, N, D), or back."""
        return tokens.transpose(0, 1) if self.sequence_first else tokens

    def extra_repr(self) -> str:
        removed = f", instead of {', '.join(tensor.name for tensor in self.removed)}" if self.removed else ""
        if removed and self.certificate is not None:
            removed += f", of which {self.certificate.summary()}"
        return f"grid={self.grid.shape}, prefix={self.grid.prefix}{removed}"
