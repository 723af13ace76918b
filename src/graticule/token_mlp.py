"""Token mixing by an MLP over the tokens, as in MLP-Mixer."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class TokenMlp(NamedTuple):
    r"""An MLP over the tokens, the same for every channel; it is not a matrix of weights.

    .. math:: y = V\, GELU(U x + u)

    The bias of y is `LayerPosition.spatial_bias`.

    Args:
        first: U, (T, N).
        first_bias: u, (T,).
        second: V, (N, T).
    """

    first: Tensor
    first_bias: Tensor
    second: Tensor

    @property
    def groups(self) -> int:
        """Return the number of groups of channels that are mixed differently."""
        return 1

    def part(self, shape: tuple[int, int], rows: slice, columns: slice) -> TokenMlp:
        """Return the MLP over the tokens of a part of a grid of `shape` = (H, W), as if the others were zero."""
        first = self.first.unflatten(1, shape)[:, rows, columns].flatten(1)
        return TokenMlp(first, self.first_bias, self.second.unflatten(0, shape)[rows, columns].flatten(0, 1))

    def mix(self, x: Tensor) -> Tensor:
        """Mix the tokens x: (B, N, C)."""
        hidden = F.gelu(self.first.to(x.dtype) @ x + self.first_bias[:, None].to(x.dtype))
        return self.second.to(x.dtype) @ hidden
