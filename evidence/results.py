"""Tables of docs: of declared studies, of recorded measurements (a CSV file in docs/data/measured each), of answers.

`python -m evidence.results` writes them between their markers in the pages of docs: `measured`, `study` and `origin`
with the name of a file, `papers`, `which`, `why_lape` and `gym` with that of a part, and others of `PARTS`. The models
of the studies are built, too (`evidence.built`); FOLDER=PATH names the folder of a data set, such as CIFAR10.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean

from evidence.built import built_text, write_built
from evidence.choices import which_part, why_part
from evidence.contrasts import Registry
from evidence.gym import gym_part
from evidence.papers import older_text, papers_part
from graticule.lab.studies.results import Results
from graticule.lab.studies.study import TRAINED, Endpoint, load_study
from graticule.lab.studies.tables import Rows, between, markdown, read_records
from graticule.system.files import write_text

#: The most conditions in a table of means.
MOST = 8
#: Declared studies.
STUDIES = Path(__file__).parent / "studies"


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


def results_of(name: str, registry: Registry) -> Results:
    """Return the results of a declared study from its table."""
    return Results.of_table(name, load_study(STUDIES / f"{name}.py"), registry.folder / f"study_{name}.csv")


def origin_text(name: str, registry: Registry) -> str:
    """Return origin, what all have, controls and limits of a declared study."""
    report = results_of(name, registry)
    shared = f"All have {built_text(report.arms)[0]}." if report.arms else ""
    return " ".join(
        filter(None, (f"`{name}`:", report.provenance(), shared, report.study.controls, report.study.limits))
    )


def study_text(name: str, registry: Registry) -> str:
    """Return question, origin, means beside what was built, and contrasts of a declared study.

    With more than `MOST` conditions the means are of those that contrasts name; docs/data has all.
    """
    report = results_of(name, registry)
    study = report.study
    parts = [f"**{study.question}** `{name}`: {report.provenance()}", study.controls, study.limits]
    if report.rows:
        named = (TRAINED, *(at for asked, _ in registry.of(data=name) for *_, at in asked.terms))
        several = len(report.conditions()) > MOST
        columns = [n for n, at in enumerate(report.means()[0]) if n < 3 or not several or at.endswith(named)]
        header, *rows = [tuple(row[n] for n in columns) for row in report.means()]
        seeds = " or ".join(sorted({row[1] for row in rows}))
        title = report.tables()["means"][0].removesuffix(" over seeds")
        shared, built = built_text(report.arms)
        parts += [f"{title} of {seeds} seeds; all have {shared}:"]
        parts += [markdown([(header[0], "built", *header[3:]), *((row[0], built[row[0]], *row[3:]) for row in rows)])]
        parts += [contrasts_text(name, registry, [*study.variants, *report.conditions()])]
    return "\n\n".join(filter(None, parts))


def contrasts_text(name: str, registry: Registry, order: Sequence[str] = ()) -> str:
    """Return the rows of a study or the gym, with a column for every variant and condition if there are several."""
    rows = registry.of(data=name)
    found = [(re.sub("encoding=|joining=", "", row.contrast), row, contrast) for row, contrast in rows]
    places = list(dict.fromkeys((row.variant, row.at) for _, row, _ in found))
    if order:
        places.sort(key=lambda place: [*map(order.index, place)])
    titles = [", ".join(filter(None, (variant, at * (at != TRAINED)))) or TRAINED for variant, at in places]
    cells = {
        (text, row.variant, row.at): contrast.short(1 + (len(places) == 1)) + row.mark for text, row, contrast in found
    }
    texts = dict.fromkeys(text for text, _, contrast in found if contrast.values)
    return markdown(
        [("contrast", *titles), *((text, *(cells.get((text, *place), "") for place in places)) for text in texts)]
    )


def grid_text(name: str, registry: Registry) -> str:
    """Return a table for each question to a study, whose rows have labels such as 'row: column'."""
    tables = []
    for question, pairs in groupby(registry.of(data=name), key=lambda pair: pair[0].question):
        cells: dict[str, dict[str, str]] = {}
        for asked, contrast in pairs:
            label, _, column = asked.label.rpartition(": ")
            cells.setdefault(label, {})[column] = contrast.short() + asked.mark
        columns = list(dict.fromkeys(column for by in cells.values() for column in by))
        rows = [(label, *(by.get(column, "") for column in columns)) for label, by in cells.items()]
        tables.append(markdown([(question, *columns), *rows]))
    return "\n\n".join(tables)


def beyond_text(name: str, registry: Registry) -> str:
    """Return a sentence with those contrasts of a family that are beyond zero, by what their labels 'A with B' have."""
    pairs, beyond = registry.of(family=name), dict[str, list[str]]()
    for row, contrast in pairs:
        if contrast.answer.startswith(("larger", "smaller")):
            choice, _, change = row.label.partition(" with ")
            beyond.setdefault(change, []).append(f"{choice} {fmean(contrast.values):+.1f}")
    listed = "; ".join(f"{change}: {', '.join(choices)}" for change, choices in beyond.items())
    return f"Of {len(pairs)} contrasts, {sum(map(len, beyond.values()))} are beyond zero. With {listed}."


def means_text(name: str, registry: Registry) -> str:
    """Return the means of a study at the trained size and its largest; of 'STUDY METRIC' all of a metric."""
    study, _, metric = name.partition(" ")
    report = results_of(study, registry)
    if not report.rows:
        return "Not run."
    largest = tuple(f" {height}" for height, _ in report.study.sizes[-1:])
    if metric:
        report, largest = replace(report, study=replace(report.study, endpoint=Endpoint(metric))), ("",)
    header, *rows = report.means()
    shown = [at for at in header[3:] if at == TRAINED or at.endswith(largest)]
    columns = [header.index(at) for at in shown]
    return markdown([("choice", *shown), *((f"`{row[0]}`", *(row[column] for column in columns)) for row in rows)])


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
    "contrasts": contrasts_text,
    "grid": grid_text,
    "beyond": beyond_text,
    "means": means_text,
    "papers": papers_part,
    "which": which_part,
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


def write_pages(docs: Path, studies: Path = STUDIES) -> list[Path]:
    """Rebuild the tables of all pages of `docs`; returns the paths of those that changed.

    Raises:
        ValueError: if a file of `docs`/data/measured or a study is in no page.
    """
    registry, written, names = Registry(docs / "data"), [], set()
    for page in sorted(docs.rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        names |= {name for _, name in parts_of(before)}
        if (after := page_text(before, registry)) != before:
            written.append(write_text(page, after))
    tables = {
        path.stem
        for folder, pattern in ((docs / "data/measured", "*.csv"), (studies, "[!_]*.py"))
        for path in folder.glob(pattern)
    }
    if lost := sorted(tables - names):
        raise ValueError(f"`docs` must have a page with the markers of every table, got none for {', '.join(lost)}.")
    return written


if __name__ == "__main__":
    roots = {name: Path(root) for name, _, root in (text.partition("=") for text in sys.argv[1:])}
    print("wrote", *write_built(STUDIES, Path("docs/data"), roots), *write_pages(Path("docs")))
