"""PoPE: the content of a channel determines its magnitude, the position its angle."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graticule.encodings.forms.coordinates import Coordinates, Noise
from graticule.encodings.forms.rotary import FixedRotary, axial, check_head_dim, geometric
from graticule.encodings.forms.scaling import Scaling
from graticule.position.grid import Grid
from graticule.position.position import register_encoding
from graticule.position.rotation import PolarRotation, Rotation
from graticule.registry.fields import Bounded, Depth, Positive, SmallCount


@register_encoding("pope")
class Pope(FixedRotary):
    r"""Makes softplus of each channel of queries and keys a magnitude, whose angle depends on the position only.

    .. math:: q_i^T k_j \to \sum_{c < d} softplus(q_{ic})\, softplus(k_{jc})
              \cos(\theta_c(p_i) - \theta_c(p_j) - \delta_{l, h, c})

    Each channel has its own frequency, half of them for the row and half for the column (which is ours; the paper has
    one axis, as a text), T^(-2c / d) on each. :math:`\delta` is learned per layer, head and channel, starting at 0; the
    paper clamps it to [-2 pi, 0], which is not needed, as angles are periodic. Queries and keys get twice the channels.
    Prefix tokens have an angle of 0.

    Reference: Decoupling the "What" and "Where" With Polar Coordinate Positional Embeddings (Gopalakrishnan et
    al., 2025), section 3.

    Args:
        head_dim: d, a multiple of the number of axes.
        base: T.
        coordinates: the coordinates of patches.
        noise: noise of the coordinates in training.
        scaling: scaling of the frequencies at other grids.
    """

    def __init__(
        self,
        grid: Grid,
        depth: Depth,
        num_heads: SmallCount,
        head_dim: Bounded,
        base: Positive = 10_000.0,
        coordinates: Coordinates = Coordinates(),  # noqa: B008
        noise: Noise = Noise(),  # noqa: B008
        scaling: Scaling = Scaling(),  # noqa: B008
    ) -> None:
        check_head_dim(head_dim, len(grid.shape), f"channels on {len(grid.shape)} axes")
        self.head_dim = head_dim
        self.base = base
        super().__init__(grid, coordinates, noise, scaling, layout=None)
        self.delta = nn.Parameter(torch.zeros(depth, num_heads, head_dim))

    def vectors(self, device: torch.device | None = None) -> Tensor:
        """Return the frequency vectors (f^y, f^x), (d, axes), float64."""
        axes = len(self.grid.shape)
        return axial(*[geometric(self.base, self.head_dim // axes, device)] * axes)

    def rotations(self, grid: Grid) -> list[Rotation]:
        queries = self(grid)  # (N, 2d)
        sines, cosines = queries.chunk(2, -1)
        delta = self.delta.to(queries.dtype)[..., None, :]  # (depth, h, 1, d)
        late, on_time = delta.sin(), delta.cos()
        keys = torch.cat([sines * on_time + cosines * late, cosines * on_time - sines * late], -1)
        return [PolarRotation(queries, table) for table in keys]
