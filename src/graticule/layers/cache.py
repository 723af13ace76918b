"""What a text that grows remembers of its tokens: the keys and values of a layer."""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of the tokens so far, in memory for `capacity` of them.

    The memory, 2 B h d numbers a token, is taken at the first tokens, in their dtype and on their device. It is for
    inference: what is written has no gradient.

    Args:
        capacity: how many tokens it holds.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"`capacity` must be at least 1, got {capacity}.")
        self.capacity = capacity
        self.length = 0
        self._held: Tensor | None = None  # (2, B, h, capacity, d)

    @property
    def bytes(self) -> int:
        """Memory taken, in bytes."""
        return 0 if self._held is None else self._held.nbytes

    @torch.no_grad()
    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take in those of n more tokens, (B, h, n, d) each; return those of all so far, (B, h, length, d) each.

        Raises:
            ValueError: if they are more than there is room for.
        """
        stop = self.length + keys.shape[-2]
        if stop > self.capacity:
            raise ValueError(f"`keys` must leave the cache at {self.capacity} tokens at most, got {stop}.")
        if self._held is None:
            self._held = keys.new_empty(2, *keys.shape[:2], self.capacity, keys.shape[-1])
        self._held[0, :, :, self.length : stop] = keys
        self._held[1, :, :, self.length : stop] = values
        self.length = stop
        return self._held[0, :, :, :stop], self._held[1, :, :, :stop]
