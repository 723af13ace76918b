"""Description of a model for its export: its images, its position, and copies of it for other sizes."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.backbones.mvit import MultiscaleVisionTransformer
from graticule.encodings.forms.mixing import MixingPosition
from graticule.hub.kinds import HubModel
from graticule.position.grid import Windows
from graticule.position.position import Position
from graticule.surgery.attach_hooks import AttachedPosition
from graticule.surgery.fold import fold, unfold
from graticule.surgery.resize import resize

Size = tuple[int, int]


@dataclass(frozen=True)
class Subject:
    """A model to export.

    model: a backbone, a model around one (a segmentation model, feature maps), or a module with an attached position.
    channels: channels of its images.
    size: (height, width) in pixels of the images that its position is stored for.
    position: the position of its layers.
    backbone: the backbone in it; None for an attached position.
    divisor: a divisor of the sides of images, in addition to the backbone's requirements.
    """

    model: Any
    channels: int
    size: Size
    position: Position
    backbone: Backbone | None = None
    divisor: int = 1

    @classmethod
    def of(cls, model: nn.Module) -> Subject:
        """Describe a model.

        Raises:
            ValueError: if it cannot be exported as a program, with the reason.
        """
        if isinstance(model, HubModel) and model.no_program:
            raise ValueError(f"`model` must not be a {type(model).__name__}: {model.no_program}.")
        inner = model if isinstance(model, Backbone) else getattr(model, "backbone", None)
        if isinstance(inner, Backbone):
            divisor = getattr(model, "divisor", 1)
            return cls(model, inner.in_chans, inner.img_size, inner.position, inner, divisor)
        attached = next((part for part in model.modules() if isinstance(part, AttachedPosition)), None)
        first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
        if attached is not None and first is not None and attached.patch_size is not None:
            rows, columns = (side * count for side, count in zip(attached.patch_size, attached.grid.shape, strict=True))
            return cls(model, first.in_channels, (rows, columns), attached.position)
        raise ValueError(
            f"`model` must be a backbone of images, a model with one, or have an attached position that follows the "
            f"size of its images, got {type(model).__name__}; graticule.convert turns a model of timm into one."
        )

    def check(self, size: Size) -> None:
        """Check that the model can be resized to images of `size`.

        Raises:
            ValueError: if it cannot.
        """
        if self.backbone is None:
            self._attached.grid_at(size)
        else:
            self.backbone.grid_at(size)
        if any(side % self.divisor for side in size):
            raise ValueError(
                f"`img_size` must have sides that are multiples of {self.divisor}, as the model's maps, got "
                f"{size[0]} x {size[1]}."
            )

    def check_free(self) -> None:
        """Check that a program of the model can accept images of other sizes.

        Raises:
            ValueError: if it cannot, or if the code of a module of another library does not.
        """
        if isinstance(self.backbone, MultiscaleVisionTransformer):
            raise ValueError(
                "`dynamic` must be left out or 'batch' with MultiscaleVisionTransformer: its pooling rounds sides up, "
                "which a program does for one size."
            )
        if self.backbone is not None:
            return
        rows, columns = (side + step for side, step in zip(self.size, self.patch, strict=True))
        try:
            with torch.no_grad():
                self.model(torch.zeros(1, self.channels, rows, columns))
        except (AssertionError, RuntimeError, ValueError) as error:
            said = str(error).strip().partition("\n")[0][:200]
            raise ValueError(
                f"`dynamic` must be left out or 'batch' with {type(self.model).__name__}, which takes images of one "
                f"size: {said}"
            ) from error

    @property
    def least(self) -> int:
        """Return the fewest steps of a free side: an axis of length 1 would be fixed, in any of the maps."""
        if any(window != (1, 1) for window in self._windows):
            return 3  # one whole window in addition to the parts that a shift leaves
        coarsest = max(getattr(self.model, "strides", (1,)))
        return max(2, coarsest // min(self.step) + 1)

    @property
    def patch(self) -> Size:
        """Return (height, width) in pixels of a patch of the first stage."""
        if self.backbone is None:
            return self._attached.patch_size or (1, 1)
        height, width = (side >> (len(self.backbone.depths) - 1) for side in self.backbone.coarsest_patch)
        return height, width

    @property
    def step(self) -> Size:
        """Return the step of free sides, (height, width) in pixels: whole windows in every stage."""
        if self.backbone is None:
            return self.patch
        last = len(self.backbone.depths) - 1
        windows = self._windows
        height, width = (
            math.lcm(self.divisor, *((side >> (last - stage)) * window[axis] for stage, window in enumerate(windows)))
            for axis, side in enumerate(self.backbone.coarsest_patch)
        )
        return height, width

    @property
    def _windows(self) -> list[tuple[int, ...]]:
        """Return (rows, columns) for each stage, which must divide its grid; (1, 1) for a stage without windows."""
        model = self.backbone
        if model is None:
            return []
        grids = model.position_grids(model.grid)
        found: list[tuple[int, ...]] = []
        for stage, depth in enumerate(model.depths):
            seen = [model.where(stage, index, grids[stage])[0] for index in range(depth)]
            shapes: list[tuple[int, ...]] = [each.window.shape for each in seen if isinstance(each, Windows)]
            if model.grid.windows:
                shapes.append(model.grid.windows[stage])
            found.append((math.lcm(*(rows for rows, _ in shapes)), math.lcm(*(columns for _, columns in shapes))))
        return found

    @property
    def _attached(self) -> AttachedPosition:
        return next(part for part in self.model.modules() if isinstance(part, AttachedPosition))

    @property
    def feature_count(self) -> int:
        """Return the number of blocks or stages whose maps can also be outputs."""
        return len(self.model.feature_info) if isinstance(self.model, Backbone) else 0

    def plain(self) -> Subject:
        """Return a copy for inference on the CPU in float32, not folded, with only PyTorch's operators."""
        found = unfold(copy.deepcopy(self.model)).cpu().float().eval()
        for module in found.modules():
            if isinstance(module, MixingPosition):
                module.product = "matrix"  # a product over displacements is an operator of this library
        return Subject.of(found)

    def at(self, size: Size, folded: bool) -> Subject:
        """Return a copy for images of `size`, folded or not; this subject must be a plain one."""
        ready = copy.deepcopy(self.model)
        if size != self.size:
            resize(ready, size)
        return Subject.of(fold(ready) if folded else ready)

    def outputs(self, images: Tensor, features: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return the outputs for images (B, C, height, width): the logits and the maps of `features`, or all maps."""
        if features:
            tokens, maps = self.model.forward_intermediates(images, list(features))
            return (self.model.forward_head(tokens), *maps)
        found = self.model(images)
        return tuple(found.values()) if isinstance(found, dict) else (found,)

    def names(self, features: tuple[int, ...]) -> list[str]:
        """Return the names of the outputs."""
        strides = getattr(self.model, "strides", None)
        if strides is not None:
            return [f"stride_{stride}" for stride in strides]
        return ["logits", *(f"features_{index}" for index in features)]
