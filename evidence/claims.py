"""Pages of answers: docs/claims.md (to the papers) and docs/which.md (by task).

`python -m evidence.claims` writes them and the figures from docs/data. Their rows are evidence/questions.csv (at most
40, each with its control) and which.csv; left_out.csv has what was not run. A contrast is written in the
names of the choices of its data: `A - B`, or with the condition of the measurement, `A @ zoom 40 - B @ zoom 40`, or
with the variant, `A [24 layers] - B [24 layers]`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import fmean

from evidence.contrasts import COLUMNS, LATER, Contrast, Term, differences, family, pooled, read_scores
from evidence.why_lape import STUDIES
from graticule.lab.studies.study import TRAINED, Study, load_study
from graticule.lab.studies.tables import between, markdown, read_records
from graticule.system.files import write_text

HERE = Path(__file__).parent
#: Data -> its page, if it is not named like the first word of the data.
PAGES = {
    "extrapolation": "extrapolation.md",
    "gym": "results/gym.md",
    "gym_place": "why_lape.md",
    **dict.fromkeys(("lape_controls", "more_seeds", "lape_epochs"), "results/lape_controls.md"),
    **dict.fromkeys(("cpvt_forms", "cpvt_stacks"), "results/peg.md"),
    **dict.fromkeys(("camvid",), "results/camvid.md"),
    "cpvt_sizes": "results/larger_images.md",
}
#: Studies of which some scores were known when their tests were chosen.
KNOWN = {"camvid", "cpvt_forms", "lape_epochs"}


@dataclass(frozen=True)
class Asked:
    """A row of a page, before its answer.

    paper, where: the paper, and its table or section.
    question: in plain words.
    label: the data set or condition, or the claim.
    data: study, or 'extrapolation', or a gym: the file in docs/data.
    variant: of the study, or task of the gym.
    contrast: as text; it is positive if the paper is right.
    margin: the largest difference that would not matter.
    control: what makes the two sides equal in the other respects.
    """

    paper: str
    where: str
    question: str
    label: str
    data: str
    variant: str
    contrast: str
    margin: float
    control: str

    def terms(self) -> list[Term]:
        """Return the weighted scores of the contrast.

        >>> Asked("", "", "", "", "depth", "6 layers", "LaPE @ zoom 40 - LaPE [24 layers]", 1, "").terms()
        [(1.0, 'LaPE', '6 layers', 'zoom 40'), (-1.0, 'LaPE', '24 layers', 'trained')]
        """
        parsed = []
        for sign, term in re.findall(r"(?:^| ([+-]) )(.+?)(?= [+-] |$)", self.contrast):
            choice, _, at = term.partition(" @ ")
            variant = re.search(r" \[(.+)\]$", choice)
            name = choice if variant is None else choice[: variant.start()]
            chosen = self.variant if variant is None else variant[1]
            parsed.append((-1.0 if sign == "-" else 1.0, name, chosen, at or TRAINED))
        return parsed

    @property
    def fixed(self) -> bool:
        """Whether it is a test of its study, which was fixed before its scores."""
        if self.data == "gym_place":
            return True
        study, terms = study_of(self.data), self.terms()
        if study is None or self.data in KNOWN:
            return False
        choices, variants, ats = (tuple(term[index] for term in terms) for index in (1, 2, 3))
        end = study.endpoint
        if end.minus is not None:
            return choices[1::2] in study.tested and choices[::2] == choices[1::2] and ats == (end.at, end.minus) * 2
        _, allowed = STUDIES.get(self.data, ("", (end.at, f"{end.metric}, {end.at}")))
        same = len(set(variants)) == len(set(ats)) == 1
        known = (*study.tested, *study.interactions)
        return (choices in known or choices[::-1] in study.tested) and same and ats[0] in allowed

    @property
    def link(self) -> str:
        """Link the page of its data."""
        page = "lape_place" if self.data.startswith("lape_place") else "mixing"
        return f"[{self.data}]({PAGES.get(self.data, f'results/{page}.md')})"


@cache
def study_of(name: str) -> Study | None:
    """Load a study by its name; None for benchmarks."""
    file = HERE / "studies" / f"{name}.py"
    return load_study(file) if file.exists() else None


def answers(asked: Sequence[Asked], folder: Path, family_of: Callable[[Asked], str]) -> list[Contrast]:
    """Return the contrast of every row, tested in the families that `family_of` names."""
    scores = cache(lambda name: read_scores(name, folder))
    contrasts: dict[Asked, Contrast] = {}
    for name in dict.fromkeys(map(family_of, asked)):
        rows = [question for question in asked if family_of(question) == name]
        tested = family(
            [
                (question.label, differences(question.terms(), scores(question.data)), question.margin)
                for question in rows
            ]
        )
        contrasts |= dict(zip(rows, tested, strict=True))
    return [contrasts[question] for question in asked]


def answer_of(contrast: Contrast) -> str:
    """Return the answer in the words of a page whose contrasts are positive if the paper is right."""
    return contrast.answer.replace("smaller", "opposite")


def decimals_of(question: Asked) -> int:
    """Return the decimals of a row."""
    return 3 if question.margin < 1 else 2


def claims_page(asked: Sequence[Asked], contrasts: Sequence[Contrast]) -> dict[str, str]:
    """Return the generated parts of docs/claims.md by their names."""
    parts = {}
    for paper, group in groupby(zip(asked, contrasts, strict=True), lambda pair: pair[0].paper):
        rows: list[tuple[str, ...]] = [("question", "row", *COLUMNS, "control", "data")]
        pools: list[str] = []
        for question, pairs_of_question in groupby(group, lambda pair: pair[0].question):
            pairs, title = list(pairs_of_question), question
            for asked_row, contrast in pairs:
                mark = "" if asked_row.fixed else f" {LATER}"
                cells = contrast.cells(decimals_of(asked_row))[:-1]
                rows.append(
                    (
                        f"{title} ({asked_row.where})" * bool(title),
                        asked_row.label + mark,
                        *cells,
                        answer_of(contrast),
                        asked_row.control,
                        asked_row.link,
                    )
                )
                title = ""
            same = [
                contrast
                for asked_row, contrast in pairs
                if asked_row.margin == pairs[0][0].margin and len(contrast.values) > 1
            ]
            if len({asked_row.data for asked_row, _ in pairs}) > 1 and len(same) > 2:
                mean, low, high = pooled(same)
                pools.append(f"- {question} {mean:+.2f} ({low:+.2f} to {high:+.2f}), {len(same)} rows")
        parts[paper] = markdown(rows) + (
            "\n\nPooled over rows by a random-effects model:\n\n" + "\n".join(pools)
        ) * bool(pools)
    counts = Counter(re.split("[:,(]", answer_of(asked_row))[0].strip() for asked_row in contrasts)
    parts["counts"] = (
        f"{len(contrasts)} rows: " + "; ".join(f"{number} {answer}" for answer, number in counts.most_common()) + "."
    )
    return parts


@dataclass(frozen=True)
class LeftOut:
    """Runs that a table of a paper would need on a small scale; hours: on one core, from the time of similar runs."""

    paper: str
    where: str
    what: str
    runs: int
    hours: float


def left_out_table() -> str:
    """Return the table of what was not run, with its cost."""
    records = read_records(HERE / "left_out.csv", LeftOut)
    rows = [(record.paper, record.where, record.what, str(record.runs), f"{record.hours:.1f}") for record in records]
    total = sum(record.hours for record in records)
    return markdown([("paper", "table", "not run", "runs", "hours"), *rows, ("all", "", "", "", f"{total:.0f}")])


#: Tasks of docs/which.md that share a table: their conditions on the same choices.
CLASSIFY = ("same size", "zoomed", "canvas")


def which_page(asked: Sequence[Asked], contrasts: Sequence[Contrast]) -> dict[str, str]:
    """Return the tables of docs/which.md by task, the largest difference first."""
    parts = {}
    cells: dict[str, dict[str, str]] = {}
    for task, group in groupby(zip(asked, contrasts, strict=True), lambda pair: pair[0].question):
        ranked = sorted(group, key=lambda pair: -fmean(pair[1].values))
        if task in CLASSIFY:
            for row, contrast in ranked:
                cells.setdefault(row.label, {})[task] = contrast.short()
            continue
        rows = [(row.label, *contrast.cells(1)) for row, contrast in ranked]
        first, seeds = ranked[0][0], {row[2] for row in rows}
        title = f"{first.link}, {' or '.join(sorted(seeds))} seeds, margin {first.margin:g}:"
        table = [(*row[:2], *row[3:]) for row in rows]
        parts[task] = f"{title}\n\n{markdown([('choice', COLUMNS[0], *COLUMNS[2:]), *table])}"
    table = [(label, *(by.get(task, "") for task in CLASSIFY)) for label, by in cells.items()]
    parts["classify"] = markdown([("choice", "trained size", "zoomed", "canvas"), *table])
    return parts


#: The families of tests: file of rows -> the name of the family of a row.
FAMILIES: dict[str, Callable[[Asked], str]] = {
    "questions": lambda row: row.paper + row.question,
    "which": lambda row: row.question,
}


def read_rows(name: str, docs: Path) -> tuple[list[Asked], list[Contrast]]:
    """Return the rows of a file of this folder and their answers."""
    asked = read_records(HERE / f"{name}.csv", Asked)
    return asked, answers(asked, docs / "data", FAMILIES[name])


def page_texts(docs: Path) -> dict[Path, str]:
    """Return the texts of the pages with their tables rebuilt."""
    parts = {f"claims {name}": part for name, part in claims_page(*read_rows("questions", docs)).items()}
    parts |= {f"which {name}": part for name, part in which_page(*read_rows("which", docs)).items()}
    parts["claims left out"] = left_out_table()
    texts = {}
    for name in ("claims", "which"):
        text = (docs / f"{name}.md").read_text(encoding="utf-8")
        for part, table in parts.items():
            if part.startswith(name):
                text = between(text, part, table)
        texts[docs / f"{name}.md"] = text
    return texts


if __name__ == "__main__":
    print("wrote", *(write_text(page, text) for page, text in page_texts(Path("docs")).items()))
