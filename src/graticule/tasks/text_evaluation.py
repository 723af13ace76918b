"""The evaluation of language models at several lengths, for `graticule evaluate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graticule.training.evaluation import Evaluated, Evaluation, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from graticule.metric import Metric
    from graticule.tasks.text_scores import TextScore


@dataclass
class TextEvaluation(Evaluation["TextScore"]):
    """Bits per byte and cost at several lengths of the windows."""

    lengths: list[int] = field(default_factory=list)
    """for text: tokens per window of the held-out text (default: the training length)"""

    def check(self, task: Any, model: Any, data: Any) -> None:
        """Check the lengths."""
        from graticule.tasks.text_scores import check_lengths

        check_lengths(model, self._lengths(task), data)

    def scores(self, task: Any, model: Any, data: Any, *, device: str, progress: bool = True) -> list[TextScore]:
        """Score a model at every length."""
        from graticule.tasks.text_scores import evaluate_text

        return evaluate_text(model, data, self._lengths(task), device=device, progress=progress)

    def table(self, metric: Metric, evaluated: Sequence[Evaluated[TextScore]]) -> Table:
        """Return a row for each run and length, with the difference from the training length."""
        rows, records = [], []
        for run in evaluated:
            trained = run.recipe.context
            same = (score.bits_per_byte for score in run.scores if score.length == trained)
            reference = next(same, run.measured)
            for score in run.scores:
                mark = " *" if score.length == trained else " ~" if score.resampled else ""
                rows.append(
                    [
                        run.label,
                        f"{score.length}{mark}",
                        metric.show(score.bits_per_byte, unit=False),
                        "-" if reference is None else f"{score.bits_per_byte - reference:+.{metric.decimals}f}",
                        f"{score.loss:.3f}",
                        f"{score.tokens:,}",
                        f"{score.tokens_per_second:,.0f}",
                        f"{score.memory / 1e3:.1f}",
                    ]
                )
                records.append({"run": run.folder, **dataclasses.asdict(score)})
        notes = ["* the training length of the run; speed and peak memory are of the forward pass only"]
        if any(record["resampled"] for record in records):
            notes.append("~ longer than the learned position table of the run, which was resampled to the length")
        columns = ("run", "length", "bits/byte", "against *", "nats/token", "tokens", "tokens/s", "kB/token")
        return Table(columns, rows, notes, records)

    def figure(self, evaluated: Sequence[Evaluated[TextScore]]) -> Figure:
        """Plot bits per byte against length, and against the position in the longest windows."""
        from graticule.analysis import length_plot

        curves = {run.label: {score.length: [score.bits_per_byte] for score in run.scores} for run in evaluated}
        longest = {run.label: max(run.scores, key=lambda score: score.length) for run in evaluated}
        places = {label: {last: [bits] for _, last, bits in score.by_place} for label, score in longest.items()}
        return length_plot(curves, places, [run.recipe.context for run in evaluated])

    def _lengths(self, task: Any) -> list[int]:
        return self.lengths or [task.recipe.context]
