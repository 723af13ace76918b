"""Parts of a timm model that hold position information, found by structure: tables, biases, rotations and PEGs."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from graticule.external.view import Unavailable, nearest, permutation
from graticule.position.grid import Grid

_TABLE = re.compile(r"(absolute_)?pos_embed\d*")


@dataclass(frozen=True)
class Part(ABC):
    """A part of the position information of a model, by the name of the module that holds it.

    The methods change a copy of the model that shares its tensors: they replace tensors, and never write into them.
    """

    module: str
    kind: ClassVar[str]

    @abstractmethod
    def parameters(self, model: nn.Module) -> int:
        """Return the number of its parameters."""

    @abstractmethod
    def zero(self, model: nn.Module) -> None:
        """Remove its effect, but not the module."""

    @abstractmethod
    def shuffle(self, model: nn.Module, seed: int) -> None:
        """Give each patch the position of another one."""

    @abstractmethod
    def take(self, model: nn.Module, larger: nn.Module, grid: Grid, wide: Grid) -> None:
        """Give each patch of `grid` the position of the nearest patch of `wide`, held by the model `larger`."""

    def remove(self, model: nn.Module) -> bool:
        """Remove it; False if the structure does not allow it."""
        return False

    def at(self, model: nn.Module) -> Any:
        """Return the module that holds it."""
        return model.get_submodule(self.module)


@dataclass(frozen=True)
class Table(Part):
    """A table that is added to the tokens: (1, N, D) with the rows of prefix tokens first, or (1, H, W, D)."""

    kind = "absolute table"
    name: str = "pos_embed"

    def parameters(self, model: nn.Module) -> int:
        """Return the number of elements of the table."""
        return int(getattr(self.at(model), self.name).numel())

    def zero(self, model: nn.Module) -> None:
        """Replace it by zeros."""
        self._change(model, torch.zeros_like)

    def shuffle(self, model: nn.Module, seed: int) -> None:
        """Permute the rows of the patches."""
        prefix = self._prefix(model)

        def permuted(table: Tensor) -> Tensor:
            rows = table.flatten(1, -2)
            order = permutation(rows.shape[1] - prefix, seed).to(table.device)
            return torch.cat([rows[:, :prefix], rows[:, prefix:][:, order]], 1).view_as(table)

        self._change(model, permuted)

    def take(self, model: nn.Module, larger: nn.Module, grid: Grid, wide: Grid) -> None:
        """Take the rows of the larger table."""
        prefix = self._prefix(model)
        there: Tensor = getattr(self.at(larger), self.name).flatten(1, -2)
        rows = there[:, prefix:]
        if rows.shape[1] != wide.patches:
            raise Unavailable(f"{self.name} has {rows.shape[1]} rows for {wide.height} x {wide.width} patches")
        index = nearest(grid, wide).to(there.device)
        self._change(model, lambda table: torch.cat([there[:, :prefix], rows[:, index]], 1).view_as(table))

    def remove(self, model: nn.Module) -> bool:
        """Set it to None."""
        setattr(self.at(model), self.name, None)
        return True

    def _prefix(self, model: nn.Module) -> int:
        table = getattr(self.at(model), self.name)
        rows = table.flatten(1, -2).shape[1]
        ahead = int(getattr(model, "num_prefix_tokens", 0))
        return ahead if table.ndim == 3 and not _is_grid(rows, model) else 0

    def _change(self, model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        holder = self.at(model)
        held = getattr(holder, self.name)
        changed = change(held.detach())
        setattr(holder, self.name, nn.Parameter(changed, False) if isinstance(held, nn.Parameter) else changed)


@dataclass(frozen=True)
class Bias(Part):
    """A bias of attention logits: a table of displacements, or an MLP of them, and the index of each pair."""

    kind = "bias of displacements"

    def parameters(self, model: nn.Module) -> int:
        """Return the number of elements of the table, or of parameters of the MLP."""
        return sum(one.numel() for one in _bias_tensors(self.at(model)))

    def zero(self, model: nn.Module) -> None:
        """Replace the table, or the last weight of an MLP, by zeros: the MLP then returns one number for all pairs."""
        holder = self.at(model)
        if isinstance(getattr(holder, "relative_position_bias_table", None), Tensor):
            holder.relative_position_bias_table = nn.Parameter(
                torch.zeros_like(holder.relative_position_bias_table), False
            )
            return
        last = [one for one in _mlp(holder).modules() if isinstance(one, nn.Linear)][-1]
        last.weight = nn.Parameter(torch.zeros_like(last.weight), False)

    def shuffle(self, model: nn.Module, seed: int) -> None:
        """Permute rows and columns of the index."""
        holder = self.at(model)
        index: Tensor = holder.relative_position_index
        side = math.isqrt(index.numel())
        area = math.prod(holder.window_size)
        order = permutation(area, seed).to(index.device)
        tokens = torch.cat([torch.arange(side - area, device=index.device), order + side - area])
        holder.relative_position_index = index.view(side, side)[tokens][:, tokens].reshape(index.shape)

    def take(self, model: nn.Module, larger: nn.Module, grid: Grid, wide: Grid) -> None:
        """Take the table of the larger model, and its index at the nearest patches."""
        here, there = self.at(model), self.at(larger)
        own, other = Grid(*here.window_size), Grid(*there.window_size)
        index: Tensor = there.relative_position_index
        side = math.isqrt(index.numel())
        ahead = side - other.patches
        places = nearest(own, other).to(index.device) + ahead
        tokens = torch.cat([torch.arange(ahead, device=index.device), places])
        taken = index.view(side, side)[tokens][:, tokens]
        here.relative_position_index = taken.reshape(here.relative_position_index.shape)
        for name in ("relative_position_bias_table", "relative_coords_table", "rel_coords_log"):
            if isinstance(getattr(there, name, None), Tensor):
                setattr(here, name, getattr(there, name))

    def remove(self, model: nn.Module) -> bool:
        """Set it to None, if the attention can run without it."""
        holder = self.at(model)
        if hasattr(holder, "get_bias"):  # a module of its own
            parent, _, name = self.module.rpartition(".")
            setattr(model.get_submodule(parent), name, None)
            return True
        if not isinstance(getattr(holder, "relative_position_bias_table", None), Tensor):
            return False
        holder.relative_position_bias_table = None
        return True


@dataclass(frozen=True)
class PositionalAttention(Part):
    """Attention weights of displacements, blended with those of content by a gate per head: timm's GPSA in ConViT."""

    kind = "positional attention"

    def parameters(self, model: nn.Module) -> int:
        """Return the number of parameters of the weights and the gate."""
        holder = self.at(model)
        return int(sum(one.numel() for one in [*holder.pos_proj.parameters(), holder.gating_param]))

    def zero(self, model: nn.Module) -> None:
        """Close the gate."""
        holder = self.at(model)
        holder.gating_param = nn.Parameter(torch.full_like(holder.gating_param, -1e4), False)

    def shuffle(self, model: nn.Module, seed: int) -> None:
        """Permute rows and columns of the displacements."""
        holder = self.at(model)
        original = holder.get_rel_indices

        def get_rel_indices(num_patches: int) -> Tensor:
            order = permutation(num_patches, seed)
            found: Tensor = original(num_patches)
            return found[:, order][:, :, order]

        holder.get_rel_indices, holder.rel_indices = get_rel_indices, None

    def take(self, model: nn.Module, larger: nn.Module, grid: Grid, wide: Grid) -> None:
        """Refuse: its displacements are computed for squares."""
        raise Unavailable("positional attention cannot be taken from other sizes")


@dataclass(frozen=True)
class Rotary(Part):
    """A rotation of queries and keys: a module whose `get_embed` returns sines, then cosines, (..., N, 2d)."""

    kind = "rotary"

    def parameters(self, model: nn.Module) -> int:
        """Return the number of its parameters."""
        return sum(one.numel() for one in self.at(model).parameters())

    def zero(self, model: nn.Module) -> None:
        """Rotate by angle 0."""

        def unrotated(table: Tensor) -> Tensor:
            sines, cosines = table.chunk(2, -1)
            return torch.cat([torch.zeros_like(sines), torch.ones_like(cosines)], -1)

        self._change(model, unrotated)

    def shuffle(self, model: nn.Module, seed: int) -> None:
        """Permute the patches."""
        self._change(model, lambda t: t[..., permutation(t.shape[-2], seed).to(t.device), :])

    def take(self, model: nn.Module, larger: nn.Module, grid: Grid, wide: Grid) -> None:
        """Take the rotations of the larger grid."""
        with torch.no_grad():
            table = self.at(larger).get_embed(shape=list(wide.shape))
        if table.shape[-2] != wide.patches:
            raise Unavailable(f"{self.module} rotates {table.shape[-2]} of {wide.patches} patches")
        index = nearest(grid, wide).to(table.device)
        self._change(model, lambda _: table[..., index, :])

    def remove(self, model: nn.Module) -> bool:
        """Set it to None."""
        parent, _, name = self.module.rpartition(".")
        setattr(model.get_submodule(parent), name, None)
        return True

    def _change(self, model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        holder = self.at(model)
        original = holder.get_embed

        def get_embed(*args: Any, **kwargs: Any) -> Tensor:
            return change(original(*args, **kwargs))

        holder.get_embed = get_embed


@dataclass(frozen=True)
class Peg(Part):
    """A depth-wise convolution that is added to the tokens between blocks, as timm's `PosConv` in Twins."""

    kind = "PEG"

    def parameters(self, model: nn.Module) -> int:
        """Return the number of its parameters."""
        return sum(one.numel() for one in self.at(model).parameters())

    def zero(self, model: nn.Module) -> None:
        """Replace its weights by zeros."""
        for one in self.at(model).modules():
            for name, held in list(one.named_parameters(recurse=False)):
                setattr(one, name, nn.Parameter(torch.zeros_like(held), False))

    def shuffle(self, model: nn.Module, seed: int) -> None:
        """Permute the tokens before the convolution, and restore their order after it."""

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x, *others = args
            return (x[:, permutation(x.shape[1], seed).argsort().to(x.device)], *others)

        def after(module: nn.Module, args: object, output: Tensor) -> Tensor:
            return output[:, permutation(output.shape[1], seed).to(output.device)]

        holder = self.at(model)
        holder.register_forward_pre_hook(before)
        holder.register_forward_hook(after)

    def take(self, model: nn.Module, larger: nn.Module, grid: Grid, wide: Grid) -> None:
        """Change nothing: a PEG is a function of the tokens."""


def find_parts(model: nn.Module) -> list[Part]:
    """Return the parts of the position information of a model, as far as their structure is known."""
    found: list[Part] = []
    for name, module in model.named_modules():
        tensors = dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])
        if callable(getattr(module, "get_embed", None)):
            found.append(Rotary(name))
        elif isinstance(tensors.get("relative_position_index"), Tensor) and _bias_tensors(module):
            found.append(Bias(name))
        elif hasattr(module, "gating_param") and hasattr(module, "pos_proj"):
            found.append(PositionalAttention(name))
        elif type(module).__name__ == "PosConv":
            found.append(Peg(name))
        elif not any(name == part.module or name.startswith(f"{part.module}.") for part in found):
            found += [Table(name, key) for key, one in tensors.items() if _TABLE.fullmatch(key) and one.ndim >= 3]
    return found


def _mlp(holder: Any) -> nn.Module:
    mlp: nn.Module = getattr(holder, "cpb_mlp", None) or holder.mlp
    return mlp


def _bias_tensors(holder: nn.Module) -> list[Tensor]:
    table = getattr(holder, "relative_position_bias_table", None)
    if isinstance(table, Tensor):
        return [table]
    mlp = getattr(holder, "cpb_mlp", None) or getattr(holder, "mlp", None)
    return list(mlp.parameters()) if isinstance(mlp, nn.Module) else []


def _is_grid(rows: int, model: nn.Module) -> bool:
    """Return whether a table of `rows` rows has rows of patches only."""
    patches = getattr(getattr(model, "patch_embed", None), "num_patches", None)
    return rows == patches if patches is not None else not getattr(model, "num_prefix_tokens", 0)
