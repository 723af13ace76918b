"""The tables of docs/papers.md: every table and figure of each paper, with its command, its values and ours.

The items are rows of papers.csv. Our figures follow them: the contrasts of contrasts.csv whose `where` begins with the
name of the item, and what braces name in the column `here`, computed from docs/data/gpu.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from evidence.contrasts import Asked, Contrast, Registry
from evidence.records import read_records
from evidence.studies import read_table
from graticule.system.tables import Rows, markdown

ITEMS = Path(__file__).with_name("papers.csv")
#: Images of ImageNet-1K.
IMAGES = 1_281_167
#: Family -> (model whose training was timed, whether compiled, its multiply-adds in G).
TIMED = {
    "deit": ("deit_tiny_patch16_224", True, 1.25),
    "swin": ("swin_tiny_patch4_window7_224", True, 4.5),
    "posmlp": ("posmlp_tiny_224", None, 5.2),
}
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


def hours(family: str, gmacs: float, epochs: float, share: float, timed: Mapping[str, Any]) -> str:
    """Return the estimated hours of a run on ImageNet-1K on the measured GPU, to two digits.

    The time per image of the timed model of the family is scaled by multiply-adds.
    """
    name, compiled, reference = TIMED[family]
    part = next(rows for title, rows in timed["parts"].items() if any(row.get("name") == name for row in rows))
    speed = next(
        row["images_per_second"]
        for row in part
        if row.get("name") == name and row["phase"] == "training" and row.get("compiled") == compiled
    )
    return f"{float(f'{IMAGES * epochs * share * gmacs / reference / speed / 3600:.2g}'):.0f}"


def filled(text: str, timed: Mapping[str, Any]) -> str:
    """Return the text of a cell with the figures that its braces name."""

    def figure(match: re.Match[str]) -> str:
        kind, *words = match[1].split()
        if kind == "hours":
            gmacs, epochs, share = (
                (*map(float, words[1:]), 300.0, 1.0)[:3] if len(words) == 2 else map(float, words[1:])
            )
            return hours(words[0], gmacs, epochs, share, timed)
        phase = words.pop() if words[-1] == "inference" else "training"
        name, compiled = " ".join(words[:-1]), words[-1] == "True"
        rows = [row for row in timed["parts"]["position"] if (row["name"], row["phase"]) == (name, phase)]
        return f"{next(row['ratio'] for row in rows if row['compiled'] == compiled):.2f}"

    return re.sub(r"\{(.+?)\}", figure, text)


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
            + f", {re.sub('^none', 'no control', row.control)}" * (len(controls) > 1 or len(several) == 1)
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
        scores = f"[`{study.data}`](data/study_{study.data}.csv)"
        table.append((scores, study.measured, seeds, rows.date.max(), study.commit, study.caveat))
    return markdown(table)


def papers_part(name: str, registry: Registry) -> str:
    """Return the table of a paper."""
    timed = json.loads((registry.folder / "gpu.json").read_text(encoding="utf-8"))
    rows: Rows = [("item", "what it shows", "command", "in the paper", "here")]
    for item in read_records(ITEMS, Item):
        if item.paper == name:
            here = "<br>".join(filter(None, (filled(item.here, timed), answers(item, registry))))
            rows.append((item.item, item.shows, item.command, item.printed, here))
    return markdown(rows)
