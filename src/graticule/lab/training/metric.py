"""The metric that scores a run: its name, its unit, and whether higher is better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A score on held-out data.

    key: its name in files: val_KEY in metrics.csv, best_KEY and last_KEY in result.json.
    label: its name in tables and figures.
    unit: written after a value, "" for none.
    highest: whether the highest value is the best.
    decimals: number of decimals shown.
    """

    key: str
    label: str
    unit: str
    highest: bool
    decimals: int = 2

    @property
    def column(self) -> str:
        """Return its name in metrics.csv and in Lightning's logs."""
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
        """Return the row with the best value, the first of equal ones.

        Raises:
            ValueError: if no row has a finite value.
        """
        scored = [row for row in rows if math.isfinite(row[self.column])]
        if not scored:
            raise ValueError(
                f"no epoch has a finite {self.column}: the weights are not finite; a smaller `lr`, a longer warm-up "
                "or `clip_grad` may help."
            )
        return (max if self.highest else min)(scored, key=lambda row: row[self.column])

    def show(self, value: float, unit: bool = True) -> str:
        """Format a value, with its unit."""
        return f"{value:.{self.decimals}f}" + (f" {self.unit}" if unit and self.unit else "")


TOP1 = Metric("top1", "top-1", "%", highest=True)
BITS_PER_BYTE = Metric("bpb", "bits per byte", "", highest=False, decimals=3)
BOX_MAP = Metric("box_map", "box mAP", "%", highest=True)
MIOU = Metric("miou", "mIoU", "%", highest=True)
