"""Progress bar of an audit, in forward passes of one image at the size of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from graticule.analysis.view import ModelView, Pass, Size
from graticule.progress import bar as progress_bar

T = TypeVar("T")


class AuditBar:
    """Runs views and shows the progress over all of them, in passes of one image at the size of the model."""

    def __init__(self, passes: int, others: Mapping[Size, int], size: Size, shown: bool) -> None:
        self.size = size
        total = passes + sum(count * self._cost(other) for other, count in others.items())
        self.bar = progress_bar(total=round(total), unit="img", wanted=shown)

    def run(self, name: str, view: ModelView, images: Tensor, edit: Callable[..., Tensor] | None = None) -> Pass:
        """Run a view."""
        self.bar.set_description(name, refresh=False)
        found = view.run(images, edit)
        self.bar.update(round(len(images) * self._cost((images.shape[-2], images.shape[-1]))))
        return found

    def step(self, name: str, passes: int, work: Callable[[], T]) -> T:
        """Run `work`, which costs about `passes` passes."""
        self.bar.set_description(name)
        found = work()
        self.bar.update(passes)
        return found

    def close(self) -> None:
        """Close the bar."""
        self.bar.close()

    def _cost(self, size: Size) -> float:
        return size[0] * size[1] / (self.size[0] * self.size[1])
