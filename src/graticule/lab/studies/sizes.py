"""Scores of the runs of a comparison at sizes or lengths other than those of their training, with error bars."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Generic, TypeVar

import torch
from matplotlib.figure import Figure
from torch import nn

from graticule.lab.figures.save import save_figures
from graticule.lab.figures.scores import length_plot, resolution_plot
from graticule.lab.studies.comparison import Comparison, supported_decimals
from graticule.lab.studies.significance import Outcome, format_p, holm_note, paired_outcomes, spread
from graticule.lab.studies.tables import Rows, markdown, size_text
from graticule.lab.tasks.language import check_lengths, evaluate_text
from graticule.lab.tasks.parts.image_scores import Mode, check_crop, check_sizes, evaluate
from graticule.lab.terminal import bar as progress_bar
from graticule.lab.training.results import BITS_PER_BYTE, TOP1
from graticule.lab.training.run import Run
from graticule.lab.training.validation import in_precision
from graticule.system.files import write_json, write_text

Size = tuple[int, int]
Condition = TypeVar("Condition")


@dataclass(frozen=True)
class _Scores(ABC, Generic[Condition]):
    """Scores of every choice under every condition: `scores[choice][condition][i]` is that of `seeds[i]`.

    The weights are those of the last epoch, as in the comparison.
    """

    seeds: tuple[int, ...]
    scores: dict[str, dict[Condition, list[float]]]

    #: Name of the files.
    file: ClassVar[str]

    @property
    @abstractmethod
    def decimals(self) -> int:
        """Return the number of decimals of a mean."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Return a title of the table."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return the scores as plain values."""

    @abstractmethod
    def figure(self, title: str = "") -> Figure:
        """Draw the scores against the conditions, with bars of one standard deviation."""

    def name(self, condition: Condition) -> str:
        """Return the header of a condition."""
        return str(condition)

    def mark(self, choice: str, condition: Condition) -> str:
        """Return the suffix of the values of a choice under a condition."""
        return ""

    def legend(self) -> str:
        """Explain the marks; empty without marks."""
        return ""

    def remark(self) -> str:
        """Return a sentence on the scores; empty for none."""
        return ""

    def rows(self) -> Rows:
        """Return a header, then one row per choice: mean and standard deviation over seeds under each condition."""
        rows: Rows = [("choice", *self._names)]
        for choice, by in self.scores.items():
            cells = [spread(values, self.decimals) + self.mark(choice, at) for at, values in by.items()]
            rows.append((choice, *cells))
        return rows

    def differences(self) -> Rows:
        """Return a header, then one row per choice: mean difference against the first and p, then p adjusted.

        p is that of a paired t-test over seeds, and then adjusted by Holm's method for all tests of the table.
        """
        first, *_ = self.scores.values()
        outcomes = iter(self._outcomes())
        rows: Rows = [("against the first", *self._names)]
        for choice, by in list(self.scores.items())[1:]:
            cells = []
            for at, reference in first.items():
                one, difference = next(outcomes), fmean(by[at]) - fmean(reference)
                cells.append(f"{difference:+.{self.decimals}f} (p {format_p(one.p)}; {format_p(one.adjusted)})")
            rows.append((choice, *cells))
        return rows

    def note(self) -> str:
        """Describe the number of tests in `differences` and the adjustment of their p values."""
        return holm_note(sum(one.test is not None for one in self._outcomes()))

    def markdown(self) -> str:
        """Return both tables in Markdown; the second only if there is something to compare."""
        if len(self.scores) == 1:
            said = [markdown(self.rows())]
        else:
            said = [markdown(self.rows(), self.differences()), self.note()]
        return "\n\n".join(filter(None, [*said, self.legend(), self.remark()]))

    def write(self, folder: Path) -> list[Path]:
        """Write a table in Markdown, the values as JSON and the figure in `folder`; returns the paths."""
        return [
            write_text(folder / f"{self.file}.md", self.markdown() + "\n"),
            write_json(folder / f"{self.file}.json", self.record()),
            *save_figures(self.figure(), folder / self.file),
        ]

    @property
    def _names(self) -> list[str]:
        return [self.name(condition) for condition in next(iter(self.scores.values()))]

    def _outcomes(self) -> list[Outcome]:
        """Test every choice but the first under every condition, row by row."""
        first, *others = self.scores.values()
        return paired_outcomes([(by[at], reference) for by in others for at, reference in first.items()])


@dataclass(frozen=True)
class Resolutions(_Scores[Size]):
    """Top-1 of every choice at every size, (height, width) in pixels, in percent.

    images: number of test images.
    mode: how images are changed to another size: zoom, canvas or crop (`graticule.lab.tasks.evaluate`).
    unplaced: the choices whose crops had the position of a whole image, since their encodings cannot encode a crop.
    """

    trained_at: Size
    images: int
    mode: Mode = "zoom"
    unplaced: tuple[str, ...] = ()

    file = "resolutions"

    @property
    def decimals(self) -> int:
        """Return the number of decimals of a mean that the number of images and seeds supports."""
        return supported_decimals(TOP1, self.images, len(self.seeds))

    @property
    def title(self) -> str:
        """Return a title of the table."""
        return f"top-1 (%) at other sizes ({self.mode}), mean and standard deviation"

    def name(self, condition: Size) -> str:
        """Return the header of a size."""
        return size_text(condition) + (" (trained)" if condition == self.trained_at else "")

    def remark(self) -> str:
        """Name the choices whose crops had the position of a whole image."""
        if not self.unplaced:
            return ""
        return f"With the position of a whole image, since they cannot encode a crop: {', '.join(self.unplaced)}."

    def record(self) -> dict[str, Any]:
        """Return the scores as plain values."""
        records = {name: {size_text(size): values for size, values in by.items()} for name, by in self.scores.items()}
        return {"seeds": list(self.seeds), "mode": self.mode, "top1": records}

    def figure(self, title: str = "") -> Figure:
        """Draw accuracy against size, with bars of one standard deviation."""
        return resolution_plot(self.scores, trained_at=self.trained_at, title=title)


@dataclass(frozen=True)
class Lengths(_Scores[int]):
    """Bits per byte of every choice at every length, in tokens.

    trained_at: choice -> its training length.
    num_bytes: choice -> the held-out text of its training, in bytes.
    resampled: choice -> the lengths that its table was resampled to.
    places: choice -> last position of a range in the longest windows -> values over seeds (`TextScore.by_place`).
    """

    trained_at: dict[str, int]
    num_bytes: dict[str, int]
    resampled: dict[str, list[int]]
    places: dict[str, dict[int, list[float]]]

    file = "lengths"
    decimals = BITS_PER_BYTE.decimals
    title = "bits per byte at other lengths, mean and standard deviation"

    def mark(self, choice: str, condition: int) -> str:
        """Mark the training length and the lengths that a table was resampled to."""
        return " *" if condition == self.trained_at[choice] else " ~" if condition in self.resampled[choice] else ""

    def legend(self) -> str:
        """Explain the marks in `rows`, and say whether the choices were scored on the same text."""
        said = ["bits per byte, the lower the better; marked * at the length that the choice was trained at"]
        if any(self.resampled.values()):
            said.append(", ~ where its table was resampled to the length")
        if len(set(self.num_bytes.values())) > 1:
            said.append("; not to be compared: limit_test is in windows of a choice's own tokens, so the text differs")
        return "".join(said)

    def record(self) -> dict[str, Any]:
        """Return the scores as plain values."""
        return {
            "seeds": list(self.seeds),
            "trained_at": self.trained_at,
            "num_bytes": self.num_bytes,
            BITS_PER_BYTE.key: self.scores,
            "resampled": self.resampled,
            "by_place": self.places,
        }

    def figure(self, title: str = "") -> Figure:
        """Draw bits per byte against length, and against the position in the longest windows."""
        return length_plot(self.scores, self.places, list(self.trained_at.values()), title)


def resolutions(
    comparison: Comparison,
    sizes: Sequence[Size],
    *,
    device: torch.device | str = "cpu",
    progress: bool = True,
    mode: Mode = "zoom",
) -> Resolutions:
    """Evaluate the last weights of every run of `comparison` at `sizes` = (height, width), in pixels.

    With `mode` zoom the images are scaled to each size; with canvas they keep their scale, with more room around them;
    with crop they also keep it, and only their center is used.

    Raises:
        ValueError: before any work, for no size, duplicates, or a size that a model cannot take.
    """
    sizes = list(sizes)
    if not sizes or len(set(sizes)) < len(sizes):
        raise ValueError(f"`sizes` must be different sizes, at least one, got {sizes}.")
    first = next(iter(comparison.runs.values()))[0]
    data = first.data()
    for runs in comparison.runs.values():
        check_sizes(runs[0].model(data, "last"), sizes)
    for size in sizes if mode == "crop" else ():
        check_crop(size, data.size)
    scores: dict[str, dict[Size, list[float]]] = {choice: {size: [] for size in sizes} for choice in comparison.runs}
    unplaced: dict[str, None] = {}
    for choice, _, model in _last_models(comparison, lambda choice, run: data, device, progress):
        for score in evaluate(model, data, sizes, device=device, progress=False, mode=mode, measure_cost=False):
            scores[choice][score.size].append(score.top1)
            if score.placed is False:
                unplaced[choice] = None
    trained_at = first.recipe().img_size
    return Resolutions(comparison.seeds, scores, trained_at, data.num_test, mode, tuple(unplaced))


def lengths(
    comparison: Comparison, lengths: Sequence[int], *, device: torch.device | str = "cpu", progress: bool = True
) -> Lengths:
    """Evaluate the last weights of every run of `comparison` in windows of `lengths`, in tokens.

    Raises:
        ValueError: before any work, for runs that are not on text, no length, duplicates, or an impossible length.
    """
    lengths = list(lengths)
    if comparison.metric != BITS_PER_BYTE:
        raise ValueError(f"`comparison` must be of runs on text, got one that is judged by {comparison.metric.label}.")
    data = {choice: runs[0].data() for choice, runs in comparison.runs.items()}
    for choice, runs in comparison.runs.items():
        check_lengths(runs[0].model(data[choice], "last"), lengths, data[choice])
    found = Lengths(
        comparison.seeds,
        {choice: {length: [] for length in lengths} for choice in data},
        {choice: runs[0].recipe().context for choice, runs in comparison.runs.items()},
        {choice: one.num_bytes("test") for choice, one in data.items()},
        {choice: [] for choice in data},
        {choice: {} for choice in data},
    )

    for choice, held_out, model in _last_models(comparison, lambda choice, run: data[choice], device, progress):
        scores = evaluate_text(model, held_out, lengths, device=device, progress=False)
        for score in scores:
            found.scores[choice][score.length].append(score.bits_per_byte)
        found.resampled[choice][:] = [score.length for score in scores if score.resampled]
        for _, last, bits in max(scores, key=lambda score: score.length).by_place:
            found.places[choice].setdefault(last, []).append(bits)
    return found


def _last_models(
    comparison: Comparison, data_of: Callable[[str, Run], Any], device: torch.device | str, progress: bool
) -> Iterator[tuple[str, Any, nn.Module]]:
    """Yield the choice, the data and the model with the last weights of every run, and show the progress."""
    runs: Mapping[str, Sequence[Run]] = comparison.runs
    bar = progress_bar(total=sum(map(len, runs.values())), unit="run", wanted=progress)
    for choice, members in runs.items():
        bar.set_description(choice, refresh=False)
        for run in members:
            data = data_of(choice, run)
            yield choice, data, in_precision(run.model(data, "last"), run.recipe().precision, device)
            bar.update()
    bar.close()
