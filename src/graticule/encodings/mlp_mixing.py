"""MLP-Mixer's MLP over the tokens."""

from __future__ import annotations

from torch import Tensor, nn

from graticule.encodings.forms.mixing import MixingEncoding, TokenMixing, resize_rows
from graticule.position.displacement import TokenMlp
from graticule.position.grid import Grid
from graticule.position.position import register_encoding
from graticule.position.resampling import build_resampler


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

    def __init__(self, grid: Grid, dim: int, ratio: float = 0.5, resampler: str = "bicubic") -> None:
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
        first, second = self.fc1.weight, self.fc2.weight
        if not grid.has_shape(self.grid.shape):
            first, second = (resize_rows(rows, self.grid, grid, self.resampler) for rows in (first, second.T))
            first, second = first * (self.grid.patches / grid.patches), second.T
        return TokenMlp(first, self.fc1.bias, second)

    def set_grid(self, grid: Grid) -> None:
        made = self(grid)
        for layer, weight in ((self.fc1, made.first), (self.fc2, made.second)):
            layer.weight = nn.Parameter(weight.detach().clone(), requires_grad=layer.weight.requires_grad)
        self.fc1.in_features = self.fc2.out_features = grid.patches
        self.grid = grid

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Resample the weights of another grid, (T, N') or (N', T)."""
        if value.ndim != 2 or name not in ("fc1.weight", "fc2.weight"):
            return value
        rows = value if name == "fc1.weight" else value.T
        old = self.grid.alike(rows.shape[1], shape)
        if old is None or old.shape == self.grid.shape or len(rows) != len(self.fc1.bias):
            return value
        resized = resize_rows(rows, old, self.grid, self.resampler)
        return resized * (old.patches / self.grid.patches) if name == "fc1.weight" else resized.T

    def published_names(self) -> dict[str, str]:
        """Return the names in timm's mixers."""
        names = {f"mlp_tokens.{name}": name for name in ("fc1.weight", "fc1.bias", "fc2.weight")}
        return {**names, "mlp_tokens.fc2.bias": ""}


@register_encoding("token_mlp")
class TokenMlpMixing(TokenMixing, MlpMixing):
    """Mixes tokens by an MLP over the tokens, the same for each channel."""
