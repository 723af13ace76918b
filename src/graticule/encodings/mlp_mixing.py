"""MLP-Mixer's MLP over the tokens."""

from __future__ import annotations

from torch import Tensor, nn

from graticule.encodings.forms.mixing import MixingEncoding, TokenMixing
from graticule.position.displacement import TokenMlp
from graticule.position.grid import Grid
from graticule.position.position import register_encoding
from graticule.position.resampling import build_resampler, resize_rows
from graticule.registry.fields import Channels, Ratio


class MlpMixing(MixingEncoding):
    r"""Mixes tokens by an MLP over them, the same for each channel: MLP-Mixer's token-mixing MLP.

    .. math:: y = V\, GELU(U x + u)

    It has T hidden channels, `ratio` times D of the model, and is the only mixing encoding that is not linear. At
    another grid the rows of U and the columns of V are resampled as maps by `resampler`, and U is scaled by N / N', so
    that its sums over the tokens keep their size.

    Reference: MLP-Mixer (Tolstikhin et al., 2021), Eq. 1; initialized as in timm.

    Args:
        ratio: T / D.
        resampler: name of the resampler.
    """

    resampled = True
    dense = False

    def __init__(self, grid: Grid, dim: Channels, ratio: Ratio = 0.5, resampler: str = "bicubic") -> None:
        super().__init__(grid, 1)
        self.resampler = build_resampler(resampler)
        hidden = int(dim * ratio)
        if hidden < 1:
            raise ValueError(f"`ratio` must give at least one hidden channel, got {ratio} of {dim}.")
        self.fc1 = nn.Linear(grid.patches, hidden)
        self.fc2 = nn.Linear(hidden, grid.patches, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weights: Xavier uniform, and a bias of std 1e-6."""
        nn.init.xavier_uniform_(self.fc1.weight)
        nn.init.xavier_uniform_(self.fc2.weight)
        nn.init.normal_(self.fc1.bias, std=1e-6)

    def forward(self, grid: Grid) -> TokenMlp:
        """Return the MLP for `grid`."""
        return TokenMlp(self.at_grid("fc1.weight", grid), self.fc1.bias, self.at_grid("fc2.weight", grid))

    def set_grid(self, grid: Grid) -> None:
        super().set_grid(grid)
        self.fc1.in_features = self.fc2.out_features = grid.patches

    def grid_of(self, name: str, value: Tensor, shape: tuple[int, int] | None) -> Grid | None:
        """Infer the grid of a weight, (T, N') or (N', T)."""
        if value.ndim != 2:
            return None
        hidden, patches = value.shape if name == "fc1.weight" else value.shape[::-1]
        return self.grid.infer_grid(patches, shape) if hidden == len(self.fc1.bias) else None

    def resample(self, name: str, value: Tensor, old: Grid, new: Grid) -> Tensor:
        """Resample a weight, (T, N') or (N', T), whose sums over the tokens keep their size."""
        if name == "fc1.weight":
            return resize_rows(value, old.shape, new.shape, self.resampler) * (old.patches / new.patches)
        return resize_rows(value.T, old.shape, new.shape, self.resampler).T if name == "fc2.weight" else value

    def published_names(self) -> dict[str, str]:
        names = {f"mlp_tokens.{name}": name for name in ("fc1.weight", "fc1.bias", "fc2.weight")}
        return {**names, "mlp_tokens.fc2.bias": ""}


@register_encoding("token_mlp")
class TokenMlpMixing(TokenMixing, MlpMixing):
    """Mixes tokens by an MLP over the tokens, the same for each channel."""
