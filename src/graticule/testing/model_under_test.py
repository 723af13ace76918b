"""The subject of the checks: a copy of a model with random weights, its patches, position tables and other sizes."""

from __future__ import annotations

import copy
import math
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.external.images import (
    by_image,
    call,
    error_line,
    image_channels,
    image_size,
    own_patch_size,
    pair,
    set_input_size,
)
from graticule.external.recorder import Recording, record
from graticule.external.structure import added_tensors, find_structure
from graticule.position.places import by

Size = tuple[int, int]
#: Tolerance of outputs in float64, relative to the largest; float32 buffers of a model are not exact.
SAME = 1e-5
EXACT = 1e-11
#: Pixels of all images of a search that changes each patch separately, at most.
_PIXELS = 1 << 24
#: Patches of a small grid, at most, without windows and with them: each is changed before each attention.
_SMALL = 32, 512


class NotApplicable(Exception):
    """A check does not apply to this model; the message says why."""


class Failed(AssertionError):
    """A law does not hold; the message names the law and the failure."""


def refusal() -> tuple[type[ValueError], ...]:
    """Return ValueError where the error that is being handled refuses its input on purpose, as `except refusal():`.

    It names an argument in backticks, or a `raise` statement outside of installed packages raises it. Any other
    ValueError, as of `h, w = shape` with three axes, is a fault of the code.
    """
    error = sys.exc_info()[1]
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    raised = bool(frames) and (frames[-1].line or "").startswith("raise") and "site-packages" not in frames[-1].filename
    return (ValueError,) if raised or re.search(r"`\w", str(error)) else ()


@dataclass(frozen=True, eq=False)
class ModelUnderTest:
    """A model at one image size.

    model: a copy in float64 and evaluation mode; it is not changed.
    image, patch: (height, width) in pixels.
    home: (H, W) of the grid that its tables are stored for.
    """

    model: nn.Module
    image: Size
    patch: Size
    channels: int
    home: Size
    _seen: dict[int, Recording] = field(init=False, default_factory=dict)
    _rows: dict[tuple[int, int], Tensor] = field(init=False, default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, img_size: Size | None, patch_size: Size | None) -> ModelUnderTest:
        """Build a subject from a copy of `model` on the CPU, with the weights of the model."""
        double = copy.deepcopy(model).cpu().double().eval()
        image, patch, channels = _sizes(double, img_size, patch_size)
        home = image[0] // patch[0], image[1] // patch[1]
        return cls(double, image, patch, channels, home)

    @property
    def grid(self) -> Size:
        """(H, W), in patches."""
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    @property
    def patches(self) -> int:
        """H * W."""
        return math.prod(self.grid)

    def pixels(self, grid: Size) -> Size:
        """Return (height, width) in pixels of the images of a grid."""
        return grid[0] * self.patch[0], grid[1] * self.patch[1]

    def drawn(self) -> ModelUnderTest:
        """Return a subject with new random values of every trainable parameter, so that each one has an effect."""
        model = copy.deepcopy(self.model).train().eval()  # models of timm clear cached biases when they are trained
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    noise = torch.randn_like(parameter)
                    if parameter.ndim < 2:
                        parameter.copy_(noise * 0.2 + 0.5)
                    elif re.search(r"pos|token|rel|bias|freq", name) and "mlp" not in name:
                        parameter.copy_(noise * 0.5)
                    else:
                        parameter.copy_(noise * parameter[0].numel() ** -0.5)
        return replace(self, model=model)

    def images(self, batch: int) -> Tensor:
        """Return random images, (batch, C, height, width)."""
        return torch.randn(batch, self.channels, *self.image, dtype=torch.float64)

    def constant(self, level: float = 1.0) -> Tensor:
        """Return two images whose pixels are all the same, so that patches differ only in their position.

        There are two, since a tensor of shape (1, ...) in a model may not be a batch.
        """
        color = torch.linspace(0.3, 1.0, self.channels, dtype=torch.float64) * level
        return color[None, :, None, None].expand(2, -1, *self.image).contiguous()

    def at(self, grid: Size) -> ModelUnderTest:
        """Return the model for another grid that it takes: by `set_input_size` if it has it, else unchanged."""
        image = self.pixels(grid)
        if image == self.image:
            return self
        model = copy.deepcopy(self.model)
        resized = hasattr(model, "set_input_size")
        other = replace(self, model=model, image=image, home=grid if resized else self.home)
        try:
            if resized:
                set_input_size(model, image)
            with torch.no_grad():
                call(model, other.images(1))
            if self._windows(image) != other._windows(image):
                raise ValueError("the model changes its windows")
        except Exception as error:  # any error of another library means that it refuses the size
            raise NotApplicable(f"a grid of {by(grid)} is refused: {error_line(error)}") from error
        return other

    def _windows(self, image: Size) -> list[Any]:
        """Return the windows of all modules, in order, None where a window is the whole grid.

        For a model of this library these are the windows of each block on an image of that size, and their shifts; in
        Swin they are set for the size that it is built for.
        """
        if isinstance(self.model, Backbone):
            grids = enumerate(self.model.position_grids(self.model.grid_at(image)))
            return [(at.within.shape, self.model.block_arguments(stage, at)) for stage, at in grids]
        sides = [getattr(module, "window_size", None) for module in self.model.modules()]
        return [side if pair(side) is not None and pair(side) != self.grid else None for side in sides]

    def small(self) -> ModelUnderTest:
        """Return the model at a small grid that is not square, or unchanged if it refuses all of them."""
        windows = (logits := self.seen().logits) is not None and logits.shape[1] > 1
        if self.grid[0] != self.grid[1] and self.patches <= _SMALL[windows]:
            return self
        with suppress(NotApplicable):
            return self.at_first((3, 5))[0]
        return self

    def at_first(self, *grids: Size, factors: Sequence[int] = (1, 2, 4, 8)) -> list[ModelUnderTest]:
        """Return the model at all of `grids`, multiplied by the first of `factors` for which it takes them."""
        reasons = []
        for factor in factors:
            try:
                return [self.at((factor * height, factor * width)) for height, width in grids]
            except NotApplicable as error:
                reasons.append(error)
        raise reasons[-1]

    def seen(self, earlier: int = 0) -> Recording:
        """Return the recording of a constant image up to the attention after `earlier` others."""
        if earlier not in self._seen:
            self._seen[earlier] = record(self.model, self.constant(), earlier)
        return self._seen[earlier]

    def tokens(self, seen: Recording | None = None, earlier: int = 0) -> Tensor:
        """Return the rows of the patches in the tokens of a recording, by default of a constant image, (H * W, D)."""
        rows = self.rows(earlier=earlier)
        seen = self.seen(earlier) if seen is None else seen
        return seen.inputs[seen.tokens][0, rows]

    def rows(self, at: int | None = None, earlier: int = 0) -> Tensor:
        """Return the row of each patch in the recorded input `at` (default: the tokens), (H * W,), row by row.

        It is found from the content, if it can be: each patch is changed separately.
        """
        try:
            base = self.seen(earlier)
            at = base.tokens if at is None else at
        except LookupError as error:
            raise NotApplicable(f"{error}") from error
        if (at, earlier) in self._rows:
            return self._rows[at, earlier]
        rows = None if earlier else self._rows_by_digits(at)  # after an attention a row depends on all patches
        if rows is None:
            if self.patches * math.prod(self.image) > _PIXELS:
                raise NotApplicable(f"the tokens of the patches were not found with few images of {by(self.image)}")
            masks = torch.eye(self.patches, dtype=torch.bool).split(64)
            changes = torch.cat([self._changes(at, patches, earlier) for patches in masks])
            shares = changes / changes.amax(-1, keepdim=True).clamp_min(1e-30)
            if shares.shape[1] >= self.patches:  # convolutions of a stem may change a neighbor more
                rows = torch.from_numpy(linear_sum_assignment(-(shares + 1e-6).log().numpy())[1])
            if rows is None or float(shares.gather(1, rows[:, None]).min()) < 0.25:
                raise NotApplicable("the tokens of the patches were not found")
        self._rows[at, earlier] = rows
        return rows

    def _rows_by_digits(self, at: int) -> Tensor | None:
        """Find the row of each patch with few images; None if a row depends on several patches.

        For each binary digit of the patches' numbers, one image changes the patches with a one, another those with a
        zero. A row of a single patch changes with one image of each pair, a row of several with both of some pair.
        """
        numbers, digits = torch.arange(self.patches), torch.arange(max(1, (self.patches - 1).bit_length()))
        ones = (numbers >> digits[:, None] & 1).bool()  # (digits, N)
        changes = self._changes(at, torch.cat([ones, ~ones]))
        with_one, with_zero = (changes > 1e-9 * changes.max()).chunk(2)  # (digits, rows) each
        single = (with_one != with_zero).all(0)
        rows = single.nonzero().flatten()
        if (single != (with_one | with_zero).any(0)).any() or len(rows) != self.patches:
            return None
        return rows[(with_one[:, rows].long() << digits[:, None]).sum(0).argsort()]

    def _changes(self, at: int, patches: Tensor, earlier: int = 0) -> Tensor:
        """Return the change of each row of the input `at`, (B, rows), if the pixels of `patches`, (B, N), change."""
        h, w = self.patch
        images = self.constant()[:1].repeat(max(len(patches), 2), 1, 1, 1)
        change = torch.linspace(-1, 2, h * w, dtype=torch.float64).view(h, w).tile(self.grid)
        pixels = patches.view(-1, 1, *self.grid).repeat_interleave(h, 2).repeat_interleave(w, 3)
        images[: len(patches)] += change * pixels
        after = record(self.model, images, earlier).inputs[at]
        before = self.seen(earlier).inputs[at][0]
        if after.shape[1:] != before.shape:  # it is not of the images, but has rows that two images could share
            raise NotApplicable("the tokens of the patches were not found")
        changes: Tensor = (after - before).norm(dim=-1)
        return changes[: len(patches)]

    @cached_property
    def tables(self) -> dict[str, tuple[int, ...]]:
        """Absolute position tables: parameters and buffers that are added to tokens or logits, with rows of patches.

        By name, the dimension of patches, or the dimensions of rows and columns. There may be rows of prefix tokens.
        """
        tables: dict[str, tuple[int, ...]] = {}
        rows = math.prod(self.home)
        try:
            extra = self.seen().inputs[self.seen().tokens].shape[1] - self.patches
        except LookupError:
            extra = 0
        for name, tensor in added_tensors(self.model, self.constant()).items():
            wide = tuple(axis for axis, side in enumerate(tensor.shape) if side > 1)
            sides = tuple(tensor.shape[axis] for axis in wide)
            if len(wide) == 2 and rows <= sides[0] <= rows + max(extra, 0):
                tables[name] = wide[:1]
            elif len(wide) == 3 and self.home in (sides[:2], sides[1:]):
                tables[name] = wide[:2] if sides[:2] == self.home else wide[1:]
        return tables

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split the rows of a table into other tokens and patches."""
        ahead = len(rows) - math.prod(self.home)
        return rows[:ahead], rows[ahead:]

    def with_tables(self, values: dict[str, Tensor]) -> ModelUnderTest:
        """Return a subject whose tables have other values, (rows, D) each."""
        model = copy.deepcopy(self.model)
        tensors = tensors_of(model)
        with torch.no_grad():
            for name, axes in self.tables.items():
                tensors[name].copy_(from_rows(tensors[name], axes, values[name]))
        return replace(self, model=model)

    def values(self) -> dict[str, Tensor]:
        """Return the values of the tables, (rows, D) each."""
        tensors = tensors_of(self.model)
        return {name: to_rows(tensors[name].detach(), axes) for name, axes in self.tables.items()}

    @cached_property
    def without_tables(self) -> ModelUnderTest:
        return self.with_tables({name: torch.zeros_like(value) for name, value in self.values().items()})


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by their names."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def to_rows(value: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return a table whose patches are along `axes` as (rows, D)."""
    moved = value.movedim(axes, tuple(range(len(axes))))
    return moved.reshape(math.prod(moved.shape[: len(axes)]), -1).clone()


def from_rows(like: Tensor, axes: tuple[int, ...], rows: Tensor) -> Tensor:
    """Return (rows, D) in the shape of a table whose patches are along `axes`."""
    first = tuple(range(len(axes)))
    return rows.reshape(like.movedim(axes, first).shape).movedim(first, axes)


def _sizes(model: nn.Module, img_size: Size | None, patch_size: Size | None) -> tuple[Size, Size, int]:
    """Find the image size, the patch size and the number of channels of a model."""
    if isinstance(model, Backbone) and len(model.img_size) > 2:
        raise ValueError(
            f"`model` must take images, got {type(model).__name__}, which takes videos of {by(model.img_size)}."
        )
    image: Any = img_size or image_size(model)
    patch: Any = patch_size
    if patch is None and image is not None and isinstance(model, Backbone):  # a tokenizer may pool after convolutions
        grid = model.grid_at(image)
        patch = image[0] // grid.height, image[1] // grid.width
    elif patch is None and image is not None:
        patch = _attended_patch(model, image, own_patch_size(model) or (1, 1))
    patch = patch or own_patch_size(model)
    unfit = patch and image and (image[0] % patch[0] or image[1] % patch[1])
    if patch_size is None and image and (patch is None or unfit):
        with suppress(ValueError):  # of a model without blocks
            known = image_size(model) or image
            seen = find_structure(model, known).patch_size  # its patches overlap, or it is a pyramid
            patch = patch if image[0] % seen[0] or image[1] % seen[1] else seen
    if image is None:
        raise ValueError("`img_size` must be given for a model without an attribute img_size, got none.")
    if patch is None:
        raise ValueError("`patch_size` must be given for a model without an attribute patch_size, got none.")
    if image[0] % patch[0] or image[1] % patch[1]:
        raise ValueError(f"`img_size` must be a multiple of the patch size, {by(patch)}, got {by(image)}.")
    return image, patch, image_channels(model)


def _attended_patch(model: nn.Module, image: tuple[int, ...], first: tuple[int, ...]) -> Size | None:
    """Return the patch of the tokens of the first attention: `first`, doubled until it has as many; None if unknown.

    Stages before it may merge patches.
    """
    weight = next(model.parameters())
    images = torch.zeros(2, image_channels(model), *image, device=weight.device, dtype=weight.dtype)
    logits = None
    with suppress(Exception):  # any error of another library, which the checks report later
        logits = record(model, images).logits
    if logits is None:
        return None
    height, width = first
    while (image[0] // height) * (image[1] // width) > logits.shape[1] * logits.shape[3]:
        height, width = 2 * height, 2 * width
    return None if image[0] % height or image[1] % width else (height, width)


@torch.no_grad()
def run(model: nn.Module, images: Tensor) -> Tensor:
    """Return the outputs of a model as one tensor, (B, ...)."""
    outputs = call(model, images)
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, tuple | list):
        tensors = (output for output in outputs if isinstance(output, Tensor))
        outputs = torch.cat([by_image(output, len(images)).flatten(1) for output in tensors], 1)
    if not isinstance(outputs, Tensor):
        raise TypeError(f"`model` must return tensors, got {type(outputs).__name__}.")
    return by_image(outputs, len(images))


def are_alike(rows: Tensor, tolerance: float = 1e-6) -> bool:
    """Return whether all rows are the same, up to `tolerance` of the largest value."""
    return float((rows - rows.mean(0)).abs().max()) <= tolerance * float(rows.abs().max())


def check_same(actual: Tensor, expected: Tensor, law: str, tolerance: float = EXACT) -> None:
    """Raise `Failed` with `law` unless two outputs are the same, up to `tolerance` of the largest."""
    if actual.shape != expected.shape:
        raise Failed(f"{law}, got a shape of {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    if not is_same(actual, expected, tolerance):
        raise Failed(f"{law}, got a difference of {_difference(actual, expected):.1e}")


def rounding(dtype: torch.dtype, largest: float = 1.0, terms: int = 16) -> float:
    """Return the most that a sum of `terms` products, each up to `largest`, is off when it is computed in `dtype`.

    16 are the pixels of bicubic resampling. Right code may have tables of float32, which a wider dtype does not mend.
    """
    return terms * largest * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def is_same(actual: Tensor, expected: Tensor, tolerance: float = SAME) -> bool:
    """Return whether two outputs of one shape are the same, up to `tolerance` of the largest."""
    largest = float(torch.where(expected.isfinite(), expected, 0).abs().max())
    return _difference(actual, expected) <= tolerance * max(largest, 1e-3)


def _difference(actual: Tensor, expected: Tensor) -> float:
    return float(torch.where(actual == expected, 0, actual - expected).abs().max())  # 0 for infinities, of a mask, too


def any_of(*laws: Callable[[], str]) -> str:
    """Check several laws: fails with the first that fails; not applicable if none applies."""
    passed, reasons = [], []
    for law in laws:
        try:
            passed.append(law())
        except NotApplicable as error:
            reasons.append(str(error))
    if not passed:
        raise NotApplicable("; ".join(dict.fromkeys(reasons)))
    return "; ".join(passed)


def other_grid(subject: ModelUnderTest) -> Size:
    """Return another grid, whose sides grow by different factors."""
    height, width = subject.grid
    step = math.gcd(height, width)
    return height + 4 * step, width + step
