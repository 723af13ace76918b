"""A position that is attached to a transformer of another library: a module, and the hooks that apply it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from graticule.checkpoints.load import PublishedNames, leave_meta, register_names
from graticule.position.bias import Bias
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.places import by
from graticule.position.position import Position

if TYPE_CHECKING:
    from graticule.surgery.change import Certificate


class Hook(NamedTuple):
    """A hook on a module of each block that applies fields of the position of its layer.

    fields, module: names of fields of `LayerPosition`, and of the module in the block; '' is the block itself.
    method: of `AttachedPosition`, called with the index of the layer, `arguments`, the module, and the positional and
        the keyword arguments of its call; after the call also with its output.
    before: whether it is called before the module.
    """

    fields: tuple[str, ...]
    module: str
    method: Callable[..., Any]
    before: bool = True
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Host:
    """A transformer to attach a position to, as one forward pass shows it. Names of parts of a block are within it.

    blocks, pattern: names of the blocks, in order, and the pattern of these, with * for one part of a name.
    norm: name of the norm before attention.
    image: (height, width) of the input images, in pixels; None for other inputs.
    tokens, dim: N and D.
    sequence_first: whether tokens are (N, B, D) instead of (B, N, D).
    patches, shape: name of the convolution that cuts images or videos into patches, and (H, W) or (T, H, W) of its
        output; None if there is none.
    tables: names of the parameters and buffers with rows (..., D) that are added to tokens before the blocks.
    hooks: all that can pass a position to a block, in the order in which they are registered.
    reasons: for fields without a hook, the reason.
    attention: name of the module that gets the normalized tokens; '' if there is none.
    projections: names of its projections, to queries and to keys, or the single one to queries, keys and values.
    num_heads: h; None if it was not found.
    """

    blocks: tuple[str, ...]
    pattern: str
    norm: str
    image: tuple[int, int] | None
    tokens: int
    dim: int
    sequence_first: bool
    patches: str | None
    shape: tuple[int, ...] | None
    tables: tuple[str, ...]
    hooks: Sequence[Hook]
    reasons: Mapping[str, str]
    attention: str = ""
    projections: tuple[str, ...] = ()
    num_heads: int | None = None

    def grid(self, patch_grid: tuple[int, int] | None) -> Grid:
        """Return the grid of the tokens, which is the convolution's, or `patch_grid`."""
        shape = self.shape if patch_grid is None else patch_grid
        if shape is None:
            raise ValueError(
                "`patch_grid` must be given: no convolution before the blocks makes a map of at most "
                f"{self.tokens} patches."
            )
        prefix, known = self.tokens - math.prod(shape), "" if self.shape is None else f", {by(self.shape)} by its stem"
        is_other = self.shape is not None and tuple(shape) != self.shape and math.prod(shape) <= math.prod(self.shape)
        if prefix < 0 or is_other:
            raise ValueError(
                f"`patch_grid` must be the grid of the patches among the {self.tokens} tokens of the blocks{known}, "
                f"got {by(shape)}."
            )
        return Grid(*shape, prefix=prefix)

    def check(self, positions: Sequence[LayerPosition], kind: str) -> None:
        """Check that hooks can pass all fields of the positions to the layers of a model of class `kind`."""
        reached = {field for hook in self.hooks for field in hook.fields}
        fields = {field: x for position in positions for field, x in position._asdict().items() if x is not None}
        for field, value in fields.items():
            reason = self.reasons.get(field, "it acts within attention or an MLP, where no hook reaches")
            if is_function := field == "bias" and Bias.of(value).function is not None:
                reason = "a bias that depends on queries must be computed within the attention"
            if is_function or field not in reached:
                raise ValueError(
                    f"`encoding` and `joining` must be such that {kind} can use them, got one that gives layers "
                    f"`{field}`: {reason}."
                )


def first_tensor(values: Tensor | Sequence[Any]) -> Tensor:
    """Return the first tensor among some values, such as the arguments of a call."""
    return values if isinstance(values, Tensor) else next(value for value in values if isinstance(value, Tensor))


@dataclass
class Removed:
    """A parameter or buffer that zeros replace, with the information for restoring it.

    name: its name in the module.
    value, later: the parameter or buffer, and the names of the others of its owner that come after it.
    persistent: whether a buffer was in the state dict; None for a parameter.
    """

    name: str
    value: Tensor
    later: Sequence[str]
    persistent: bool | None


def take_out(module: nn.Module, name: str) -> Removed:
    """Replace a parameter or buffer by zeros that are not in the state dict."""
    owner, leaf = _owner(module, name)
    is_parameter = leaf in owner._parameters
    holder: Any = owner._parameters if is_parameter else owner._buffers
    persistent = None if is_parameter else leaf not in owner._non_persistent_buffers_set
    names = list(holder)
    removed = Removed(name, holder[leaf], names[names.index(leaf) + 1 :], persistent)
    if is_parameter:
        del owner._parameters[leaf]
    owner.register_buffer(leaf, torch.zeros_like(removed.value, requires_grad=False), persistent=False)
    return removed


def put_back(module: nn.Module, removed: Removed) -> None:
    """Restore a parameter or buffer, on the device and with the dtype of the zeros."""
    owner, leaf = _owner(module, removed.name)
    zeros: Any = owner._buffers.pop(leaf)
    owner._non_persistent_buffers_set.discard(leaf)
    removed.value.data = removed.value.data.to(zeros.device, zeros.dtype)
    holder: Any = owner._parameters if removed.persistent is None else owner._buffers
    holder[leaf] = removed.value
    holder.update({name: holder.pop(name) for name in removed.later if name in holder})
    if removed.persistent is False:
        owner._non_persistent_buffers_set.add(leaf)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


class _Current(threading.local):
    """The call of each thread: its grid, and the position of each layer. A copy has no calls."""

    call: tuple[Grid, list[LayerPosition]] | None = None

    def __reduce__(self) -> Any:
        return _Current, ()


class AttachedPosition(PublishedNames):
    """Module that computes the position for the grid of each call, and passes it to the blocks by hooks.

    The convolution that cuts images into patches determines the grid. Without one, the grid is fixed.

    Hooks are functions to which this module is bound. So they are copied with it, and the hooks of a copy use the
    position of the copy.

    Args:
        position: the position of the blocks.
        grid: the grid that it is built for.
        host: the module that it is attached to.
    """

    def __init__(self, position: Position, grid: Grid, host: Host) -> None:
        super().__init__()
        self.position = position
        self.grid = grid
        self.host = host
        #: Whether the grid follows each image.
        self.dynamic = host.shape == grid.shape
        #: (height, width) of a patch in pixels; None for videos, or if images are not divided into equal patches.
        self.patch_size: tuple[int, ...] | None = None
        if host.image is not None and grid.ndim == 2:
            sides = [divmod(side, count) for side, count in zip(host.image, grid.shape, strict=True)]
            self.patch_size = None if any(rest for _, rest in sides) else tuple(side for side, _ in sides)
        self.removed: list[Removed] = []
        #: The arguments of `attach` and the size of the images, for files that describe the module.
        self.created: dict[str, Any] = {}
        #: Report of the share that it keeps of the removed embedding; None if it starts as initialized.
        self.certificate: Certificate | None = None
        self._handles: list[Any] = []
        self._current = _Current()
        register_names(self)

    def forward(self, x: Any) -> Any:
        """Return x unchanged: if this is attached to a `Sequential`, it is called as its last layer."""
        return x

    def grid_at(self, image: tuple[int, ...]) -> Grid:
        """Return the grid of an image of `image` = (height, width), in pixels."""
        if not self.dynamic or self.patch_size is None:
            raise ValueError(f"`img_size` must be left out where attached with a fixed `patch_grid`, got {image}.")
        return Grid.of_image(image, self.patch_size, self.grid.prefix)

    def set_grid(self, grid: Grid) -> None:
        """Change the grid that parameters are stored for."""
        self.position.set_grid(grid)
        self.grid = grid

    def install(self, module: nn.Module, positions: Sequence[LayerPosition]) -> None:
        """Register the hooks of each field that the `positions` of the layers have."""
        keep = self._handles.append
        if self.dynamic and self.host.patches is not None:
            keep(module.get_submodule(self.host.patches).register_forward_hook(self._compute))
        keep(module.register_forward_hook(self._forget))
        keep(module.register_load_state_dict_pre_hook(leave_meta))
        keep(module.register_load_state_dict_post_hook(self._clear))
        for layer, (name, position) in enumerate(zip(self.host.blocks, positions, strict=True)):
            block = module.get_submodule(name)
            keep(block.register_forward_pre_hook(self._recall, with_kwargs=True))
            fields = {field for field, value in position._asdict().items() if value is not None}
            if layer == 0:
                fields.add("added_to_stream")  # where the tokens are checked
            for hook in self.host.hooks:
                if not fields.isdisjoint(hook.fields):
                    part = block.get_submodule(hook.module)
                    register: Any = part.register_forward_pre_hook if hook.before else part.register_forward_hook
                    keep(register(partial(hook.method, self, layer, *hook.arguments), with_kwargs=True))

    def uninstall(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _clear(self, module: nn.Module, keys: object) -> None:
        """Set to zero what replaces removed tensors, which `to_empty` left as uninitialized memory."""
        device = next((value.device for value in module.parameters() if not value.is_meta), torch.device("meta"))
        for removed in self.removed:
            owner, leaf = _owner(module, removed.name)
            zeros = owner.get_buffer(leaf)
            setattr(owner, leaf, torch.zeros_like(zeros, device=device if zeros.is_meta else None))

    def _compute(self, module: nn.Module, args: object, output: Tensor) -> None:
        """Compute the position for the grid of patches, output: (B, D, H, W) or (B, D, T, H, W)."""
        grid = Grid(*output.shape[2:], prefix=self.grid.prefix)
        self._current.call = grid, self.position(grid)

    def _forget(self, module: nn.Module, args: object, output: object) -> None:
        """Release the position, unless activation checkpointing may need it again in the backward pass."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            self._current.call = None

    def _recall(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Bind the call to the tokens of a block; activation checkpointing computes the block again from them."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        tokens, name = first_tensor((*args, *kwargs.values())), f"_call_{id(self)}"
        if torch._C._current_graph_task_id() == -1:
            setattr(tokens, name, self._current.call)
        elif (call := getattr(tokens, name, None)) is not None:
            self._current.call = call

    def enter(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply `added_to_stream` and `map_before` to the input tokens of a block."""
        tokens = first_tensor((*args, *kwargs.values()))
        if layer == 0:
            if not self.dynamic:
                self._current.call = self.grid, self.position(self.grid)
            call, count = self._current.call, tokens.shape[0 if self.host.sequence_first else 1]
            if call is not None and count != call[0].tokens:
                raise ValueError(
                    f"the attached position is for {call[0].tokens} tokens, {self.grid.prefix} before the patches, "
                    f"got {count}: no tokens must be dropped or added between the patches and the first block."
                )
        x = self._batch_first(self._layer(layer).enter_block(self._batch_first(tokens)))
        values = {name: x if value is tokens else value for name, value in kwargs.items()}
        return tuple(x if value is tokens else value for value in args), values

    def leave(self, layer: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Apply `map_after` to the output tokens of a block, which may return more than these."""
        if isinstance(output, tuple):
            return (self.leave(layer, module, args, kwargs, output[0]), *output[1:])
        return self._batch_first(self._layer(layer).leave_block(self._batch_first(output)))

    def add_after_norm(self, layer: int, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        """Add `after_norm` to the normalized tokens."""
        return self._batch_first(self._layer(layer).add_after_norm(self._batch_first(output)))

    def add_to_input(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add `queries_keys` to the input of a projection to queries or keys."""
        return (args[0] + self._queries_keys(layer), *args[1:]), kwargs

    def add_to_arguments(self, layer: int, names: Sequence[str], module: Any, args: Any, kwargs: Any) -> Any:
        """Add `queries_keys` to the queries and keys that PyTorch's attention is called with."""
        arguments, table = dict(zip(names, args, strict=False)) | kwargs, self._queries_keys(layer)
        return (), {**arguments, "query": arguments["query"] + table, "key": arguments["key"] + table}

    def project_again(self, layer: int, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        """Project the input plus `queries_keys` to queries and keys; values are projected from the input alone."""
        shifted = module.forward(args[0] + self._queries_keys(layer))
        queries, keys, _ = shifted.chunk(3, -1)
        return torch.cat([queries, keys, output.chunk(3, -1)[2]], -1)

    def add_bias(
        self, layer: int, names: Sequence[str], name: str, heads: int | None, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Add `bias` to the mask of attention, if any; with `heads`, (B * h, N, N), as PyTorch's module expects."""
        layer_bias: Any = self._layer(layer).bias
        tokens = first_tensor((*args, *kwargs.values()))
        bias = Bias.of(layer_bias).table().to(tokens.dtype)
        bias = bias[None] if heads is None else bias.repeat(tokens.shape[int(self.host.sequence_first)], 1, 1)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        mask = arguments.get(name)
        if mask is not None and mask.dtype == torch.bool:  # True masks a key in PyTorch's module, not elsewhere
            bias = bias.masked_fill(~mask if heads is None else mask, float("-inf"))
        elif mask is not None:
            bias = bias + mask
        return (), {**arguments, name: bias}

    def scale_queries(
        self, layer: int, parts: int, module: nn.Module, args: Any, kwargs: Any, output: Tensor
    ) -> Tensor:
        """Multiply queries, (B, h, N, d) or the first part of the channels of (B, N, D), by `query_scale`."""
        scale = self._layer(layer).query_scale  # (N,) or (h, N)
        if scale is None:
            return output
        if output.ndim > 3:
            return (output * scale[..., None]).type_as(output)
        queries, *others = output.chunk(parts, -1)
        of_heads = scale.reshape(-1, scale.shape[-1]).T  # (N, h), or (N, 1) for all heads
        of_channels = of_heads.repeat_interleave(queries.shape[-1] // of_heads.shape[1], 1)
        return torch.cat(
            [(queries * of_channels.unsqueeze(int(self.host.sequence_first))).type_as(output), *others], -1
        )

    def _queries_keys(self, layer: int) -> Tensor:
        table: Any = self._layer(layer).queries_keys
        return table.unsqueeze(int(self.host.sequence_first))

    def _layer(self, layer: int) -> LayerPosition:
        if self._current.call is None:
            raise RuntimeError(
                "`module` must be called as a whole, which computes the attached position for its patches, got a call "
                "of one of its blocks; activation checkpointing must have use_reentrant=False."
            )
        return self._current.call[1][layer]

    def _batch_first(self, tokens: Tensor) -> Tensor:
        """Convert tokens of the module to (B, N, D), or back."""
        return tokens.transpose(0, 1) if self.host.sequence_first else tokens

    def extra_repr(self) -> str:
        removed = f", instead of {', '.join(tensor.name for tensor in self.removed)}" if self.removed else ""
        if removed and self.certificate is not None:
            removed += f", of which {self.certificate.summary()}"
        return f"grid={self.grid.shape}, prefix={self.grid.prefix}{removed}"
