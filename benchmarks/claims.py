"""What we know: the claims of the five papers, our test of each, and what the kept data say.

    python benchmarks/claims.py

It reads the tables in docs/data and writes docs/claims.md. A claim is tested by a contrast: a weighted sum of scores of
the same seed, such as a choice less another one, whose mean over seeds is tested against zero. p is adjusted by Holm's
method for all claims of the page that are tested. Where there are no data, the verdict is "not run", with the command.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from claims_of_papers import CLAIMS, Claim

from graticule.files import write_text
from graticule.metric import METRICS
from graticule.studies.gym.profile import read_profile
from graticule.studies.significance import LEVEL, PairedTest, format_p, holm, paired_test
from graticule.studies.study import TRAINED
from graticule.studies.study_table import read_table
from graticule.studies.tables import markdown

DOCS = Path(__file__).parent.parent / "docs"
#: Metrics that a claim needs not name: those of tasks, of which a study has one.
SCORES = {metric.key for metric in METRICS}
#: (choice, variant, at) -> seed -> score.
Scores = dict[tuple[str, str, str], dict[int, float]]


def scores_of(name: str, folder: Path = DOCS / "data") -> Scores:
    """Read the kept scores of a study, or those of the extrapolation benchmark or the gym, which have other columns."""
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
    parts = [(weight, scores.get((choice, claim.variant, at), {})) for weight, choice, at in claim.contrast]
    seeds = sorted(set.intersection(*(set(by) for _, by in parts))) if parts else []
    return [sum(weight * by[seed] for weight, by in parts) for seed in seeds]


def verdict(claim: Claim, test: PairedTest | None, adjusted: float | None, count: int) -> str:
    """Say what the data say of a claim."""
    if claim.verdict or not count:
        return claim.verdict or "not run"
    if test is None or adjusted is None:
        return "no test"
    if claim.equal:
        return "no difference within error" if adjusted >= LEVEL else "not so at this size"
    if adjusted >= LEVEL:
        return "not seen: no difference within error"
    return "supported at this size" if test.difference > 0 else "the opposite at this size"


def rows_of(claims: Sequence[Claim], tables: Mapping[str, Scores]) -> list[tuple[str, ...]]:
    """Return a header and a row per claim."""
    values = [contrasts(claim, tables.get(claim.data, {})) for claim in claims]
    tests = [paired_test(found, [0.0] * len(found)) if found else None for found in values]
    adjusted = holm([None if test is None else test.p for test in tests])
    rows: list[tuple[str, ...]] = [("paper", "claim", "our test", "result", "verdict", "command")]
    for claim, found, test, p in zip(claims, values, tests, adjusted, strict=True):
        result = ""
        if test is not None:
            result = (
                f"{test.difference:+.2f} ({test.low:+.2f} to {test.high:+.2f}), {len(found)} seeds, p {format_p(p)}"
            )
        elif found:
            result = f"{sum(found) / len(found):+.2f}, {len(found)} seed{'s' * (len(found) > 1)}"
        said = verdict(claim, test, p, len(found))
        command = f"`{claim.command}`" if claim.command else ""
        rows.append((f"{claim.paper}, {claim.where}", claim.text, claim.tested, result, said, command))
    return rows


def page(claims: Sequence[Claim], folder: Path = DOCS / "data") -> str:
    """Return docs/claims.md."""
    rows = rows_of(claims, {name: scores_of(name, folder) for name in {claim.data for claim in claims if claim.data}})
    counts: dict[str, int] = {}
    for row in rows[1:]:
        kind = row[4].partition(":")[0]
        counts[kind] = counts.get(kind, 0) + 1
    summary = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items(), key=lambda pair: -pair[1]))
    return "\n\n".join(
        [
            "# What we know",
            "The claims of the five papers, one line each, and what our own small tests say of them. A test is "
            "a contrast of scores of the same seed, top-1 in percent unless it says otherwise: its mean over "
            "seeds, the 95 % interval of a paired t-test, and p adjusted by Holm's method for all tests of this "
            "page. A verdict is about models and data of this size: small models, digits, minutes of training. "
            "'Not seen' does not mean that there is no effect. 'Exact' means that a test of the code proves it.",
            f"{len(claims)} claims: {summary}.",
            markdown(rows),
            "Scores at 'zoom 40' and 'canvas 40' are those of weights trained on images of 20 x 20 pixels without "
            "crops, tested on four times as many tokens: zoomed, where digits are twice as large as in training, and "
            "on a larger canvas, where they keep their size. CPVT trains with crops of many scales (`cpvt_sizes`). "
            "Scores of `graticule gym` are the share of the way from chance to a perfect answer, in percent.",
            "Written by `python benchmarks/claims.py` from docs/data; see [results](results.md) for the studies.",
        ]
    )


def main() -> None:
    """Write the page."""
    print(write_text(DOCS / "claims.md", page(CLAIMS) + "\n"))


if __name__ == "__main__":
    main()
