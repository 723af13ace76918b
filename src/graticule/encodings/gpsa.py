"""ConViT's gated positional self-attention: each head chooses between content and position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from graticule.encodings.forms.bias import BiasEncoding
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition, PositionalAttention
from graticule.position.places import lattice
from graticule.position.position import register_encoding
from graticule.registry.fields import Positive, SmallCount


@register_encoding("gpsa")
class Gpsa(BiasEncoding):
    r"""Blends content attention with positional attention by a learned gate per head (ConViT).

    .. math:: A = (1 - \sigma(\lambda_h))\, softmax(q k^T / \sqrt d) + \sigma(\lambda_h)\, softmax(v_h^T r_{ij}), \quad
              r_{ij} = (\delta_x, \delta_y, |\delta|^2), \quad \delta = p_j - p_i

    On other numbers of axes r has one displacement per axis, the last axis first. It begins as a convolution: head (m,
    n) of the largest square of heads, or cube, attends around the displacement
    :math:`\Delta` = (m - c, n - c), with :math:`v_h = \alpha (2 \Delta_x, 2 \Delta_y, -1)`. Further heads are drawn
    from a normal of std 0.02, times alpha. Prefix tokens attend by content only, and positional attention is between
    patches only. At another grid it is computed again. In a crop the softmax is over the patches of the crop. In ConViT
    (the models `convit_...`) the class token joins the patches after the layers with gates, the first ten of twelve,
    and the projection of the values starts as the identity.

    Reference: ConViT (d'Ascoli et al., 2021), Eq. 4-7.

    Args:
        locality: alpha; a larger one makes the initial positional attention narrower.
        gate: the initial lambda; at 1 the weight of positional attention is 0.73.
        bias: whether scores have a bias per head, as in its code; the softmax cancels it.
    """

    crops = True

    def __init__(
        self, grid: Grid, num_heads: SmallCount, locality: Positive = 1.0, gate: float = 1.0, bias: bool = False
    ) -> None:
        super().__init__(grid, num_heads)
        self.locality, self.gate = locality, gate
        self.pos_proj = nn.Linear(len(grid.shape) + 1, num_heads, bias=bias)
        self.gating_param = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the heads to the displacements of a convolution, and the gates to their initial value."""
        nn.init.constant_(self.gating_param, self.gate)
        weight = self.pos_proj.weight
        nn.init.trunc_normal_(weight, std=0.02, a=-2, b=2)
        if self.pos_proj.bias is not None:
            nn.init.zeros_(self.pos_proj.bias)
        axes = len(self.grid.shape)
        side = next(side for side in range(self.num_heads, 0, -1) if side**axes <= self.num_heads)
        place = torch.arange(side, device=weight.device, dtype=weight.dtype) - (side - 1) / 2
        centers = 2 * lattice(*[place] * axes)  # (x, y): as in its code, heads are ordered by columns
        weight[: side**axes] = F.pad(centers, (0, 1), value=-1.0)
        weight.mul_(self.locality)

    def forward(self, grid: Grid) -> LayerPosition:
        """Return the positional attention for `grid` and its gate."""
        weight = self.pos_proj.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        delta = (-grid.offsets(weight.device).to(wide)).unbind(-1)  # (H * W, H * W) per axis, key minus query
        # elementwise products of coordinates, whose precision autocast does not reduce
        *along, squared = weight.to(wide).T[..., None, None]  # (h, 1, 1) each, the last axis first
        terms = [weight_of_axis * displacement for weight_of_axis, displacement in zip(along, delta[::-1], strict=True)]
        scores = sum(terms[1:], terms[0]) + squared * sum(displacement * displacement for displacement in delta)
        if self.pos_proj.bias is not None:
            scores = scores + self.pos_proj.bias.to(wide)[:, None, None]
        weights = scores.softmax(-1)
        gate = self.gating_param.to(wide).sigmoid()[:, None, None].expand(-1, grid.patches, 1)
        return LayerPosition(
            positional=PositionalAttention(
                grid.with_prefix_bias(weights).to(weight.dtype), F.pad(gate, (0, 0, grid.prefix, 0)).to(weight.dtype)
            )
        )
