"""The tables of docs/papers.md: every table and figure of each paper, with its command, its values and ours.

The items are rows of papers.csv. Our figures follow them: the contrasts of contrasts.csv whose `where` begins with the
name of the item, and the column `here`. Its hours are those of docs/data/gpu.json: images of ImageNet-1K x epochs x
multiply-adds, over those of the timed model of the family (DeiT-Ti, Swin-T, PosMLP-T), over its images per second.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

from evidence.contrasts import Asked, Contrast, Registry
from evidence.studies import read_table
from graticule.lab.studies.tables import Rows, markdown, read_records

ITEMS = Path(__file__).with_name("papers.csv")
#: Data without markers in a page -> its page.
PAGES = {"gym": "results/gym.md"}


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper.

    paper: the family of its contrasts.
    item: its name in the paper, or 'our control'.
    shows: what it is about.
    command: how to make it with this library.
    printed: the paper's values.
    here: ours, other than contrasts.
    """

    paper: str
    item: str
    shows: str
    command: str
    printed: str
    here: str

    @property
    def names(self) -> tuple[str, ...]:
        """Return its names: 'Figures 1-3' has three."""
        match = re.fullmatch(r"(Table|Figure)s (\d+)-(\d+)", self.item)
        if not match:
            return tuple(self.item.split(", "))
        return tuple(f"{match[1]} {number}" for number in range(int(match[2]), int(match[3]) + 1))


def first_name(where: str) -> str:
    """Return the first table or figure that the column `where` of a contrast names.

    >>> [first_name(where) for where in ("Tables 1, 2, 7", "Figure 1 (f)", "section 3.3")]
    ['Table 1', 'Figure 1', 'section 3.3']
    """
    match = re.match(r"(Table|Figure|Eq\.)s? (\d+)", where)
    return f"{match[1]} {match[2]}" if match else where


@dataclass(frozen=True)
class OlderStudy:
    """A study whose rows are in docs/data, and whose file is in the history alone.

    measured: what was measured, and of which models.
    commit: the commit that added the last of its rows, and has its file.
    caveat: what limits it.
    """

    data: str
    measured: str
    commit: str
    caveat: str


OLDER = read_records(Path(__file__).with_name("older_studies.csv"), OlderStudy)


@cache
def link(data: str, docs: Path) -> str:
    """Link the section that has the markers of a file of docs/data."""
    for page in (*docs.glob("*.md"), *docs.glob("results/*.md")):
        before, marker, _ = page.read_text(encoding="utf-8").partition(f" {data}: begin")
        if marker:
            heading = re.findall(r"^#+ (.*)$", before, flags=re.MULTILINE)[-1]
            anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
            return f"[rows]({page.relative_to(docs) if page.name != 'papers.md' else ''}#{anchor})"
    return f"[rows]({PAGES.get(data, '#older-studies')})"


def text_of(row: Asked, contrast: Contrast) -> str:
    """Return a contrast for a cell, with a digit more for a measure whose unit is not points."""
    return contrast.short(1 if row.margin >= 1 else 2) + row.mark


def is_uncontrolled(row: Asked) -> bool:
    """Return whether a contrast is of an older study and has no control, so it is in contrasts.csv alone."""
    return row.control.startswith("none") and row.data in {study.data for study in OLDER}


def answers(item: Item, registry: Registry) -> str:
    """Return the contrasts of an item, a line for each question."""
    asked = [
        (row, contrast)
        for row, contrast in registry.of(family=item.paper)
        if row.question and first_name(row.where) in item.names and not is_uncontrolled(row)
    ]
    lines = []
    for question, pairs in groupby(asked, lambda pair: pair[0].question):
        several = [*pairs]
        controls = dict.fromkeys(row.control for row, _ in several)
        cells = "; ".join(
            f"{row.label}: {text_of(row, contrast)} ({len(contrast.values)}"
            + f", {row.control}" * (len(controls) > 1 or len(several) == 1)
            + ")"
            for row, contrast in several
        )
        control = f" Control: {next(iter(controls))}." * (len(controls) == 1 < len(several))
        links = ", ".join(dict.fromkeys(link(row.data, registry.folder.parent) for row, _ in several))
        lines.append(f"*{question}* {cells}.{control} {links}")
    return "<br>".join(lines)


def older_text(_: str, registry: Registry) -> str:
    """Return what the older studies measured, and what limits them; 'all' is the only part."""
    table: Rows = [("data", "measured", "seeds", "date", "commit", "caveat")]
    for study in OLDER:
        rows = read_table(registry.folder / f"study_{study.data}.csv")
        seeds = str(rows.seed.nunique())
        table.append((f"`{study.data}`", study.measured, seeds, rows.date.max(), study.commit, study.caveat))
    return markdown(table)


def papers_part(name: str, registry: Registry) -> str:
    """Return the table of a paper."""
    rows: Rows = [("item", "what it shows", "command", "in the paper", "here")]
    for item in read_records(ITEMS, Item):
        if item.paper == name:
            here = "<br>".join(filter(None, (item.here, answers(item, registry))))
            rows.append((item.item, item.shows, item.command, item.printed, here))
    return markdown(rows)
