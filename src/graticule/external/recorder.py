"""Recording of tensors in a model up to one of its attentions: token sequences, queries, logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graticule.external.images import by_image, call


def logits_of(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the logits of `scaled_dot_product_attention`, (..., n, m), without a causal mask."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if attn_mask is None:
        return logits
    if attn_mask.dtype == torch.bool:
        return logits.masked_fill(~attn_mask, -torch.inf)
    return logits + attn_mask


def attention_arguments(args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `scaled_dot_product_attention` by name."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    return dict(zip(names, args, strict=False)) | dict(named)


class _Stop(Exception):
    """Stops the forward pass after the attention was seen."""


@torch.no_grad()
def record(model: nn.Module, images: Tensor, earlier: int = 0) -> Recording:
    """Run `model` up to an attention between all tokens or all of a window, and return its recording.

    Args:
        images: (B, C, height, width).
        earlier: number of attentions to skip. Their outputs are replaced by the mean over the queries, so that equal
            patches before such an attention are equal after it, whatever its position information is.
    """
    recording = Recording(len(images), earlier)
    with suppress(_Stop), recording:
        call(model, images)
    return recording


class Recording(TorchFunctionMode):
    """The tensors of one forward pass of B images, up to an attention; it records while it is entered.

    inputs: inputs of normalizations, linear layers and convolutions of 1 x 1, (B, rows, D) each; the windows of an
        image are consecutive. Those that are not of the images, as coordinates, have no rows.
    queries: queries of the attention, (B, windows, h, n, d); None if they were not seen.
    logits: logits of the attention before the softmax, (B, windows, h, n, n); None if there is no such attention.
    others: what attention of another kind there is.
    """

    def __init__(self, batch: int, earlier: int) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []
        self.queries: Tensor | None = None
        self.logits: Tensor | None = None
        self.others = ""
        self._batch, self._earlier = batch, earlier
        self._product: Tensor | None = None  # the first factor of the last product of matrices

    @property
    def tokens(self) -> int:
        """Index of the input with the tokens of the attention; without an attention, of the first input.

        Raises:
            LookupError: if there is none.
        """
        counts = [x.shape[1] for x in self.inputs]
        if self.logits is None:
            if max(counts, default=0) < 2:
                raise LookupError("no sequence of tokens was seen")
            return next(index for index, count in enumerate(counts) if count > 1)
        rows = self.logits.shape[1] * self.logits.shape[3]
        if rows not in counts:
            raise LookupError("the tokens of the attention were not seen")
        return len(counts) - 1 - counts[::-1].index(rows)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        earlier = False
        if name in ("linear", "layer_norm", "rms_norm"):
            self._sequence(args[0] if args else named["input"])
        elif name == "conv2d" and args[1].shape[-2:] == (1, 1) and args[0].ndim == 4:  # a linear layer of a map
            self._sequence(args[0].flatten(2).transpose(1, 2))
        elif name == "multi_head_attention_forward":
            self._sequence(args[0].transpose(0, 1))  # (N, B, D)
            raise _Stop
        elif name in ("matmul", "__matmul__", "bmm") and len(args) == 2 and args[0].ndim >= 3:
            self._product = args[0]
        elif func is F.scaled_dot_product_attention:
            arguments = attention_arguments(args, named)
            earlier = self._attention(arguments["query"], logits_of(**arguments))
        elif name in ("softmax", "_softmax"):
            logits, queries = args[0] if args else named["input"], self._product
            if logits.ndim >= 3 and logits.shape[-1] > 1:
                seen = queries is not None and queries.shape[:-1] == logits.shape[:-1]
                earlier = self._attention(queries if seen else None, logits)
        output = func(*args, **named)
        return output.mean(-2, keepdim=True).expand_as(output) if earlier else output

    def _sequence(self, x: Tensor) -> None:
        x = by_image(x, self._batch)
        if x.ndim >= 3 and x.shape[0] % self._batch == 0:
            self.inputs.append(x.detach().reshape(self._batch, -1, x.shape[-1]).clone())
        else:  # counted too, so that an input has the same index in a batch of any size
            self.inputs.append(x.new_empty(self._batch, 0, x.shape[-1]))

    def _attention(self, queries: Tensor | None, logits: Tensor) -> bool:
        """Record the requested attention between tokens and stop; return True for an earlier one."""
        if logits.shape[-2] != logits.shape[-1]:  # such logits are not for pairs of patches
            self.others = "queries or keys are pooled"
            raise _Stop
        if len(logits) == 1 and logits.shape[-1] % self._batch == 0:  # packed images, which do not see each other
            logits = _of_each(logits, (-2, -1), self._batch)
            queries = None if queries is None else _of_each(queries, (-2,), self._batch)
        if logits.ndim == 3:  # heads may be in the axis of the batch
            heads, side = len(logits) // self._batch, logits.shape[-1]  # heads of all windows of an image
            counts = [x.shape[1] // side for x in reversed(self.inputs) if x.shape[1] % side == 0]
            windows = next((count for count in counts if count and heads % count == 0), 0)
            if windows and len(logits) % self._batch == 0:
                split = self._batch * windows, heads // windows
                logits = logits.unflatten(0, split)
                queries = None if queries is None else queries.unflatten(0, split)
        rows = logits.shape[: max(logits.ndim - 3, 1)].numel() // self._batch * logits.shape[-1]
        if all(x.shape[1] != rows for x in self.inputs):
            self.others = "attention is between channels"
            return False
        if self._earlier:
            self._earlier -= 1
            return True
        if logits.ndim >= 3 and logits.shape[0] % self._batch == 0:
            self.logits = self._by_image(logits)
            self.queries = None if queries is None else self._by_image(queries)
        raise _Stop

    def _by_image(self, x: Tensor) -> Tensor:
        """Return (B * windows, h, n, ...) or (B * windows, n, ...) as (B, windows, h, n, ...)."""
        heads = x.detach() if x.ndim > 3 else x.detach()[:, None]
        return heads.flatten(0, -4).unflatten(0, (self._batch, -1)).clone()


def _of_each(x: Tensor, axes: tuple[int, ...], batch: int) -> Tensor:
    """Return the parts of each packed image along all of `axes`, (B, ...)."""
    parts = [x] * batch
    for axis in axes:
        side = x.shape[axis] // batch
        parts = [part.narrow(axis, index * side, side) for index, part in enumerate(parts)]
    return torch.cat(parts)
