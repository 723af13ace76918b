"""Trace a model into a program that needs no Python."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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


class Program(nn.Module):
    """Module with the outputs of an exported model: the logits, then the maps of chosen blocks; or all maps.

    Args:
        subject: a model in evaluation mode.
        features: indices of blocks, or of stages if there are several.
    """

    def __init__(self, subject: Subject, features: Sequence[int] = ()) -> None:
        super().__init__()
        self.model = subject.model
        self.subject = subject
        self.features = tuple(features)

    @property
    def names(self) -> list[str]:
        """Return the names of the outputs."""
        return self.subject.names(self.features)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs for images (B, C, height, width)."""
        return self.subject.outputs(images, self.features)


def prepared(subject: Subject, sizes: Sizes, folded: bool = True) -> Subject:
    """Return a copy of a plain model for images of `sizes`, folded if height and width are fixed."""
    if sizes.free - {"batch"}:
        return Subject.of(copy.deepcopy(subject.model))
    return subject.at(sizes.fixed, folded)


def trace(program: Program, sizes: Sizes) -> torch.export.ExportedProgram:
    """Trace a program for images of `sizes`.

    Raises:
        ValueError: if it cannot be traced, with the reason.
    """
    batch, size = sizes.example()
    images = torch.zeros(batch, program.subject.channels, *size)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.export.export(program, (images,), dynamic_shapes=({**sizes.dimensions()},))
    except ValueError as error:
        if type(error) is ValueError:  # errors of this library already give the reason
            raise
        raise _refusal(sizes, error) from error
    except (RuntimeError, TypeError, AssertionError) as error:
        raise _refusal(sizes, error) from error
    _remove_unused(traced)
    for node in traced.graph.nodes:
        node.meta.pop("stack_trace", None)  # lines of code, and paths of this machine
    return traced


def _refusal(sizes: Sizes, error: Exception) -> ValueError:
    free = ", ".join(sorted(sizes.free)) or "nothing"
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ValueError(f"`model` must be one that torch.export can trace with {free} free, got the error: {said[:300]}")


def _remove_unused(traced: torch.export.ExportedProgram) -> None:
    """Remove the tensors that no operator uses, such as tables and norms that folding has replaced by constants."""
    signature = traced.graph_signature
    kinds = (torch.export.graph_signature.InputKind.PARAMETER, torch.export.graph_signature.InputKind.BUFFER)
    nodes = {node.name: node for node in traced.graph.nodes if node.op == "placeholder"}
    unused = [s for s in signature.input_specs if s.kind in kinds and not nodes[s.arg.name].users]
    for spec in unused:
        traced.graph.erase_node(nodes[spec.arg.name])
        signature.input_specs.remove(spec)
        traced.state_dict.pop(spec.target, None)
        traced.constants.pop(spec.target, None)
    traced.graph_module.recompile()
