"""A self-contained HTML page, which loads nothing when it is read; the page of runs, which train and compare write."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure
from scipy.stats import binomtest

from graticule.lab.figures.save import png
from graticule.lab.figures.scores import MOST_LINES, axis_label, convergence_plot
from graticule.lab.studies.results import Results
from graticule.lab.studies.runs import curve, flat_values, read_metrics
from graticule.lab.training.run import Run
from graticule.system.files import read_json, write_bytes

TEMPLATES = Environment(loader=PackageLoader("graticule.lab.pages"), autoescape=True, undefined=StrictUndefined)
_NUMBER = re.compile(r"[<≈]?\s*[+−-]?\d[\d,. ]*(e[+-]?\d+)?\s*(%|±\s*[\d.,]+)?\s*|[-–]?")


class Report:
    """A page built from top to bottom: every method adds one part at the end; all text is escaped.

    Args:
        title: of the page.
        subtitle: the line below the title.

    Example:
        >>> report = Report("Two joinings", "seeds 0 to 4")
        >>> report.table(["joining", "top-1 (%)"], [["default", "71.5"], ["lape", "73.1"]], "ImageNet")
        >>> "<td>lape</td>" in report.html()
        True
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title = title
        self.subtitle = subtitle
        self._parts: list[dict[str, Any]] = []  # for templates/report.html

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._parts.append({"kind": "heading", "text": text})

    def text(self, paragraph: str) -> None:
        """Add a paragraph."""
        self._parts.append({"kind": "text", "text": paragraph})

    def note(self, text: str) -> None:
        """Add a highlighted paragraph, such as a caution or a finding."""
        self._parts.append({"kind": "note", "text": text})

    def link(self, text: str, place: str) -> None:
        """Add a link to `place`, a file beside the page, with a text that describes the file."""
        self._parts.append({"kind": "link", "text": text, "place": place})

    def table(self, columns: Sequence[object], rows: Iterable[Sequence[object]], caption: str = "") -> None:
        """Add a table; a column of numbers is aligned to the right, a wide table scrolls.

        Raises:
            ValueError: if a row does not have as many cells as there are columns.
        """
        cells = [[str(cell) for cell in row] for row in rows]
        for row in cells:
            if len(row) != len(columns):
                raise ValueError(f"`rows` must have {len(columns)} cells each, got {len(row)}: {row}.")
        numeric = [
            any(any(map(str.isdigit, row[i])) for row in cells) and all(_NUMBER.fullmatch(row[i]) for row in cells)
            for i in range(len(columns))
        ]
        names = [str(column) for column in columns]
        self._parts.append({"kind": "table", "columns": names, "rows": cells, "numeric": numeric, "caption": caption})

    def figure(self, figure: Figure, caption: str, alt: str) -> None:
        """Add a figure with a caption below it, and a description for readers who cannot see it."""
        data = png(figure)
        width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))  # from the PNG's first chunk
        source = base64.b64encode(data).decode("ascii")
        size = {"width": width, "height": height}
        self._parts.append({"kind": "figure", "png": source, "alt": alt, "caption": caption, **size})

    def html(self) -> str:
        """Return the page."""
        page = TEMPLATES.get_template("report.html")
        return page.render(title=self.title, subtitle=self.subtitle, parts=self._parts) + "\n"

    def write(self, path: str | Path) -> Path:
        """Write the page to `path`, completely or not at all; returns the path."""
        return write_bytes(path, self.html().encode("utf-8"))


def run_page(runs: Mapping[str, Sequence[Run]], results: Results | None = None, answers: Sequence[str] = ()) -> Report:
    """Return the page of finished runs of one metric, which begins with the answer and a figure, or with the scores.

    Args:
        runs: choice -> its runs, which differ only in the seed.
        results: their scores and tests; None for a single run.
        answers: sentences at the top instead of the answer of the results.
    """
    first = next(iter(runs.values()))[0]
    metric = first.recipe().metric
    report = Report(", ".join(runs) if len(runs) < 4 else f"{len(runs)} choices", f"Score: {metric.title}")
    for sentence in answers or ([results.answer()] if results is not None and results.answer() else ()):
        report.note(sentence)
    if guessing := [name for name, members in runs.items() if all(map(_is_guessing, members))]:
        subject = "the accuracy" if results is None else f"the accuracy of {' and '.join(guessing)}"
        report.note(
            f"After the last epoch, {subject} cannot be told from guessing one of the classes: train longer, or check "
            "the data, the encoding and the learning rate."
        )
    if results is None:
        result = first.result()
        scores = [metric.show(result[f"{which}_{metric.key}"], unit=False) for which in ("last", "best")]
        row = [*scores, result["best_epoch"], result["epochs"], f"{result['seconds']:.0f}"]
        report.table(
            [metric.title, "best", "in epoch", "epochs", "seconds"], [row], "after the last epoch, and the best"
        )
    else:
        for suffix, figure in results.figures().items():
            what = f"{metric.title} at other sizes, with the same weights" if suffix else results.endpoint
            report.figure(figure, what, f"{what}, of all choices and seeds")
        for title, (header, *rows) in results.tables().values():
            report.table(header, rows, title)
        report.text(" ".join([results.provenance(), *results.notes()]))
    histories = {name: [read_metrics(run.metrics_file) for run in members] for name, members in runs.items()}
    report.heading("Training")
    for key in (metric, "train_loss", "val_loss") if len(runs) <= MOST_LINES else ():
        column = key if isinstance(key, str) else key.column
        if all(column in history for members in histories.values() for history in members):
            lines = {name: curve(members, column) for name, members in histories.items()}
            several = any(len(members) > 1 for members in runs.values())
            caption = "Mean over seeds; the band is one standard deviation." if several else axis_label(key)
            report.figure(convergence_plot(lines, key), caption, f"{axis_label(key)} against epochs")
    report.heading("Recipes")
    values = {name: flat_values(members[0].recipe().to_dict()) for name, members in runs.items()}
    keys = [key for key in dict.fromkeys(key for recipe in values.values() for key in recipe) if key != "seed"]
    differing = [key for key in keys if len({recipe.get(key) for recipe in values.values()}) > 1]
    if results is None:
        report.text(f"The model was built with the encoding {first.position}.")
    if differing:
        changed = [[key, *(recipe.get(key, "-") for recipe in values.values())] for key in differing]
        report.table(["value", *values], changed, "values that differ")
    same = next(iter(values.values()))
    shared = [f"{key}={same[key]}" for key in keys if key not in differing and same[key] not in ("None", "")]
    report.text(f"All have {', '.join(shared)}.")
    described = read_json(first.recipe_file)
    versions = ", ".join(f"{name} {version}" for name, version in described.get("versions", {}).items())
    machine = ", ".join(f"{key} {value}" for key, value in described.get("machine", {}).items())
    report.text(f"The first run was trained with {versions or 'unknown versions'}, on {machine or 'unknown'}.")
    return report


def _is_guessing(run: Run) -> bool:
    """Return whether the last accuracy of a classifier is not above guessing (binomial test, 5 %)."""
    recipe, count = run.recipe(), run.examples("test")
    if recipe.metric.key != "top1" or not count:
        return False
    count = min(count, recipe.limit_test or count)
    right = round(run.result()["last_top1"] / 100 * count)
    return bool(binomtest(right, count, 1 / len(run.described()["class_names"]), alternative="greater").pvalue > 0.05)
