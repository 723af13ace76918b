"""The results of a run: the metric that scores it, the tables of its evaluation, and its predictions in images."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import Field

from graticule.registry.fields import Flag

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from matplotlib.figure import Figure
    from torch import Tensor

#: The scores of a run at one setting, a dataclass.
S = TypeVar("S", bound="DataclassInstance")


@dataclass(frozen=True)
class Metric:
    """A score on held-out data.

    key: its name in files: val_KEY in metrics.csv, best_KEY and last_KEY in result.json.
    label: its name in tables and figures.
    unit: written after a value, "" for none.
    highest: whether the highest value is the best.
    decimals: number of decimals shown.
    """

    key: Annotated[str, Field(min_length=1, max_length=40)]
    label: Annotated[str, Field(max_length=40)]
    unit: Annotated[str, Field(max_length=40)]
    highest: Flag
    decimals: Annotated[int, Field(strict=True, ge=0, le=12)] = 2

    @property
    def column(self) -> str:
        """Return its name in metrics.csv."""
        return f"val_{self.key}"

    @property
    def title(self) -> str:
        """Return label and unit, for the header of a column or the label of an axis."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    @property
    def worst(self) -> float:
        """Return the value that is worse than every other."""
        return -math.inf if self.highest else math.inf

    def better(self, value: float, other: float) -> bool:
        """Return whether `value` is better than `other`; NaN never is."""
        return value > other if self.highest else value < other

    def best(self, rows: Iterable[Mapping[str, float]]) -> Mapping[str, float]:
        """Return the row with the best finite value, the first of equal ones."""
        scored = [row for row in rows if math.isfinite(row[self.column])]
        if not scored:
            raise ValueError(
                f"no epoch has a finite {self.column}; a smaller `lr`, a longer warm-up or `clip_grad` may help."
            )
        return (max if self.highest else min)(scored, key=lambda row: row[self.column])

    def show(self, value: float, unit: bool = True) -> str:
        """Format a value, with its unit."""
        return f"{value:.{self.decimals}f}" + (f" {self.unit}" if unit and self.unit else "")


TOP1 = Metric("top1", "top-1", "%", highest=True)
BITS_PER_BYTE = Metric("bpb", "bits per byte", "", highest=False, decimals=3)
BOX_MAP = Metric("box_map", "box mAP", "%", highest=True)
MIOU = Metric("miou", "mIoU", "%", highest=True)
COSINE = Metric("cosine", "cosine with the original's features", "", highest=True, decimals=4)


@dataclass(frozen=True)
class Evaluated(Generic[S]):
    """A run with its scores.

    label: its name among the runs.
    folder: its folder.
    recipe: its recipe.
    scores: one per setting.
    measured: the score of the same checkpoint in training; None for an unfinished run.
    """

    label: str
    folder: str
    recipe: Any
    scores: Sequence[S]
    measured: float | None = None


@dataclass(frozen=True)
class ScoreTable:
    """A table with a row per score, and the notes below it; `star` explains a star in the column `size`."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    star: str = ""


def show(value: float | None, form: str = ".2f") -> str:
    """Return a score for a table, a dash if there is none."""
    return "-" if value is None else format(value, form)


@dataclass
class Evaluation(ABC, Generic[S]):
    """The evaluation of a task's runs; the fields of a subclass are options of `graticule evaluate`, with defaults."""

    #: The meaning of a star in the column `size`.
    star: ClassVar[str] = "the training size of the run"

    def check(self, task: Any, model: Any, data: Any) -> None:
        """Check that a run can be evaluated, before any work; may change `model` according to the options.

        Raises:
            ValueError: for an invalid option.
        """

    @abstractmethod
    def scores(self, task: Any, model: Any, data: Any, *, device: str) -> list[S]:
        """Score a model, in evaluation mode; it is unchanged afterwards."""

    @abstractmethod
    def rows(self, run: Evaluated[S]) -> Iterator[dict[str, str]]:
        """Yield the rows of a run in the table: the title of each column, without the run, and its text."""

    def notes(self, evaluated: Sequence[Evaluated[S]]) -> list[str]:
        """Return sentences below the table."""
        return []

    def table(self, evaluated: Sequence[Evaluated[S]]) -> ScoreTable:
        """Return the table of several runs; a column that a row does not have is empty in it."""
        rows = [{"run": run.label, **row} for run in evaluated for row in self.rows(run)]
        columns = list(dict.fromkeys(column for row in rows for column in row))
        cells = [[row.get(column, "") for column in columns] for row in rows]
        return ScoreTable(columns, cells, self.notes(evaluated), self.star)

    def records(self, evaluated: Sequence[Evaluated[S]]) -> list[dict[str, Any]]:
        """Return each score as plain values, with its run."""
        return [{"run": run.folder, **dataclasses.asdict(score)} for run in evaluated for score in run.scores]

    def figure(self, evaluated: Sequence[Evaluated[S]]) -> Figure | None:
        """Plot the scores; None if there is nothing to plot."""
        return None


@dataclass(kw_only=True)
class SizeOptions:
    """The option of evaluations of images."""

    sizes: list[str] = field(default_factory=list)
    """for images: sides in pixels or HEIGHTxWIDTH, multiples of the patch; for detection and segmentation
    SHORTERxLONGER, any sides that images are fitted in (default: the training size)"""


@dataclass(frozen=True)
class Prediction:
    """The predictions or the ground truth of one image; all sizes are in pixels of the image in its file.

    image: uint8, (3, height, width).
    boxes: (n, 4), left, top, right, bottom; None without boxes.
    labels: the name of the class of each box, with its score; without boxes, lines of text.
    numbers: (n,), the classes of the boxes, which determine their colors.
    masks: (n, height, width), bool.
    classes: (height, width), the class of each pixel; written as a PNG.
    class_names: the names of the classes of the pixels.
    entries: written to JSON files, a list of entries by the name of the file.
    """

    image: Tensor
    boxes: Tensor | None = None
    labels: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    masks: Tensor | None = None
    classes: Tensor | None = None
    class_names: tuple[str, ...] = ()
    entries: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)


def above(prediction: Prediction, threshold: float) -> Prediction:
    """Return the prediction without the boxes whose written score is below `threshold`."""
    if prediction.boxes is None:
        return prediction
    chosen = [n for n, entry in enumerate(prediction.entries["boxes.json"]) if entry["score"] >= threshold]
    return dataclasses.replace(
        prediction,
        boxes=prediction.boxes[chosen],
        labels=[prediction.labels[n] for n in chosen],
        numbers=[prediction.numbers[n] for n in chosen],
        masks=None if prediction.masks is None else prediction.masks[chosen],
    )


def image_ids(paths: list[Path]) -> list[int]:
    """Return the ids of images: their names, if all are numbers as in COCO, otherwise 1, 2, ..."""
    names = [path.stem for path in paths]
    if all(name.isdecimal() and len(name) < 16 for name in names) and len({int(name) for name in names}) == len(names):
        return [int(name) for name in names]
    return list(range(1, len(names) + 1))
