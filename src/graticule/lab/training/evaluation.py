"""The evaluation of a task's runs, and the tables that `graticule evaluate` shows."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from matplotlib.figure import Figure

    from graticule.lab.training.metric import Metric

#: The scores of a run at one setting, a dataclass.
S = TypeVar("S", bound="DataclassInstance")


@dataclass(frozen=True)
class HeldOut:
    """The score of a model on the held-out data, computed as in training."""

    score: float
    loss: float
    examples: int


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
class Table:
    """A table with a row per score, and the notes below it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


@dataclass
class Evaluation(ABC, Generic[S]):
    """The evaluation of a task's runs; the fields of a subclass are options of `graticule evaluate`, with defaults."""

    def check(self, task: Any, model: Any, data: Any) -> None:
        """Check that a run can be evaluated, before any work; may change `model` according to the options.

        Raises:
            ValueError: for an invalid option.
        """

    @abstractmethod
    def scores(self, task: Any, model: Any, data: Any, *, device: str, progress: bool = True) -> list[S]:
        """Score a model, in evaluation mode; it is unchanged afterwards."""

    @abstractmethod
    def table(self, metric: Metric, evaluated: Sequence[Evaluated[S]]) -> Table:
        """Return the table of several runs."""

    def records(self, evaluated: Sequence[Evaluated[S]]) -> list[dict[str, Any]]:
        """Return each score as plain values, with its run."""
        return [{"run": run.folder, **dataclasses.asdict(score)} for run in evaluated for score in run.scores]

    def figure(self, evaluated: Sequence[Evaluated[S]]) -> Figure | None:
        """Plot the scores; None if there is nothing to plot."""
        return None


@dataclass
class HeldOutEvaluation(Evaluation[HeldOut]):
    """The evaluation on the held-out data, as in the validation of training."""

    def scores(self, task: Any, model: Any, data: Any, *, device: str, progress: bool = True) -> list[HeldOut]:
        """Score a model on the held-out data, at the size of the training."""
        from graticule.lab.training.validation import held_out

        return [HeldOut(*held_out(task, model, data, device=device, progress=progress))]

    def table(self, metric: Metric, evaluated: Sequence[Evaluated[HeldOut]]) -> Table:
        """Return score, loss and number of examples."""
        pairs = [(run, score) for run in evaluated for score in run.scores]
        return Table(
            ("run", metric.title, "loss", "examples"),
            [[run.label, metric.show(s.score, unit=False), f"{s.loss:.4g}", f"{s.examples:,}"] for run, s in pairs],
        )
