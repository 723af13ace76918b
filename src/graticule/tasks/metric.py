"""What a run is judged by: the name of the number, its unit, and which way is better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A number that held-out data give.

    key: as in files: val_KEY in metrics.csv, best_KEY and last_KEY in result.json.
    label: as in tables and pictures.
    unit: behind a value, "" for none.
    highest: whether the highest value is the best.
    decimals: how many are shown.
    """

    key: str
    label: str
    unit: str
    highest: bool
    decimals: int = 2

    @property
    def column(self) -> str:
        """Its name in metrics.csv and in what Lightning logs."""
        return f"val_{self.key}"

    @property
    def title(self) -> str:
        """Label and unit, for the head of a column or an axis."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    @property
    def worst(self) -> float:
        """What every value is better than."""
        return -math.inf if self.highest else math.inf

    def better(self, value: float, other: float) -> bool:
        """Whether `value` is better than `other`; what is no number never is."""
        return value > other if self.highest else value < other

    def best(self, rows: Iterable[Mapping[str, float]]) -> Mapping[str, float]:
        """Return the row whose value is the best, the first of equals.

        Raises:
            ValueError: if no row has a value that is a number.
        """
        scored = [row for row in rows if math.isfinite(row[self.column])]
        if not scored:
            raise ValueError(
                f"no epoch has a finite {self.column}: the weights are no numbers; a smaller `lr`, a longer warm-up or "
                "`clip_grad` may help."
            )
        return (max if self.highest else min)(scored, key=lambda row: row[self.column])

    def show(self, value: float, unit: bool = True) -> str:
        """Write a value, with its unit."""
        return f"{value:.{self.decimals}f}" + (f" {self.unit}" if unit and self.unit else "")


TOP1 = Metric("top1", "top-1", "%", highest=True)
BITS_PER_BYTE = Metric("bpb", "bits per byte", "", highest=False, decimals=3)
#: All there are.
METRICS = (TOP1, BITS_PER_BYTE)
