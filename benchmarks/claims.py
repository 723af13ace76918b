"""Claims of the five papers, our test of each, and the verdict of the stored data.

    python benchmarks/claims.py

It reads the tables in docs/data and writes docs/claims.md. A claim is tested by a contrast: a weighted sum of scores of
the same seed, such as the difference of two choices, whose mean over seeds is tested against zero. p is adjusted by
Holm's method for all tests of the page, since the page is read as a whole. Where there are no data, the verdict is
"not run", with the command.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from claims_of_papers import CLAIMS, Claim
from scipy import stats

from graticule.lab.gym.profile import read_profile
from graticule.lab.studies.significance import LEVEL, Outcome, PairedTest, format_p, holm, paired_test, uncorrected
from graticule.lab.studies.study import TRAINED, load_study, read_table
from graticule.lab.studies.tables import markdown
from graticule.lab.training.task import list_tasks
from graticule.system.files import write_text

DOCS = Path(__file__).parent.parent / "docs"
STUDIES = DOCS.parent / "evidence" / "studies"
#: Metrics that a claim need not name: the metrics of tasks; a study has one task.
SCORES = {task.recipe_class.metric.key for task in list_tasks().values()}
#: (choice, variant, at) -> seed -> score.
Scores = dict[tuple[str, str, str], dict[int, float]]


def scores_of(name: str, folder: Path = DOCS / "data") -> Scores:
    """Read the stored scores of a study, or of the extrapolation benchmark or the gym, which have other columns."""
    found: Scores = {}
    if name == "extrapolation":
        path = folder / "extrapolation.csv"
        if path.exists():
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    at = TRAINED if row["height"] == "20" else f"{row['mode']} {row['height']}"
                    if row["variant"] == "plain":
                        found.setdefault((row["choice"], "", at), {})[int(row["seed"])] = float(row["top1"])
        return found
    if name == "gym":
        for score in read_profile(folder / "gym.csv").rows:
            at = TRAINED if score.side == score.trained else f"{score.side} cells"
            if not math.isnan(score.normalized):
                found.setdefault((score.choice, score.task, at), {})[score.seed] = 100 * score.normalized
        return found
    for row in read_table(folder / f"study_{name}.csv"):
        if row.metric != "loss":
            at = row.at if row.metric in SCORES else f"{row.metric}, {row.at}"
            found.setdefault((row.choice, row.variant, at), {})[row.seed] = row.value
    return found


def contrasts(claim: Claim, scores: Scores) -> list[float]:
    """Return the contrast of every seed that has all its scores."""
    first, second = (
        [(weight, scores.get((choice, claim.variant, at), {})) for weight, choice, at in terms]
        for terms in (claim.contrast, claim.shrinks)
    )
    seeds = sorted(set.intersection(*(set(by) for _, by in [*first, *second]))) if first else []
    sums = [[sum(weight * by[seed] for weight, by in parts) for seed in seeds] for parts in (first, second)]
    return [abs(a) - abs(b) for a, b in zip(*sums, strict=True)] if second else sums[0]


def verdict(claim: Claim, test: PairedTest | None, adjusted: float | None, seeds: int, tests: int) -> str:
    """Return the verdict of the data on a claim.

    Args:
        claim: claim of a paper.
        test: test of its contrast.
        adjusted: p of the test, adjusted for all tests of the page.
        seeds: number of seeds of the contrast.
        tests: number of tests on the page.
    """
    if claim.verdict or not seeds:
        return claim.verdict or "not run"
    if test is None or adjusted is None:
        return "no test: one seed" if seeds == 1 else "no test: the same difference in all seeds"
    shown = Outcome(test, adjusted, tests).conclusion
    if claim.equal:
        shown = f"undecided: a difference, {shown}" if shown == uncorrected(tests) else shown
        return "not so at this size" if adjusted < LEVEL else shown
    if adjusted < LEVEL:
        return "supported at this size" if test.difference > 0 else "the opposite at this size"
    opposite = "the opposite, " if test.difference < 0 and shown == uncorrected(tests) else ""
    return f"not seen: {opposite}{shown}"


def made(tests: Sequence[PairedTest | None]) -> int:
    """Count the tests that could be run."""
    return sum(test is not None for test in tests)


def tests_of(
    claims: Sequence[Claim], tables: Mapping[str, Scores]
) -> tuple[list[list[float]], list[PairedTest | None]]:
    """Return the contrasts of every claim and their tests against zero."""
    values = [contrasts(claim, tables.get(claim.data, {})) for claim in claims]
    return values, [paired_test(found, [0.0] * len(found)) if found else None for found in values]


def rows_of(claims: Sequence[Claim], tables: Mapping[str, Scores]) -> list[tuple[str, ...]]:
    """Return a header and a row per claim."""
    values, tests = tests_of(claims, tables)
    known = {file.stem for file in STUDIES.glob("[!_]*.py")}
    decimals = {name: load_study(STUDIES / f"{name}.py").decimals for name in tables if name in known}
    adjusted = holm([None if test is None else test.p for test in tests])
    count = made(tests)
    rows: list[tuple[str, ...]] = [("paper", "claim", "our test", "result", "verdict", "command")]
    for claim, found, test, p in zip(claims, values, tests, adjusted, strict=True):
        result, places = "", decimals.get(claim.data, 2)
        if test is not None:
            mean, low, high = (f"{value:+.{places}f}" for value in (test.difference, test.low, test.high))
            result = f"{mean} ({low} to {high}), {len(found)} seeds, p {format_p(p)}"
        elif found:
            result = f"{sum(found) / len(found):+.{places}f}, {len(found)} seed{'s' * (len(found) > 1)}"
        said = verdict(claim, test, p, len(found), count)
        command = f"`{claim.command}`" if claim.command else ""
        rows.append((f"{claim.paper}, {claim.where}", claim.text, claim.tested, result, said, command))
    return rows


def page(claims: Sequence[Claim], folder: Path = DOCS / "data") -> str:
    """Return docs/claims.md."""
    tables = {name: scores_of(name, folder) for name in {claim.data for claim in claims if claim.data}}
    rows, count = rows_of(claims, tables), made(tests_of(claims, tables)[1])
    kinds = Counter(row[4].replace(f" after correction for {count} tests", "") for row in rows[1:])
    summary = "; ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    return "\n\n".join(
        [
            "# What we know",
            "This page lists the claims of the five papers, with the results of our own small tests. A test is a "
            "contrast of scores of the same seed, top-1 in percent unless stated otherwise. Its result is the mean "
            "over seeds, the 95 % interval of a paired t-test, and p adjusted by Holm's method for all tests of this "
            "page. A verdict applies only to models and data of this size: small models, digits or few images, minutes "
            "of training, which often measures the speed of learning. 'Not seen' does not mean that there is no "
            "effect. 'Exact' means that a test of the code proves the claim.",
            correction(count),
            "The seeds change the initial weights and the order of the batches, not the images, so p says nothing "
            "about other images. A t-test assumes that the contrasts are normally distributed, which 3 to 8 seeds "
            "cannot show. Rows on the same choices, such as those of `lape_joinings`, `lape_decompositions`, "
            "`lape_eta` and `amplitude`, share runs, so they do not confirm each other. The list of tests was not "
            "fixed before the runs; [results](results.md#studies) says which endpoints were. A row that compares LaPE "
            "with another joining does not control for the initial amplitude, except rows named 'our control'.",
            f"{len(claims)} claims: {summary}.",
            markdown(rows),
            "A change from one size to another is in points of top-1: a choice with a higher score at the training "
            "size can lose more, and none loses much once it is near chance, 10 %. "
            "Scores at 'zoom 40' are those of larger images with larger digits, and at 'canvas 40' of more room "
            "around digits of the same size. The weights were trained on images of 20 x 20 pixels without crops, "
            "except in `cpvt_sizes`: there on 28 x 28, with crops of many scales, as in CPVT. "
            "The rows of `lape_zoom` at the end of training were added when its scores were known: the endpoint of "
            "that study, fixed before its runs, is the change at 'zoom 40'. "
            "Scores of `graticule gym` are scaled from 0 for chance to 100 for a perfect answer.",
            "Written by `python benchmarks/claims.py` from docs/data; see [results](results.md) for the studies.",
        ]
    )


def correction(tests: int) -> str:
    """Explain for which tests p is adjusted and why, and the smallest p that can be significant."""
    if not tests:
        return "No claim is tested yet."
    least = LEVEL / tests
    errors = {seeds: f"{stats.t.isf(least / 2, seeds - 1):.1f}" for seeds in (3, 5)}
    return (
        f"The {tests} tests are one family, not one per paper, since the page is read as a whole: the chance that any "
        "of the verdicts 'supported' and 'the opposite' is due to the random seeds alone is at most 5 %. The tables of "
        "the studies adjust for the tests of one study, so a difference may be beyond chance there and not here. The "
        "intervals are not adjusted. 'No difference within error' means that the interval contains zero, 'not "
        "significant after correction' that it excludes zero but the adjusted p is 0.05 or more. This is common with "
        f"few seeds: the smallest p of the page must be below {least:.5f} before it is adjusted, so the mean must be "
        f"{errors[3]} standard errors from zero with 3 seeds, and {errors[5]} with 5."
    )


def main() -> None:
    """Write the page."""
    print(write_text(DOCS / "claims.md", page(CLAIMS) + "\n"))


if __name__ == "__main__":
    main()
