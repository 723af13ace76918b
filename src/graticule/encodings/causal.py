"""A mask for attention: no token sees later frames of a video, or later rows or tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from graticule.encodings.forms.bias import BiasEncoding
from graticule.position.grid import Grid
from graticule.position.position import register_encoding
from graticule.registry.fields import SmallCount


@register_encoding("causal")
class Causal(BiasEncoding):
    r"""Lets a patch attend only to the patches whose first coordinate is at most its own: no later frames of a video.

    .. math:: b_{ij} = 0 \text{ if } t_j \le t_i, \text{ else } -\infty

    In a video t is the frame, in an image the row, in a text the index. Prefix tokens attend to all tokens, and patches
    do not attend to them, since they know its end. So what the patches know of a frame does not change when
    frames are appended. Combine it with encodings that do not look ahead, as in `rope + causal`.

    Reference: An Introduction to Transformers (Turner, 2024), section 4.1, with frames instead of tokens.
    """

    shared = True
    crops = True
    dense = False
    exempt = ("permutation: the first axis is time, also for an image",)
    like: Tensor

    def __init__(self, grid: Grid, num_heads: SmallCount) -> None:
        super().__init__(grid, num_heads)
        self.init_non_persistent_buffers()

    def compute_buffers(self, device: torch.device | None, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"like": torch.empty(0, device=device, dtype=dtype)}  # has our dtype and device

    def forward(self, grid: Grid) -> Tensor:
        grid.check_pairs(self.like.element_size(), self.like.device)
        time = grid.coordinates(self.like.device)[:, 0]
        ahead = torch.zeros(1, grid.tokens, grid.tokens, dtype=self.like.dtype, device=self.like.device)
        ahead[:, grid.prefix :, : grid.prefix].fill_(-torch.inf)
        ahead[:, grid.prefix :, grid.prefix :].masked_fill_(time[:, None] < time, -torch.inf)
        return ahead.expand(self.num_heads, -1, -1)
