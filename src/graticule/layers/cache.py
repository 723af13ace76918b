"""The cache of keys and values of one layer, for generating text."""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of the tokens so far, with memory for `capacity` tokens.

    The memory, 2 B h d numbers per token, is allocated with the first tokens, in their dtype and on their device. Keys
    may have another number of channels than values. It is for inference: its contents have no gradient.

    Args:
        capacity: maximum number of tokens.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"`capacity` must be at least 1, got {capacity}.")
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None  # (B, h, capacity, d)
        self._values: Tensor | None = None  # the same

    @property
    def bytes(self) -> int:
        """Used memory, in bytes."""
        return sum(held.nbytes for held in (self._keys, self._values) if held is not None)

    @torch.no_grad()
    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of n tokens, (B, h, n, d) each; return those of all, (B, h, length, d) each.

        Raises:
            ValueError: if they exceed the capacity.
        """
        stop = self.length + keys.shape[-2]
        if stop > self.capacity:
            raise ValueError(f"`keys` must leave the cache at {self.capacity} tokens at most, got {stop}.")
        if self._keys is None or self._values is None:
            self._keys, self._values = (
                new.new_empty(*new.shape[:2], self.capacity, new.shape[-1]) for new in (keys, values)
            )
        self._keys[:, :, self.length : stop] = keys
        self._values[:, :, self.length : stop] = values
        self.length = stop
        return self._keys[:, :, :stop], self._values[:, :, :stop]
