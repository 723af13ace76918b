"""Bits per byte at lengths other than the training lengths of the runs of a comparison, with error bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure

from graticule.lab.figures.save import save_figures
from graticule.lab.figures.scores import length_plot
from graticule.lab.studies.comparison import Comparison
from graticule.lab.studies.tables import Rows, difference_note, difference_rows, markdown, spread_rows
from graticule.lab.tasks.language import tokenizer_of
from graticule.lab.tasks.parts.text_scores import check_lengths, evaluate_text
from graticule.lab.terminal import bar as progress_bar
from graticule.lab.training.metric import BITS_PER_BYTE
from graticule.lab.training.validation import in_precision
from graticule.system.files import write_json, write_text


@dataclass(frozen=True)
class Lengths:
    """Bits per byte of every choice at every length, in tokens: `scores[choice][length][i]` is that of `seeds[i]`.

    The weights are those of the last epoch, as in the comparison.

    trained_at: choice -> its training length.
    num_bytes: choice -> the held-out text of its training, in bytes.
    resampled: choice -> the lengths that its table was resampled to.
    places: choice -> last position of a range in the longest windows -> values over seeds (`TextScore.by_place`).
    """

    seeds: tuple[int, ...]
    trained_at: dict[str, int]
    num_bytes: dict[str, int]
    scores: dict[str, dict[int, list[float]]]
    resampled: dict[str, list[int]]
    places: dict[str, dict[int, list[float]]]

    @property
    def lengths(self) -> list[int]:
        """Lengths of the windows, in tokens."""
        return list(next(iter(self.scores.values())))

    def rows(self) -> Rows:
        """Return a header, then one row per choice: mean and deviation at each length, marked as in `legend`."""
        return spread_rows(self.scores, str, BITS_PER_BYTE.decimals, self._mark)

    def differences(self) -> Rows:
        """Return a header, then one row per choice: mean difference against the first at each length, p, adjusted p."""
        return difference_rows(self.scores, str, BITS_PER_BYTE.decimals)

    def legend(self) -> str:
        """Explain the marks in `rows`, and say whether the choices were scored on the same text."""
        said = ["bits per byte, the lower the better; marked * at the length that the choice was trained at"]
        if any(self.resampled.values()):
            said.append(", ~ where its table was resampled to the length")
        if len(set(self.num_bytes.values())) > 1:
            said.append("; not to be compared: limit_test is in windows of a choice's own tokens, so the text differs")
        return "".join(said)

    def note(self) -> str:
        """Describe the number of tests in `differences` and the adjustment of their p values."""
        return difference_note(self.scores)

    def markdown(self) -> str:
        """Return both tables in Markdown; the second only if there is something to compare."""
        if len(self.scores) == 1:
            return f"{markdown(self.rows())}\n\n{self.legend()}"
        tables = markdown(self.rows(), self.differences())
        return f"{tables}\n\n{self.note()}\n\n{self.legend()}"

    def figure(self, title: str = "") -> Figure:
        """Draw bits per byte against length, and against the position in the longest windows."""
        return length_plot(self.scores, self.places, list(self.trained_at.values()), title)

    def write(self, folder: Path) -> list[Path]:
        """Write `lengths.md`, `.json` and `.png` in `folder`; returns the paths."""
        values = {
            "seeds": list(self.seeds),
            "trained_at": self.trained_at,
            "num_bytes": self.num_bytes,
            BITS_PER_BYTE.key: self.scores,
            "resampled": self.resampled,
            "by_place": self.places,
        }
        return [
            write_text(folder / "lengths.md", self.markdown() + "\n"),
            write_json(folder / "lengths.json", values),
            *save_figures(self.figure(), folder / "lengths"),
        ]

    def _mark(self, choice: str, length: int) -> str:
        return " *" if length == self.trained_at[choice] else " ~" if length in self.resampled[choice] else ""


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
    data = {choice: runs[0].data() for choice, runs in comparison.runs.items()}  # each has its own tokenizer
    for choice, runs in comparison.runs.items():
        check_lengths(runs[0].model(data[choice], "last"), lengths, data[choice])
    found = Lengths(
        comparison.seeds,
        {choice: runs[0].recipe().context for choice, runs in comparison.runs.items()},
        {choice: one.num_bytes("test") for choice, one in data.items()},
        {choice: {length: [] for length in lengths} for choice in data},
        {choice: [] for choice in data},
        {choice: {} for choice in data},
    )
    bar = progress_bar(total=sum(map(len, comparison.runs.values())), unit="run", wanted=progress)
    for choice, runs in comparison.runs.items():
        bar.set_description(choice, refresh=False)
        for run in runs:
            # if the text changed between two runs, their tokens differ
            same = tokenizer_of(run).fingerprint == data[choice].info.vocabulary
            held_out = data[choice] if same else run.data()
            model = in_precision(run.model(held_out, "last"), run.recipe().precision, device)
            scores = evaluate_text(model, held_out, lengths, device=device, progress=False)
            for score in scores:
                found.scores[choice][score.length].append(score.bits_per_byte)
            found.resampled[choice][:] = [score.length for score in scores if score.resampled]
            for _, last, bits in max(scores, key=lambda score: score.length).by_place:
                found.places[choice].setdefault(last, []).append(bits)
            bar.update()
    bar.close()
    return found
