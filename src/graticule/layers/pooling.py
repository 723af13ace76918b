"""Learned poolings of tokens."""

from __future__ import annotations

from torch import Tensor, nn


class SequencePool(nn.Linear):
    """Averages the patches with the softmax of a learned score as weights, as in Compact Transformers.

    Reference: Escaping the Big Data Paradigm with Compact Transformers (Hassani et al., 2021), section 3.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Pool tokens x: (B, N, D) to (B, D)."""
        return (super().forward(x).softmax(1).transpose(1, 2) @ x).squeeze(1)
