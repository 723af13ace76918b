"""Fit of the network of FIRE to the logits of a layer."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from graticule.encodings.fire import Fire


def fit_fire(fire: Fire, logits: Tensor) -> bool:
    """Fit the network of FIRE to logits (h, N, N) by least squares over all pairs of patches; return True on success.

    With 'distance', the hidden units are ramps that begin at the distances of the grid. With enough units, they and a
    constant represent every function of the distance; otherwise the ramps begin at quantiles of the distances over the
    pairs. With 'axes', the hidden units keep their random initialization. The last layer is solved for. Scale and
    threshold are unchanged.
    """
    if fire.causal:
        return False
    first, last = cast("nn.Linear", fire.mlp[0]), cast("nn.Linear", fire.mlp[2])
    of_pairs = fire.shares(fire.grid)[fire.grid.offset_index(logits.device).flatten()]  # (N * N, 1 or 2)
    shares, index, count = of_pairs.double().unique(dim=0, return_inverse=True, return_counts=True)
    values = logits.double().flatten(1).T  # (N * N, h)
    means = values.new_zeros(len(shares), values.shape[1]).index_add(0, index, values) / count[:, None]
    if fire.form == "distance":
        first.weight.fill_(1.0)
        first.bias.copy_(-_starts(shares[:, 0], count, first.out_features))
    weight, bias = first.weight.double(), first.bias.double()
    hidden = (shares @ weight.T + bias).relu()
    design = torch.cat([hidden, torch.ones_like(hidden[:, :1])], -1)
    root = count.double().sqrt()[:, None]  # each mean has the weight of its pairs
    driver = "gelsd" if design.device.type == "cpu" else None
    solution = torch.linalg.lstsq(root * design, root * means, driver=driver).solution  # (units + 1, h)
    last.weight.copy_(solution[:-1].T)
    last.bias.copy_(solution[-1])
    return True


def _starts(shares: Tensor, count: Tensor, units: int) -> Tensor:
    """Return the distances where the ramps of the hidden units begin, from sorted distances and their pair counts."""
    if len(shares) <= units:
        return torch.cat([shares, shares[-1:].expand(units - len(shares))])
    quantiles = torch.linspace(0, float(count.sum()), units + 1, dtype=torch.float64)[:-1]
    return shares[torch.searchsorted(count.cumsum(0).double(), quantiles.to(count.device))]
