"""Tables of docs: of declared studies, of recorded measurements (a CSV file in docs/data/measured each), of answers.

`python -m evidence.results` writes them between their markers in the pages of docs: `measured`, `study` and `origin`
with the name of a file, `papers`, `why_lape` and `gym` with the name of a part, and others of `PARTS`. The
models of the studies are built, too (`evidence.built`); FOLDER=PATH names the folder of a data set, such as CIFAR10.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from pandas import DataFrame

from evidence.built import built_text, read_built, write_built
from evidence.choices import CELLS, why_part
from evidence.contrasts import Registry
from evidence.gym import gym_part
from evidence.papers import older_text, papers_part
from evidence.records import between, read_records
from evidence.studies import Study, load, names, read_table
from graticule.lab.studies.results import TRAINED, mean_table, provenance
from graticule.lab.training.task import metric_of
from graticule.system.files import write_text
from graticule.system.tables import Rows, markdown


@dataclass(frozen=True)
class Cell:
    """A cell of a table, with its origin; numbers as they were printed.

    keys: the headers of the columns that name a row, separated by ' | '.
    row, column: the names of its row and column; several keys of a row are separated in the same way.
    value: a number, or a word; empty if nothing was measured.
    low, high: quartiles, or the smallest and the largest value.
    command, date, machine: the command that printed it, the date and the machine.
    """

    keys: str
    row: str
    column: str
    value: str
    low: str
    high: str
    command: str
    date: str
    machine: str

    def __str__(self) -> str:
        """Return its text in a table."""
        return grouped(self.value) + (f" [{grouped(self.low)}, {grouped(self.high)}]" if self.low else "")


def grouped(number: str) -> str:
    """Separate the thousands of a number; other text is returned as it is.

    >>> [grouped(text) for text in ("12544.0", "+1.50", "999", "six")]
    ['12,544.0', '+1.50', '999', 'six']
    """
    match = re.fullmatch(r"([+-]?)(\d{4,})(\.\d+)?", number)
    return f"{match[1]}{int(match[2]):,}{match[3] or ''}" if match else number


def table_of(cells: Sequence[Cell]) -> Rows:
    """Return a header and the rows of a table, in the order of the cells."""
    columns = list(dict.fromkeys(cell.column for cell in cells))
    rows: dict[str, dict[str, str]] = {}
    for cell in cells:
        rows.setdefault(cell.row, {})[cell.column] = str(cell)
    table: Rows = [(*cells[0].keys.split(" | "), *columns)]
    return [*table, *((*row.split(" | "), *(by.get(column, "") for column in columns)) for row, by in rows.items())]


def rows_of(name: str, registry: Registry) -> tuple[Study, DataFrame]:
    """Return a study, and the rows of its choices in its table."""
    study, rows = load(name), read_table(registry.folder / f"study_{name}.csv")
    cells = {*study.cells.values()}
    return study, rows[[cell in cells for cell in zip(rows.choice, rows.variant, strict=True)]]


def origin(study: Study, rows: DataFrame) -> str:
    """Describe number, dates and time of the runs; docs/data has machines and versions."""
    return provenance(rows, len(study.cells) * len(study.seeds)).partition(", x86_64")[0] + "."


def origin_text(name: str, registry: Registry) -> str:
    """Return origin, what all have, controls and limits of a study."""
    study, rows = rows_of(name, registry)
    shared = f"All have {built_text(read_built(registry.folder, name))[0]}."
    scores = f"[`{name}`](data/study_{name}.csv):"
    return " ".join(filter(None, (scores, origin(study, rows), shared, study.controls, study.limits)))


def means_of(study: Study, rows: DataFrame, metric: str = "") -> Rows:
    """Return a header, then a row per choice: its means in each variant and condition, of the first metric or another.

    Choices and variants are in the order of the study.
    """
    rows = rows[rows.metric == (metric or rows.metric.iloc[0])]
    several = rows["at"].nunique() > 1
    cells = zip(rows.variant, rows["at"], strict=True)
    rows = rows.assign(
        at=[" ".join(filter(None, (variant, at * several))) for variant, at in cells],
        order=rows.choice.map([*study.choices].index),
        first=rows.variant.map([*study.variants].index),
    )
    table = mean_table(rows.sort_values("first", kind="stable").sort_values("order", kind="stable"), study.decimals)
    return [(row[0], *row[3:]) for row in table]


def study_text(name: str, registry: Registry) -> str:
    """Return question, origin, means beside what was built, and contrasts of a study.

    Of several larger sizes of a mode, the largest that a contrast names is shown, or the largest; docs/data has all.
    """
    study, rows = rows_of(name, registry)
    metric = metric_of(rows.metric.iloc[0])
    conditions = [*rows[rows.metric == metric.key]["at"].unique()]
    named = {at for asked, _ in registry.of(data=name) for *_, at in asked.terms}
    by_mode = sorted(conditions, key=lambda at: (at in named, at.split("x")))
    largest = {at if at == TRAINED else at.rpartition(" ")[0]: at for at in by_mode}
    conditions = [at for at in conditions if at in largest.values()]
    table = means_of(study, rows)
    columns = [n for n, at in enumerate(table[0]) if n < 1 or at in study.variants or at.endswith((*conditions,))]
    header, *means = [tuple(row[n] for n in columns) for row in table]
    header = tuple(title or metric.title for title in header)
    counts = " or ".join(sorted({str(n) for n in rows.groupby(["choice"]).seed.nunique()}))
    shared, built = built_text(read_built(registry.folder, name))
    return "\n\n".join(
        filter(
            None,
            (
                f"**{study.question}** `{name}`: {origin(study, rows)}",
                study.controls,
                study.limits,
                f"{metric.title}, mean ± s.d. of {counts} seeds; all have {shared}:",
                markdown([(header[0], "built", *header[1:]), *((row[0], built[row[0]], *row[1:]) for row in means)]),
                contrasts_text(name, registry, [*study.variants, *conditions]),
            ),
        )
    )


def contrasts_text(name: str, registry: Registry, order: Sequence[str] = ()) -> str:
    """Return the rows of a study or the gym that neither docs/why_lape.md nor docs/papers.md has.

    There is a column for every variant and condition, in `order` if it is given.
    """
    rows = [(row, contrast) for row, contrast in registry.of(data=name) if (name, row.at, row.contrast) not in CELLS]
    rows = [pair for pair in rows if not pair[0].question]
    rows = [pair for pair in rows if not order or pair[0].at in order]
    found = [(re.sub("encoding=|joining=", "", row.contrast), row, contrast) for row, contrast in rows]
    places = list(dict.fromkeys((row.variant, row.at) for _, row, _ in found))
    if order:
        places.sort(key=lambda place: [*map(order.index, place)])
    titles = [", ".join(filter(None, (variant, at * (at != TRAINED)))) or TRAINED for variant, at in places]
    cells = {
        (text, row.variant, row.at): contrast.short(1 + (len(places) == 1)) + row.mark for text, row, contrast in found
    }
    texts = dict.fromkeys(text for text, _, contrast in found if contrast.values)
    twice = re.compile(r"^(.+) @ (.+) - \1 @ (.+) - (.+) @ \2 \+ \4 @ \3$")  # a difference of differences
    table = [
        (twice.sub(r"\1 - \4, \2 less \3", text), *(cells.get((text, *place), "") for place in places))
        for text in texts
    ]
    return markdown([("contrast", *titles), *table]) if table else ""


def beyond_text(name: str, registry: Registry) -> str:
    """Return a sentence with those contrasts of a family that are beyond zero, by what their labels 'A with B' have."""
    pairs, beyond = registry.of(family=name), dict[str, list[str]]()
    for row, contrast in pairs:
        if contrast.answer.startswith(("larger", "smaller")):
            choice, _, change = row.label.partition(" with ")
            beyond.setdefault(change, []).append(f"{choice} {fmean(contrast.values):+.1f}")
    listed = "; ".join(f"{change}: {', '.join(choices)}" for change, choices in beyond.items())
    return f"Of {len(pairs)} contrasts, {sum(map(len, beyond.values()))} are significant. With {listed}."


def means_text(name: str, registry: Registry) -> str:
    """Return the means of a study at the trained size and its largest; of 'STUDY METRIC' all of a metric."""
    name, _, metric = name.partition(" ")
    study, rows = rows_of(name, registry)
    largest = () if metric else tuple(f" {height}" for height, _ in study.sizes[-1:])
    header, *means = means_of(study, rows, metric)
    columns = [n for n, at in enumerate(header) if n and (metric or at == TRAINED or at.endswith(largest))]
    choices = [(f"`{row[0]}`", *(row[column] for column in columns)) for row in means]
    return markdown([("choice", *(header[column] for column in columns)), *choices])


def measured_text(name: str, registry: Registry) -> str:
    """Return a table of recorded measurements."""
    return markdown(table_of(read_records(registry.folder / f"measured/{name}.csv", Cell)))


#: Kind of a generated part -> its text by name.
PARTS: dict[str, Callable[[str, Registry], str]] = {
    "measured": measured_text,
    "gym": lambda name, registry: gym_part(name, registry.folder),
    "older": older_text,
    "origin": origin_text,
    "study": study_text,
    "beyond": beyond_text,
    "means": means_text,
    "papers": papers_part,
    "why_lape": why_part,
}


def parts_of(text: str) -> list[tuple[str, str]]:
    """List kind and name of the generated parts of a page."""
    return [pair for pair in re.findall(r"<!-- (\w+) ([^:\n]+): begin", text) if pair[0] in PARTS]


def page_text(text: str, registry: Registry) -> str:
    """Return the text of a page with the parts between its markers rebuilt from the data."""
    for kind, name in parts_of(text):
        text = between(text, f"{kind} {name}", PARTS[kind](name, registry))
    return text


def write_pages(docs: Path, studies: Sequence[str]) -> list[Path]:
    """Rebuild the tables of all pages of `docs`; returns the paths of those that changed.

    Raises:
        ValueError: if a page has neither the markers of a study or of a file of `docs`/data/measured nor links it.
    """
    registry, written, parts = Registry(docs / "data"), [], set[str]()
    for page in sorted(docs.rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        parts |= {name for _, name in parts_of(before)} | {
            *re.findall(r"data/(?:measured/|study_)(\w+)\.csv\)", before)
        }
        if (after := page_text(before, registry)) != before:
            written.append(write_text(page, after))
    tables = {*studies, *(path.stem for path in (docs / "data/measured").glob("*.csv"))}
    if lost := sorted(tables - parts):
        raise ValueError(f"`docs` must have markers of every table, or a link to it, got none for {', '.join(lost)}.")
    return written


if __name__ == "__main__":
    roots = {name: Path(root) for name, _, root in (text.partition("=") for text in sys.argv[1:])}
    studies = {name: load(name) for name in names()}
    print("wrote", write_built(studies, Path("docs/data"), roots), *write_pages(Path("docs"), names()))
