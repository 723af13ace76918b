"""Accuracy at sizes other than the training size of the runs of a comparison, with error bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure

from graticule.lab.figures.save import save_figures
from graticule.lab.figures.scores import resolution_plot
from graticule.lab.studies.comparison import Comparison, supported_decimals
from graticule.lab.studies.tables import Rows, difference_note, difference_rows, markdown, spread_rows
from graticule.lab.tasks.parts.image_causes import check_crop
from graticule.lab.tasks.parts.image_scores import Mode, check_sizes, evaluate
from graticule.lab.terminal import bar as progress_bar
from graticule.lab.training.metric import TOP1
from graticule.lab.training.validation import in_precision
from graticule.system.files import write_json, write_text

Size = tuple[int, int]


@dataclass(frozen=True)
class Resolutions:
    """Top-1 of every choice at every size, in percent: `scores[choice][size][i]` is that of `seeds[i]`.

    The weights are those of the last epoch, as in the comparison.

    images: number of test images.
    mode: how images are changed to another size: zoom, canvas or crop (`graticule.lab.tasks.evaluate`).
    unplaced: the choices whose crops had the position of a whole image, since their encodings cannot encode a crop.
    """

    seeds: tuple[int, ...]
    trained_at: Size
    scores: dict[str, dict[Size, list[float]]]
    images: int
    mode: Mode = "zoom"
    unplaced: tuple[str, ...] = ()

    @property
    def decimals(self) -> int:
        """Return the number of decimals of a mean that the number of images and seeds supports."""
        return supported_decimals(TOP1, self.images, len(self.seeds))

    @property
    def sizes(self) -> list[Size]:
        """(height, width) of the test images, in pixels."""
        return list(next(iter(self.scores.values())))

    def rows(self) -> Rows:
        """Return a header, then one row per choice: mean and standard deviation at each size."""
        return spread_rows(self.scores, self._name, self.decimals)

    def differences(self) -> Rows:
        """Return a header, then one row per choice: mean difference against the first at each size, p, adjusted p."""
        return difference_rows(self.scores, self._name, self.decimals)

    def note(self) -> str:
        """Describe the number of tests in `differences` and the adjustment of their p values."""
        return difference_note(self.scores)

    def markdown(self) -> str:
        """Return both tables in Markdown; the second only if there is something to compare."""
        said = [self.unplaced_note()] if self.unplaced else []
        if len(self.scores) == 1:
            return "\n\n".join([markdown(self.rows()), *said])
        return "\n\n".join([markdown(self.rows(), self.differences()), self.note(), *said])

    def unplaced_note(self) -> str:
        """Name the choices whose crops had the position of a whole image."""
        return f"With the position of a whole image, since they cannot encode a crop: {', '.join(self.unplaced)}."

    def figure(self, title: str = "") -> Figure:
        """Draw accuracy against size, with bars of one standard deviation."""
        return resolution_plot(self.scores, trained_at=self.trained_at, title=title)

    def write(self, folder: Path) -> list[Path]:
        """Write `resolutions.md`, `.json`, `.png`, `.pdf` and `.svg` in `folder`; returns the paths."""
        records = {name: {_text(size): values for size, values in by.items()} for name, by in self.scores.items()}
        return [
            write_text(folder / "resolutions.md", self.markdown() + "\n"),
            write_json(folder / "resolutions.json", {"seeds": list(self.seeds), "mode": self.mode, "top1": records}),
            *save_figures(self.figure(), folder / "resolutions"),
        ]

    def _name(self, size: Size) -> str:
        return _text(size) + (" (trained)" if size == self.trained_at else "")


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
    scores: dict[str, dict[Size, list[float]]] = {}
    unplaced: dict[str, None] = {}
    bar = progress_bar(total=sum(map(len, comparison.runs.values())), unit="run", wanted=progress)
    for name, runs in comparison.runs.items():
        scores[name] = {size: [] for size in sizes}
        bar.set_description(name, refresh=False)
        for run in runs:
            model = in_precision(run.model(data, "last"), run.recipe().precision, device)
            for score in evaluate(model, data, sizes, device=device, progress=False, mode=mode, measure_cost=False):
                scores[name][score.size].append(score.top1)
                if score.placed is False:
                    unplaced[name] = None
            bar.update()
    bar.close()
    return Resolutions(comparison.seeds, first.recipe().img_size, scores, data.num_test, mode, tuple(unplaced))


def _text(size: Size) -> str:
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"
