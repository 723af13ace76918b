"""Fit tensors of a checkpoint to a model with another grid, window, patch, encoding or number of channels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from timm.layers.patch_embed import resample_patch_embed
from torch import Tensor, nn

from graticule.checkpoints.read import dtype_name, kind, unusable
from graticule.encodings.forms.absolute import AbsoluteEncoding
from graticule.position.grid import Grid

#: Prefix tokens, in the order of their rows in a table.
_PREFIX = ("cls_token", "dist_token", "reg_token")
#: Largest difference of a table from a formula that counts as rounding: half precision, sines of rounded angles.
_FORMULA = 1e-2


class Fitting:
    """Function that fits tensors of a checkpoint to a model.

    Args:
        model: the model.
        there: the checkpoint, under our names.
    """

    def __init__(self, model: nn.Module, there: Mapping[str, Tensor]) -> None:
        self.model: Any = model
        position: Any = model.position
        self.own = model.state_dict()
        self.modules = dict(model.named_modules())
        self.held = {f"position.{name}": shape for name, shape in position.table_shapes().items()}
        self.prefix_there, self.prefix_here = _prefix_rows(there), _prefix_rows(self.own)

    def __call__(
        self, name: str, value: Tensor, shape: tuple[int, int] | None, published: bool
    ) -> tuple[Tensor | None, str, str]:
        """Fit `value` to the tensor `name` of the model; return it or None, and status and detail of `Transferred`.

        Args:
            name: its name in the model.
            value: tensor of the checkpoint.
            shape: (H, W) of the grid that the value is for, if the checkpoint records it.
            published: whether it has a published name there; its grid is then assumed to be square if it can be,
                unless `shape` is given. Under our names, a tensor as large as the model's is for the same grid.
        """
        own, value = self.own[name], value.detach()
        if kind(value) != kind(own):
            return None, "new", f"{dtype_name(value)} there"
        if why := unusable(value):
            return None, "new", f"{why} there"
        if not value.to(own.dtype).isfinite().all():
            return None, "new", "not finite there"
        module = self.modules[name.rpartition(".")[0]]
        held = self.held.get(name)
        if shape is None and not published and value.shape == own.shape:
            shape = held
        fitted: tuple[Tensor | None, str, str] | None = None
        if isinstance(module, AbsoluteEncoding) and name.endswith(".pos_embed"):
            fitted = self._table(module, value, shape) if module.resampled else _formula(module, value)
        elif held is not None and value.numel():
            resampled = self.model.position.fit(name.removeprefix("position."), value, shape)
            if resampled is value and value.shape == own.shape:
                fitted = value, "loaded", ""
            elif resampled is not None and resampled.shape == own.shape:
                fitted = resampled, "resized", f"{tuple(value.shape)} -> {tuple(own.shape)}"
        elif value.shape == own.shape:
            fitted = value, "loaded", ""
        elif value.numel() and isinstance(module, nn.Conv2d):
            fitted = self._kernel(module, value, own)
        return (None, "new", f"shape {tuple(value.shape)} there") if fitted is None else fitted

    def _table(
        self, encoding: AbsoluteEncoding, value: Tensor, shape: tuple[int, int] | None
    ) -> tuple[Tensor, str, str] | None:
        """Resample the rows of patches, and match those of prefix tokens by name."""
        if value.ndim < 2 or not value.numel() or value.shape[-1] != encoding.dim or math.prod(value.shape[:-2]) != 1:
            return None
        rows = value.reshape(-1, encoding.dim)
        here = self.prefix_here[: encoding.grid.prefix]
        tokens = self.prefix_there
        grid = replace(encoding.grid, prefix=0)
        for prefix in (tokens, here, []):  # the first stages of a pyramid have none, even if the last one has some
            if old := grid.alike(len(rows) - len(prefix), shape):
                break
        else:
            return None
        new = encoding.pos_embed[0].to(rows)
        ahead = []
        for row, token in enumerate(here):
            if token in prefix:
                ahead.append(rows[prefix.index(token)])
            else:
                ahead.append(torch.zeros_like(new[row]) if token in tokens else new[row])
        same_prefix = torch.cat([*(row[None] for row in ahead), rows[len(prefix) :]])
        table = encoding.fit(same_prefix, replace(old, prefix=len(here)))
        if table is None:
            return None
        details = [f"{_by(old)} -> {_by(grid)}"] if old != grid else []
        details += [f"without {token}" for token in prefix if token not in here]
        details += [f"{token} {'zero' if token in tokens else 'new'}" for token in here if token not in prefix]
        return table[None], "resized" if details else "loaded", ", ".join(details)

    def _kernel(self, layer: nn.Conv2d, value: Tensor, own: Tensor) -> tuple[Tensor, str, str] | None:
        """Adapt the first convolution to another number of channels, or a patch embedding to another patch size."""
        if value.ndim != 4 or value.shape[0] != own.shape[0] or layer.groups != 1:
            return None
        status, details = "resized", []
        if value.shape[1] != own.shape[1]:
            if own.shape[1] != self.model.in_chans:
                return None
            status, details = "adapted", [f"{value.shape[1]} -> {own.shape[1]} channels"]
            value = with_channels(value, own.shape[1])
        old, new = tuple(value.shape[2:]), tuple(own.shape[2:])
        if old != new:
            if layer.kernel_size != layer.stride or layer.padding not in ((0, 0), "valid"):
                return None  # its patches overlap or are padded
            details.append(f"{old[0]}x{old[1]} -> {new[0]}x{new[1]} pixels")
            value = resample_patch_embed(value, list(new))
        return value, status, ", ".join(details)


def _by(grid: Grid) -> str:
    return "x".join(map(str, grid.shape))


def _formula(encoding: AbsoluteEncoding, value: Tensor) -> tuple[Tensor | None, str, str]:
    """Accept a table that equals the formula's up to rounding; any other is ignored, and the formula is used."""
    own = encoding.pos_embed
    if value.numel() == own.numel() and value.shape[-1:] == own.shape[-1:]:
        value = value.reshape(own.shape)
        if (value.to(own) - own).abs().max() < _FORMULA:
            return value, "loaded", ""
    return None, "new", "given by its formula"


def _prefix_rows(state: Mapping[str, Tensor]) -> list[str]:
    """List the names of the prefix tokens of a state dict, one per row of a table."""
    rows = []
    for name in _PREFIX:
        if name in state and state[name].ndim == 3:
            count = state[name].shape[1]
            rows += [name] if count == 1 else [f"{name} {i}" for i in range(count)]
    return rows


def with_channels(weight: Tensor, channels: int) -> Tensor:
    """Adapt a kernel (D, C, h, w) to `channels` channels: summed to one, else repeated and scaled.

    So the output is unchanged for an image whose channels are all equal if there is one, or a multiple of C. timm's
    `adapt_input_conv` computes the same, but only from three channels.
    """
    wide, before = weight.to(torch.promote_types(weight.dtype, torch.float32)), weight.shape[1]
    if channels == 1:
        return wide.sum(1, keepdim=True).to(weight.dtype)
    repeated = wide.repeat(1, -(-channels // before), 1, 1)[:, :channels]
    return (repeated * (before / channels)).to(weight.dtype)
