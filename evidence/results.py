"""Tables of docs/results: of declared studies, and of recorded measurements, a CSV file in docs/data/measured each.

`python -m evidence.results` writes them between their markers in the pages of docs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graticule.lab.studies.results import Results
from graticule.lab.studies.significance import format_p
from graticule.lab.studies.study import load_study
from graticule.lab.studies.tables import Rows, between, markdown, marked, read_records
from graticule.system.files import write_text

#: Declared studies.
STUDIES = Path(__file__).parent / "studies"


@dataclass(frozen=True)
class Cell:
    """A cell of a table, with its origin; numbers as they were printed.

    keys: the headers of the columns that name a row, separated by ' | '.
    row, column: the names of its row and column; several keys of a row are separated in the same way.
    value: a number, or a word; empty if nothing was measured.
    unit: of the value, or a mark after it.
    low, high: quartiles, or the smallest and the largest value.
    deviation: standard deviation over seeds.
    p, adjusted: of a paired t-test over seeds, and adjusted by Holm's method.
    command, date, machine: the command that printed it, the date and the machine.
    """

    keys: str
    row: str
    column: str
    value: str
    unit: str
    low: str
    high: str
    deviation: str
    p: str
    adjusted: str
    command: str
    date: str
    machine: str

    def __str__(self) -> str:
        """Return its text in a table."""
        text = grouped(self.value)
        if self.low:
            text += f" [{grouped(self.low)}, {grouped(self.high)}]"
        if self.deviation:
            text += f" ± {self.deviation}"
        if self.p:
            text += f" (p {self.p}; {self.adjusted})"
        return f"{text} {self.unit}".strip()


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


def study_text(name: str, data: Path) -> str:
    """Return question, origin, means and tests of a declared study, from its table in docs/data."""
    study = load_study(STUDIES / f"{name}.py")
    report = Results.of_table(name, study, data / f"study_{name}.csv")
    parts = [f"**{study.question}** `{name}`: {report.provenance()} {report.interim()}".rstrip()]
    parts += list(filter(None, (study.controls, study.limits)))
    header, *rows = report.means()
    seeds, *_ = sorted({row[1] for row in rows})
    title = f"{report.tables()['means'][0].removesuffix(' over seeds')} of {seeds} seeds:"
    parts += [title, markdown([(header[0], *header[3:]), *((row[0], *row[3:]) for row in rows)])]
    tests: Rows = [("test", f"difference ({'over images too' if study_images(report) else '95 %'})", "p (Holm)")]
    for test in report.tests():
        if test.test is not None:
            low, high = test.images or (test.test.low, test.test.high)
            difference = f"{test.test.difference:+.2f} [{low:+.2f}, {high:+.2f}]"
            tests.append((f"{test.label} - {test.reference}", difference, format_p(test.adjusted)))
    return "\n\n".join([*parts, *([markdown(tests)] if tests[1:] else [])])


def study_images(report: Results) -> bool:
    """Return whether the intervals of a study are over other images, too."""
    return any(test.images for test in report.tests())


def page_text(text: str, data: Path) -> str:
    """Return the text of a page with the parts between its markers rebuilt from the files in `data`."""
    for name in marked(text, "measured"):
        text = between(text, f"measured {name}", markdown(table_of(read_records(data / f"measured/{name}.csv", Cell))))
    for name in marked(text, "origin"):
        study = load_study(STUDIES / f"{name}.py")
        origin = Results.of_table(name, study, data / f"study_{name}.csv").provenance()
        text = between(text, f"origin {name}", f"`{name}`: {origin} {study.limits}")
    for name in marked(text, "study"):
        text = between(text, f"study {name}", study_text(name, data))
    return text


def write_pages(docs: Path, studies: Path = STUDIES) -> list[Path]:
    """Rebuild the tables of all pages of `docs`; returns the paths of those that changed.

    Raises:
        ValueError: if a file of `docs`/data/measured is in no page.
    """
    data, written, names = docs / "data", [], set()
    for page in sorted(docs.rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        names |= {name for kind in ("measured", "study", "origin") for name in marked(before, kind)}
        if (after := page_text(before, data)) != before:
            written.append(write_text(page, after))
    tables = {path.stem for path in (data / "measured").glob("*.csv")} | {
        path.stem for path in studies.glob("[!_]*.py")
    }
    if lost := sorted(tables - names):
        raise ValueError(f"`docs` must have a page with the markers of every table, got none for {', '.join(lost)}.")
    return written


if __name__ == "__main__":
    print("wrote", *write_pages(Path("docs")))
