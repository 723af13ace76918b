"""LieRE: rotations of queries and keys by learned matrices of more than two channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graticule.encodings.forms.coordinates import Coordinates, Noise, linear
from graticule.encodings.forms.rotary import RotaryEncoding
from graticule.position.grid import Grid
from graticule.position.position import register_encoding
from graticule.position.rotation import BlockRotation, Rotation
from graticule.registry.fields import Bounded, Depth, SmallCount
from graticule.system.symbolic import without_autocast


@register_encoding("liere")
class LieRe(RotaryEncoding):
    r"""Rotates blocks of channels by the exponential of a learned skew-symmetric matrix, linear in the position.

    .. math:: R(y, x) = \exp(y A_1 + x A_2), \quad A_i = U_i - U_i^T

    with one upper triangular matrix U per axis and block of channels. Blocks of 2 are `rope_mixed`, where
    the logits depend on the displacement alone; larger matrices do not commute, and then the logits depend on the
    position as well. Coordinates are in [0, 1], so positions at another grid are interpolated. Prefix tokens are not
    rotated. The exponentials are computed in float32 at least, once per patch and block in every forward pass; `fold`
    makes them constants.

    Reference: LieRE (Ostmeier et al., 2024), section 4; by default its code has one rotation for all layers and heads.

    Args:
        head_dim: d, a multiple of `block`.
        block: channels that are rotated together; all of a head by default.
        per_layer: whether each layer has its own matrices.
        per_head: whether each head has its own matrices.
        coordinates: the coordinates of patches.
        noise: noise of the coordinates in training.
    """

    crops = True

    def __init__(
        self,
        grid: Grid,
        depth: Depth,
        num_heads: SmallCount,
        head_dim: Bounded,
        block: int | None = None,
        per_layer: bool = False,
        per_head: bool = False,
        coordinates: Coordinates = Coordinates("unit"),  # noqa: B008
        noise: Noise = Noise(),  # noqa: B008
    ) -> None:
        super().__init__()
        block = head_dim if block is None else block
        if block < 2 or head_dim % block:
            raise ValueError(f"`block` must be at least 2 and divide head_dim = {head_dim}, got {block}.")
        self.grid = grid
        self.coordinates = coordinates
        self.noise = noise
        self.block = block
        layers, heads = depth if per_layer else 1, num_heads if per_head else 1
        # all blocks in one axis, because `to(memory_format=torch.channels_last)` fails on parameters of 5 axes
        self.generators = nn.Parameter(
            torch.empty(len(grid.shape), layers, heads, head_dim // block * (block * (block - 1) // 2))
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the entries above the diagonals, uniform in [0, 2 pi], as the code does."""
        self.generators.uniform_(0, 2 * torch.pi)

    def forward(self, grid: Grid) -> Tensor:
        """Return the matrices for `grid`, (depth or 1, h or 1, N, d / b, b, b), float32 at least."""
        places = self.coordinates(grid, self.generators.device, self.grid)
        if self.training and self.noise.active:
            places = self.noise(places)
        upper = self.generators.to(torch.promote_types(self.generators.dtype, torch.float32))
        entries = linear(places.to(upper.dtype), upper.movedim(0, -1)[..., None, :, :])
        entries = entries.unflatten(-1, (-1, self.block * (self.block - 1) // 2))  # (l, h, H * W, d / b, .)
        row, column = torch.triu_indices(self.block, self.block, 1, device=upper.device).unbind()
        matrix = entries.new_zeros(*entries.shape[:-1], self.block * self.block)
        matrix = matrix.index_copy(-1, row * self.block + column, entries).unflatten(-1, (self.block, self.block))
        # the products of the series must keep their precision
        with without_autocast(upper):
            rotations: Tensor = torch.linalg.matrix_exp(matrix - matrix.mT)
        if grid.prefix:
            still = torch.eye(self.block, dtype=upper.dtype, device=upper.device)
            shape = (*rotations.shape[:2], grid.prefix, *rotations.shape[3:])
            rotations = torch.cat([still.expand(shape), rotations], 2)
        return rotations

    def rotations(self, grid: Grid) -> list[Rotation]:
        """Return one rotation for all layers, or one per layer."""
        return [BlockRotation(matrices) for matrices in self(grid)]
