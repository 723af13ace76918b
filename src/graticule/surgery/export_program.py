"""A model to export, copies of it for other sizes, and its trace into a program that needs no Python."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from graticule.backbones.base import Backbone
from graticule.encodings.forms.mixing import MixingEncoding
from graticule.hub.kinds import HubModel
from graticule.position.places import by
from graticule.position.windows import Windows
from graticule.registry.checks import known_name
from graticule.registry.registry import NameTable
from graticule.surgery.attached import AttachedPosition
from graticule.surgery.fold import fold, unfold
from graticule.surgery.resize import resize

Size = tuple[int, ...]

#: The axes of images after the channels; the first one is of volumes alone.
_SIDES = ("depth", "height", "width")
#: Maximum number of patches on an axis of the first stage: a program is valid for all sizes up to it.
_LONGEST = 2048
#: Number of steps up to which the smallest free side is searched for.
_STEPS = 16
#: The classes that hold a model of another library, for images alone, by its name; see `ExternalModel`.
HOLDERS: NameTable[str, type[Any]] = NameTable("library", "graticule.external.exportable")


@dataclass(frozen=True)
class Exportable:
    """A model to export.

    model: a backbone, a model around one (a segmentation model, feature maps), a module with an attached position, or
        a holder of a model of another library.
    holder: the backbone in it, the attached position, or the holder itself.
    channels: channels of its images.
    size: (height, width) in pixels of the images that its position is stored for, or with a depth.
    divisor: a divisor of the sides of images, in addition to the backbone's requirements.
    """

    model: Any
    holder: Any
    channels: int
    size: Size
    divisor: int = 1

    @classmethod
    def of(cls, model: nn.Module) -> Exportable:
        """Describe a model."""
        if isinstance(model, HubModel) and model.no_program:
            raise ValueError(f"`model` must not be a {type(model).__name__}: {model.no_program}.")
        inner = model if isinstance(model, Backbone) else getattr(model, "backbone", None)
        if isinstance(inner, Backbone):
            return cls(model, inner, inner.in_chans, inner.img_size, getattr(model, "divisor", 1))
        attached = next((part for part in model.modules() if isinstance(part, AttachedPosition)), None)
        first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
        if attached is not None and first is not None and attached.patch_size is not None:
            size = tuple(side * count for side, count in zip(attached.patch_size, attached.grid.shape, strict=True))
            return cls(model, attached, first.in_channels, size)
        libraries = [kind.__module__.partition(".")[0] for kind in type(model).__mro__]
        holders = [HOLDERS[library] for library in libraries if library in HOLDERS and attached is None]
        holder: Any = holders[0](model) if holders else model
        if any(isinstance(holder, kind) for kind in HOLDERS.values()):
            return cls(holder, holder, holder.in_chans, holder.img_size)
        raise ValueError(
            f"`model` must be a backbone of images, a model with one, a model of timm or transformers, or have an "
            f"attached position that follows the size of its images, got {type(model).__name__}; to export a debiased "
            "model of these libraries, call graticule.convert before `debias`."
        )

    @property
    def is_external(self) -> bool:
        return not isinstance(self.holder, Backbone | AttachedPosition)

    def check(self, size: Any) -> None:
        """Check that the model can be resized to images of `size`."""
        self.holder.grid_at(size)
        if any(side % self.divisor for side in size):
            raise ValueError(
                f"`img_size` must have sides that are multiples of {self.divisor}, as the model's maps, got {by(size)}."
            )

    def check_free(self) -> None:
        """Check that a program of the model can accept images of other sizes."""
        if not isinstance(self.holder, AttachedPosition):
            return
        larger = [side + step for side, step in zip(self.size, self.patch, strict=True)]
        try:
            with torch.no_grad():
                self.model(torch.zeros(1, self.channels, *larger))
        except (AssertionError, RuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0][:200]
            raise ValueError(
                f"`dynamic` must be left out or 'batch' with {type(self.model).__name__}, which takes images of one "
                f"size: {reason}"
            ) from error

    @property
    def least(self) -> int:
        """Return the fewest steps of a free side: an axis of length 1 would be fixed, in any of the maps."""
        if any(side > 1 for window in self._windows for side in window):
            return 3  # one whole window in addition to the parts that a shift leaves
        if self.is_external:
            return 3  # its neck may halve the maps
        coarsest = max(getattr(self.model, "strides", (1,)))
        return max(2, coarsest // min(self.step) + 1)

    @property
    def patch(self) -> Size:
        """Return (height, width) in pixels of a patch of the first stage."""
        if not isinstance(self.holder, Backbone):
            return self.holder.patch_size or (1, 1)
        return tuple(side >> (len(self.holder.depths) - 1) for side in self.holder.coarsest_patch)

    @property
    def step(self) -> Size:
        """Return the step of free sides, (height, width) in pixels: whole windows in every stage."""
        windows = list(enumerate(reversed(self._windows)))  # from the last stage, with the coarsest patches
        coarsest = self.holder.coarsest_patch if isinstance(self.holder, Backbone) else self.patch
        return tuple(
            math.lcm(self.divisor, *((side >> halvings) * window[axis] for halvings, window in windows))
            for axis, side in enumerate(coarsest)
        )

    @property
    def _windows(self) -> list[tuple[int, ...]]:
        """Return (rows, columns) for each stage, which must divide its grid; ones for a stage without windows."""
        model = self.holder
        if not isinstance(model, Backbone):
            return [(1, 1)]
        grid = model.grid
        if grid.windows:  # which are larger at sizes of more patches than a window has
            size = getattr(model, "window_size", None) or model.windows
            many = 2 * math.lcm(*tree_leaves(size))
            grid = model.grid_at(tuple(many * side for side in model.coarsest_patch))
        windows = []
        for stage, stage_grid in enumerate(model.position_grids(grid)):
            parts = [part for places in model.block_arguments(stage, stage_grid) for part in places]
            shapes = [places.window.shape for places in parts if isinstance(places, Windows)]
            shapes += grid.windows[stage : stage + 1]
            windows.append(tuple(math.lcm(*(shape[axis] for shape in shapes)) for axis in range(len(self.size))))
        return windows

    def plain(self) -> Exportable:
        """Return a copy for inference on the CPU in float32, not folded, with only PyTorch's operators."""
        model = unfold(copy.deepcopy(self.model)).cpu().float().eval()
        for module in model.modules():
            if isinstance(module, MixingEncoding):
                module.spectral = False  # Fourier transforms are not among the operators of every runtime
        return Exportable.of(model)

    def at(self, sizes: Sizes, folded: bool = True) -> Exportable:
        """Return a copy for images of `sizes`, folded if they are fixed; this subject must be a plain one.

        A model of another library is never folded, but changed for a program of free sides.
        """
        if self.is_external:
            stored = self.size if sizes.sides else sizes.fixed
            return Exportable.of(self.holder.at(None if sizes.sides and folded else stored))
        model = copy.deepcopy(self.model)
        if sizes.sides:
            return Exportable.of(model)
        if sizes.fixed != self.size:
            size: Any = sizes.fixed
            resize(model, size)
        return Exportable.of(fold(model) if folded else model)


@dataclass(frozen=True)
class Sizes:
    """Sizes of images that a program accepts, in pixels.

    fixed: (height, width) or (depth, height, width) if the sides are not free.
    batch: whether the batch is free.
    sides: whether all sides are.
    step: of each side; free sides are multiples of it.
    least: the smallest free side, in steps.
    most: the largest free sides, in steps.
    """

    fixed: Size
    batch: bool
    sides: bool
    step: Size
    least: int
    most: Size

    @classmethod
    def of(cls, subject: Exportable, fixed: Size, free: Sequence[str]) -> Sizes:
        """Find the sizes that a model accepts with the axes `free`: 'batch' and 'sides'."""
        for name in free:
            known_name("dynamic", name, ("batch", "sides"))
        subject.check(fixed)
        step = subject.step
        most = tuple(_LONGEST * side // stride for side, stride in zip(subject.patch, step, strict=True))
        sizes = cls(fixed, "batch" in free, "sides" in free, step, subject.least, most)
        if not sizes.sides:
            return sizes
        subject.check_free()
        for least in range(sizes.least, _STEPS):  # a kernel or a reduction may need more than two patches
            smallest = replace(sizes, least=least)
            try:
                with torch.no_grad():
                    subject.model(torch.zeros(1, subject.channels, *smallest.side(*[least] * len(fixed))))
            except (ValueError, AssertionError, RuntimeError):  # models of other libraries raise the latter
                continue
            return smallest
        refused = sizes.side(*[_STEPS] * len(fixed))
        advice = "; graticule.convert turns some models into ones of any size" if subject.is_external else ""
        raise ValueError(
            f"`dynamic` must be left out or 'batch' with this model, which refuses images of {by(refused)}{advice}."
        )

    def doubled(self) -> Sizes:
        """Return sizes of twice the step."""
        step, most = tuple(2 * side for side in self.step), tuple(side // 2 for side in self.most)
        return replace(self, step=step, most=most)

    def side(self, *counts: int) -> Size:
        """Return the sides of images of these numbers of steps if they are free."""
        return tuple(count * step for count, step in zip(counts, self.step, strict=True)) if self.sides else self.fixed

    def example(self) -> tuple[int, Size]:
        """Return the batch and the sides of the images for tracing, small and all different."""
        more = (2, 1, 3)[-len(self.fixed) :]
        return 2 if self.batch else 1, self.side(*(self.least + count for count in more))

    def checked(self) -> list[tuple[int, Size]]:
        """Return the batches and sizes that a program is compared at: the fixed one, or three."""
        counts = [
            max(self.least, min(-(-side // step), most))
            for side, step, most in zip(self.fixed, self.step, self.most, strict=True)
        ]
        least = [self.least] * (len(counts) - 1)
        all_sizes = [self.side(*counts), self.side(*least, self.least + 1), self.side(counts[0] + 1, *least)]
        batches = (1, 2, 3) if self.batch else (1, 1, 1)
        return list(dict.fromkeys(zip(batches, all_sizes, strict=True)))

    def dimensions(self) -> dict[int, Any]:
        """Return the free axes in the form of `torch.export`."""
        dimensions: dict[int, Any] = {0: torch.export.Dim("batch", min=1)} if self.batch else {}
        for axis, (step, most) in enumerate(zip(self.step, self.most, strict=True), start=2):
            if self.sides:
                dimensions[axis] = step * torch.export.Dim(f"steps_{axis}", min=self.least, max=most)
        return dimensions

    def __str__(self) -> str:
        sides = [
            f"{name} {self.least * step} to {most * step} in steps of {step}" if self.sides else f"{name} {side}"
            for name, step, most, side in zip(_SIDES[-len(self.fixed) :], self.step, self.most, self.fixed, strict=True)
        ]
        return ", ".join([f"batch {'of any size' if self.batch else 1}", *sides])


class Program(nn.Module):
    """Module with the outputs of an exported model: the logits, then the maps of blocks or stages; or all maps."""

    def __init__(self, subject: Exportable, features: Sequence[int] = ()) -> None:
        super().__init__()
        self.model = subject.model
        self.subject = subject
        self.features = tuple(features)

    @property
    def names(self) -> list[str]:
        if (names := getattr(self.model, "output_names", None)) is not None:
            return list(names)
        strides = getattr(self.model, "strides", None)
        if strides is not None:
            return [f"stride_{stride}" for stride in strides]
        return ["logits", *(f"features_{index}" for index in self.features)]

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs for images (B, C, height, width)."""
        if self.features:
            tokens, maps = self.model.forward_intermediates(images, list(self.features))
            return (self.model.forward_head(tokens), *maps)
        outputs = self.model(images)
        if isinstance(outputs, Tensor):
            return (outputs,)
        return tuple(outputs.values() if isinstance(outputs, dict) else outputs)


def trace(program: Program, sizes: Sizes) -> torch.export.ExportedProgram:
    """Trace a program for images of `sizes`."""
    batch, size = sizes.example()
    images = torch.zeros(batch, program.subject.channels, *size)
    dimensions = sizes.dimensions()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                traced = torch.export.export(program, (images,), dynamic_shapes=(dimensions,))
            except Exception:
                if not (sizes.batch and program.subject.is_external):
                    raise
                dimensions[0] = torch.export.Dim.AUTO  # conditions that are not understood are checked by running
                traced = torch.export.export(program, (images,), dynamic_shapes=(dimensions,))
    except Exception as error:  # whatever a model raises
        if type(error) is ValueError:  # errors of this library already give the reason
            raise
        free = " and ".join(name for name in ("batch", "sides") if getattr(sizes, name)) or "nothing"
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(
            f"`model` must be one that torch.export can trace with {free} free, got the error: {reason[:300]}"
        ) from error
    _remove_unused(traced)
    for node in traced.graph.nodes:
        node.meta.pop("stack_trace", None)  # lines of code, and paths of this machine
    return traced


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
