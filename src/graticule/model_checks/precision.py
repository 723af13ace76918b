"""Check of position under autocast."""

from __future__ import annotations

import copy

import torch

from graticule.model_checks.outputs import by
from graticule.model_checks.recording import record
from graticule.model_checks.subject import Failed, NotApplicable, Subject


def autocast(subject: Subject, original: Subject) -> str:
    """Under autocast to bfloat16 each patch keeps its position of float32."""
    wide = subject
    for grid in ((2, 160), (8, 160)):
        try:
            wide = subject.at(grid)
            break
        except NotApplicable:
            continue
    single = copy.deepcopy(wide.model).float()
    rows = wide.rows()
    images = wide.constant().float()
    exact = record(single, images)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = record(single, images)
    pairs = [(exact.inputs[exact.tokens][0, rows], rounded.inputs[rounded.tokens][0, rows])]
    for one, other in ((exact.queries, rounded.queries), (exact.logits, rounded.logits)):
        if one is not None and other is not None and one.shape == other.shape:
            flat = [x[0].transpose(1, 2).flatten(0, 1).flatten(1) for x in (one, other)]  # (windows * n, ...)
            pairs.append((flat[0][rows], flat[1][rows]))
    differ = False
    for one, other in pairs:
        one, other = one.double(), other.double()
        spread = float((one - one.mean(0)).abs().max())
        scale = float(one.abs().max())
        if spread <= 1e-4 * scale:
            continue
        if differ and one.shape[1] >= 320:
            break  # logits accumulate the rounding errors of queries, which were compared
        differ = True
        error = float((other - one).abs().max())
        if not error <= 0.04 * scale:
            collapsed = len(one) - len(other.unique(dim=0))
            shared = f"; {collapsed} patches share the value of another" if collapsed else ""
            raise Failed(
                f"position under bfloat16 autocast must be near that in float32 on {by(wide.grid)} patches, got a "
                f"difference of {error:.2g} with values up to {scale:.2g}{shared}"
            )
        # a row that clearly differs from the others must not become equal to one of them
        first = torch.cdist(one, one, p=float("inf")) > 0.05 * scale
        if bool((first & (torch.cdist(other, other, p=float("inf")) == 0)).any()):
            raise Failed(f"positions must be distinct under bfloat16 autocast, got equal ones on {by(wide.grid)}")
    if not differ:
        raise NotApplicable("patches of a constant image are all the same up to the first attention")
    return f"positions on {by(wide.grid)} patches are those of float32"
