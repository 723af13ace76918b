"""Note on a study whose runs are not complete: how its findings may change when the others are added."""

from __future__ import annotations

from collections.abc import Sequence

from graticule.studies.significance import LEVEL, holm
from graticule.studies.study import Study


def planned_runs(study: Study) -> int:
    """Return the number of planned runs."""
    return len(study.cells) * len(study.seeds)


def planned_tests(study: Study) -> int:
    """Return the number of tests whose choices are all planned in the variant."""
    groups, cells = [*study.tested, *study.interactions], set(study.cells.values())
    return sum(all((name, variant) in cells for name in group) for variant in study.variants for group in groups)


def interim_note(study: Study, runs: int, tests: Sequence[tuple[str, float | None]]) -> str:
    """Return sentences on the missing runs and tests; empty if no run is missing.

    Findings of tests that were made are also adjusted for all planned tests, as if p of the others were 1: Holm's
    method for the made tests alone is less strict than for the family that was planned.

    Args:
        study: the study.
        runs: number of finished runs.
        tests: name and p of each planned test, before the adjustment; None without a test.
    """
    missing, planned = planned_runs(study) - runs, planned_tests(study)
    if missing <= 0:
        return ""
    values = [p for _, p in tests]
    made = sum(p is not None for p in values)
    said = f"This is an interim result: {missing:,} of {planned_runs(study):,} planned runs are missing"
    if made == planned:
        return f"{said}, and findings may change when they are added."
    said += f", and p (Holm) is adjusted for {made} of {planned} planned tests. Findings may change with the others."
    found = [one for one, p in zip(tests, holm(values), strict=True) if p is not None and p < LEVEL]
    together = holm([*values, *[1.0] * (planned - made)])[: len(tests)]
    kept = [one for one, p in zip(tests, together, strict=True) if p is not None and p < LEVEL]
    lost = [name for name, p in found if (name, p) not in kept]
    if lost:
        said += f" Adjusted for all {planned}, these would not be beyond chance: {'; '.join(lost)}."
    elif found:
        said += f" Adjusted for all {planned}, the differences beyond chance remain."
    return said
