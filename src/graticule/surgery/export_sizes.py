"""Sizes of images that an exported program accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graticule.surgery.export_subject import Size, Subject

#: Axes that can be free in a program, in the order of the axes of images (B, C, height, width).
AXES = ("batch", "height", "width")
#: Maximum number of patches on an axis of the first stage: a program is valid for all sizes up to it.
_LONGEST = 2048
#: Number of steps up to which the smallest free side is searched for.
_STEPS = 16


@dataclass(frozen=True)
class Sizes:
    """Sizes of images that a program accepts, in pixels.

    fixed: (height, width) of the axes that are not free.
    free: which of `AXES` are free.
    step: (height, width); free sides are multiples of it.
    least: the smallest free side, in steps.
    most: (height, width), the largest free sides, in steps.
    """

    fixed: Size
    free: frozenset[str]
    step: Size
    least: int
    most: Size

    @classmethod
    def of(cls, subject: Subject, fixed: Size, free: Sequence[str]) -> Sizes:
        """Find the sizes that a model accepts with the axes `free`.

        Raises:
            ValueError: if it does not accept `fixed`, or `free` has anything other than axes.
        """
        for name in free:
            if name not in AXES:
                raise ValueError(f"`dynamic` must be any of {', '.join(AXES)}, got {name!r}.")
        subject.check(fixed)
        step, patch = subject.step, subject.patch
        if set(free) - {"batch"}:
            subject.check_free()
        rows, columns = (_LONGEST * side // one for side, one in zip(patch, step, strict=True))
        sizes = cls(fixed, frozenset(free), step, subject.least, (rows, columns))
        return sizes._from_least(subject) if sizes.free - {"batch"} else sizes

    def _from_least(self, subject: Subject) -> Sizes:
        """Find the smallest free side: a kernel or a reduction may need more than two patches."""
        for least in range(self.least, _STEPS):
            found = Sizes(self.fixed, self.free, self.step, least, self.most)
            try:
                with torch.no_grad():
                    subject.model(torch.zeros(1, subject.channels, *found.side(least, least)))
            except (ValueError, AssertionError):  # timm's models raise the latter
                continue
            return found
        raise ValueError(f"`dynamic` must be 'batch' alone: the model refuses images of {self.side(_STEPS, _STEPS)}.")

    def side(self, rows: int, columns: int) -> Size:
        """Return (height, width): the given number of steps on free axes, else the fixed side."""
        height, width = (
            count * step if name in self.free else fixed
            for name, count, step, fixed in zip(AXES[1:], (rows, columns), self.step, self.fixed, strict=True)
        )
        return height, width

    def example(self) -> tuple[int, Size]:
        """Return the batch and (height, width) of the images for tracing, small and all different."""
        return 2 if "batch" in self.free else 1, self.side(self.least + 1, self.least + 3)

    def checked(self) -> list[tuple[int, Size]]:
        """Return the batches and sizes that a program is compared at: the fixed one, or three."""
        rows, columns = (
            max(self.least, min(-(-side // step), most))
            for side, step, most in zip(self.fixed, self.step, self.most, strict=True)
        )
        all_sizes = [self.side(rows, columns), self.side(self.least, self.least + 1), self.side(rows + 1, self.least)]
        batches = (1, 2, 3) if "batch" in self.free else (1, 1, 1)
        return list(dict.fromkeys(zip(batches, all_sizes, strict=True)))

    def dimensions(self) -> dict[int, Any]:
        """Return the free axes in the form of `torch.export`."""
        found: dict[int, Any] = {}
        if "batch" in self.free:
            found[0] = torch.export.Dim("batch", min=1)
        for axis, (name, step, most) in enumerate(zip(AXES[1:], self.step, self.most, strict=True), start=2):
            if name in self.free:
                found[axis] = step * torch.export.Dim(f"{name}_steps", min=self.least, max=most)
        return found

    def __str__(self) -> str:
        sides = [
            f"{name} {self.least * step} to {most * step} in steps of {step}" if name in self.free else f"{name} {side}"
            for name, step, most, side in zip(AXES[1:], self.step, self.most, self.fixed, strict=True)
        ]
        return ", ".join([f"batch {'of any size' if 'batch' in self.free else 1}", *sides])
