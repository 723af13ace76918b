"""Measurement of the share of each layer's old position that the new one keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graticule.position.layer import LayerPosition
from graticule.position.rotation import PairRotation
from graticule.surgery.fits.biases import bias_table, rotated_logits, table_logits
from graticule.surgery.fits.registry import Before


class Share(NamedTuple):
    """Share of a term of the old position that a layer keeps.

    layer: index of the layer, counted through all stages.
    term: the term of the old position, and its form in the new one.
    kept: 1 - |old - new|^2 / |old|^2: 1 if nothing is lost, 0 if nothing is left, negative if the new term is farther
        from the old one than zero is. None if the two cannot be compared.
    """

    layer: int
    term: str
    kept: float | None


def measure(before: Before, after: Sequence[LayerPosition], first: int = 0) -> list[Share]:
    """Compare the new position of each layer of a stage with the old one.

    An old table in the residual stream is compared with the sum of the new tables in it up to the layer. If the new one
    is added after norms or to queries and keys, the comparison is with the contribution of the old table there
    (`Contribution`), over the images; for a bias or a rotation, with the logits that the old table added
    (`table_logits`). Biases and logits are compared without the mean over the keys of each query, to which a softmax is
    invariant.

    Args:
        before: the state of the stage with the old position.
        after: the new positions of its layers.
        first: index of the first layer of the stage.
    """
    shares = []
    table = before.given[0].pre if before.given else None
    stream: Tensor | None = None
    for index, (old, new) in enumerate(zip(before.given, after, strict=True)):
        layer = first + index
        if new.pre is not None:
            stream = new.pre if stream is None else stream + new.pre
        if table is not None:
            shares.append(Share(layer, *_of_table(table, stream, new, before, index)))
        for field in ("inner", "queries_keys"):
            a, b = getattr(old, field), getattr(new, field)
            seen = before.streams.attention[index] if field == "inner" and before.streams else None
            if a is not None and seen is not None and b is None and stream is not None:
                alike = stream.shape == seen.inner.shape
                shares.append(Share(layer, "inner, from the stream", seen.kept(stream.double()) if alike else None))
            elif a is not None:
                shares.append(Share(layer, field, 0.0 if b is None else _kept(a, b)))
        if old.bias is not None:
            was, now = bias_table(old, before.grid), bias_table(new, before.grid)
            kept = None if was is None else 0.0 if new.bias is None else None
            if was is not None and now is not None and was.shape == now.shape:
                kept = _kept(_centered(was), _centered(now))
            shares.append(Share(layer, "bias", kept))
        if old.rotary is not None:
            shares.append(Share(layer, "rotation", _of_rotation(old, new)))
    return shares


def _of_table(
    table: Tensor, stream: Tensor | None, new: LayerPosition, before: Before, index: int
) -> tuple[str, float | None]:
    """Return the form of an old table in the new position of a layer, and the share that is kept."""
    contribution = before.contributions[index]
    if stream is not None:
        return "table in the stream", _kept(table, stream) if stream.shape == table.shape else None
    for field, where in (("inner", "after the norm"), ("queries_keys", "in queries and keys")):
        given = getattr(new, field)
        if given is not None:
            fits = contribution is not None and given.shape == contribution.mean.shape
            return f"table {where}", contribution.kept(given.double()) if contribution is not None and fits else None
    logits, bias = table_logits(contribution, before.grid), bias_table(new, before.grid)
    if logits is not None and bias is not None and logits.shape == bias.shape:
        return "table in the logits", _kept(_centered(logits), _centered(bias))
    if logits is not None and contribution is not None and new.rotary is not None and not new.bias:
        rotated = rotated_logits(contribution, new.rotary, before.grid)
        return "table in the logits", _kept(_centered(logits), _centered(rotated))
    return "table", 0.0 if new.bias is None and new.rotary is None else None


def _of_rotation(old: LayerPosition, new: LayerPosition) -> float | None:
    """Return the kept share of sines and cosines; None if the two rotate different pairs."""
    a, b = old.rotary, new.rotary
    if b is None:
        return 0.0
    if not isinstance(a, PairRotation) or not isinstance(b, PairRotation) or a.half != b.half:
        return None
    if a.table.shape[-2:] != b.table.shape[-2:]:
        return None
    was, now = torch.broadcast_tensors(a.table, b.table)  # one for each head, or one for all
    return _kept(was, now)


def _centered(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


def _kept(old: Tensor, new: Tensor) -> float:
    whole = float(old.double().square().sum())
    lost = float((old.double() - new.double()).square().sum())
    return float(not lost) if not whole else 1 - lost / whole
