"""Check of the pairs of channels in a rotation of queries and keys."""

from __future__ import annotations

from graticule.model_checks.outputs import SAME
from graticule.model_checks.readings import Relative, every_relative, relative
from graticule.model_checks.subject import Failed, NotApplicable, Subject


def pair_layout(subject: Subject, original: Subject) -> str:
    """A rotation of queries keeps their length; it does not if its table has another layout of pairs."""
    rotated, reason = 0, NotApplicable("queries are not rotated")
    for seen in every_relative(subject):
        try:
            _check_lengths(subject, seen)
        except NotApplicable as error:
            reason = reason if seen.earlier else error
        else:
            rotated += 1
    if not rotated:
        raise reason
    return "rotations keep the length of queries" + (f", in {rotated} attentions" if rotated > 1 else "")


def _check_lengths(subject: Subject, seen: Relative) -> None:
    share, queries = length_differences(seen), seen.queries
    if share is None or queries is None:
        raise NotApplicable("the queries of its attention were not seen")
    if float((queries - queries.mean(1, keepdim=True)).abs().max()) <= 1e-6 * float(queries.abs().max()):
        raise NotApplicable("queries are not rotated")
    other = relative(subject, -2.0, seen.earlier).queries
    if other is not None:
        added = (queries - queries[:, :1]) - (other - other[:, :1])
        if float(added.abs().max()) <= 1e-6 * float(queries.abs().max()):
            raise NotApplicable("position is added to queries, which are not rotated")
    if share > SAME:
        raise Failed(
            f"a rotation must keep the length of queries, got lengths that differ by {100 * share:.0f} %{seen.where}: "
            "the table and its use disagree on which channels form a pair (neighbors, or i and i + d / 2)"
        )


def length_differences(seen: Relative) -> float | None:
    """Return the largest relative difference of the lengths of a head's queries; None if they were not seen."""
    if seen.queries is None:
        return None
    lengths = seen.queries.norm(dim=-1)
    return float(((lengths.amax(1) - lengths.amin(1)) / lengths.amax(1).clamp_min(1e-30)).max())
