"""Test images that the runs of a study classify correctly, and intervals over seeds and images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from graticule.lab.studies.tables import csv_of_records, read_records
from graticule.lab.training.run import Run
from graticule.system.files import write_text


@dataclass(frozen=True)
class Correct:
    """Which test images a run classifies correctly.

    images: their number.
    bits: a bit per image, in hexadecimal.
    """

    choice: str
    variant: str
    seed: int
    images: int
    bits: str

    @classmethod
    def of_run(cls, choice: str, variant: str, run: Run) -> Correct:
        """Evaluate the last weights of a run of classification."""
        data = run.data()
        model = run.model(data, "last").eval()
        with torch.inference_mode():
            correct_batches = [model(images).argmax(-1) == labels for images, labels in data.eval_dataloader(data.size)]
        correct = torch.cat(correct_batches).numpy()
        return cls(choice, variant, run.recipe().seed, len(correct), np.packbits(correct).tobytes().hex())

    @cached_property
    def values(self) -> np.ndarray:
        """100 for each correct image, otherwise 0."""
        packed = np.frombuffer(bytes.fromhex(self.bits), np.uint8)
        return 100.0 * np.unpackbits(packed, count=self.images)


def read_images(table: Path) -> list[Correct]:
    """Read which images the runs of a table classify correctly; an absent file has none."""
    return read_records(table.with_name(f"{table.stem}_images.csv"), Correct)


def write_images(table: Path, images: Iterable[Correct]) -> Path:
    """Write which images the runs of a table classify correctly; returns the file."""
    return write_text(table.with_name(f"{table.stem}_images.csv"), csv_of_records(Correct, images))


def crossed_interval(differences: Sequence[np.ndarray]) -> tuple[float, float]:
    r"""Return the 95 % interval of the mean of differences, (images,) per seed, over other seeds and other images.

    .. math:: d_{si} = \mu + a_s + b_i + e_{si}, \qquad
        \widehat{\mathrm{Var}}(\bar d) = \frac{M_s + M_i - M_e}{S I}

    with the mean squares of S seeds, I images and the rest; the degrees of freedom are those of Satterthwaite. A paired
    test over seeds has :math:`M_s / (S I)`, which is for these images: averages over seeds of single images do not
    make it smaller.

    Reference: An Approximate Distribution of Estimates of Variance Components (Satterthwaite, 1946).
    """
    d = np.stack(list(differences))
    seeds, images = d.shape
    rows, columns, mean = d.mean(1, keepdims=True), d.mean(0, keepdims=True), d.mean()
    of_seeds = images * rows.var(ddof=1)
    of_images = seeds * columns.var(ddof=1)
    of_rest = ((d - rows - columns + mean) ** 2).sum() / ((seeds - 1) * (images - 1))
    # without any variance of seeds or images the estimate can be below that of the rest alone
    total = max(of_seeds + of_images - of_rest, of_seeds, of_images)
    squares = of_seeds**2 / (seeds - 1) + of_images**2 / (images - 1) + of_rest**2 / ((seeds - 1) * (images - 1))
    freedom = max(total**2 / squares, seeds - 1.0) if squares else seeds - 1.0
    half = stats.t.isf(0.025, freedom) * (total / (seeds * images)) ** 0.5
    return float(mean - half), float(mean + half)
