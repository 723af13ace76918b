"""Models of timm and transformers as `export` takes them: from images alone to tensors with names."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from graticule.external.convert.sizes import build_empty, encoders_of, sizes_of
from graticule.external.images import Size, call, error_line, evaluating, image_channels, image_size, own_patch_size
from graticule.external.resize import find_tables
from graticule.external.table_grids import set_methods
from graticule.position.places import by
from graticule.surgery.export_program import HOLDERS
from graticule.surgery.resize import resize


@HOLDERS.register("timm")
@HOLDERS.register("transformers")
class ExternalModel(nn.Module):
    """Holds a model that takes images (B, C, height, width), and returns its tensors by name.

    Raises:
        ValueError: if the model states no image size, or does not run on images of that size alone.
    """

    def __init__(self, model: Any, takes_any_size: bool = False) -> None:
        super().__init__()
        self.backbone, self.takes_any_size = model, takes_any_size
        self.encoders: Any = [sizes_of(config) for config in encoders_of([getattr(model, "config", None)])]
        size, patch = (self.encoders or [(image_size(model), own_patch_size(model))])[0]
        if size is None or patch is None or len(size) != 2:
            raise ValueError(
                "`model` must have an image size, (height, width), and a patch size in its configuration to be "
                f"exported, got {type(model).__name__}; torch.export.export takes others."
            )
        self.img_size, self.patch_size, self.in_chans = size, patch, image_channels(model)
        weight = next(model.parameters(), torch.empty(0))
        images = torch.zeros(1, self.in_chans, *size, dtype=weight.dtype, device=weight.device)
        try:
            with evaluating(model):
                self.output_names = list(self(images))
        except Exception as error:  # whatever a model raises
            raise ValueError(
                f"`model` must run on images of its size, {by(size)}, alone to be exported, got "
                f"{type(model).__name__}, which raises {error_line(error)}"
            ) from error

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the tensors that the model returns for images (B, C, height, width), by name."""
        with symbolic_integers(self.backbone) if self.takes_any_size else nullcontext():
            outputs = call(self.backbone, images, interpolates=self.takes_any_size)
        if isinstance(outputs, Tensor):
            return {"logits": outputs}
        named: dict[str, Any] = dict(outputs) if isinstance(outputs, Mapping) else {"output": outputs}
        for name, value in [*named.items()]:
            if isinstance(value, tuple | list):
                named |= {f"{name}_{index}": part for index, part in enumerate(value)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def grid_at(self, size: Size) -> None:
        """Check that the model can be resized to images of a size."""
        self.at(size)

    def at(self, size: Any) -> ExternalModel:
        """Return a copy for images of a size in pixels; None resamples its tables for each image, by our resamplers."""
        model: Any = deepcopy(self.backbone)
        if size is None and self.encoders:
            with suppress(Exception):  # of a class that is built for no other size, whose own resampling is traced
                tables = find_tables(model, build_empty(model, model.config), self.encoders)
                set_methods(model, tables, self.img_size, for_any_size=True)
        elif size is not None and size != self.img_size:
            resize(model, size)
        return ExternalModel(model, takes_any_size=size is None)


class _IntegerType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int)

    def __call__(cls, value: Any = 0, *base: Any) -> Any:
        return value if isinstance(value, torch.SymInt) else int(value, *base)


class _Integer(int, metaclass=_IntegerType):
    """The type `int`, which leaves symbolic sizes as they are, where `int` makes them constants of a program."""


@contextmanager
def symbolic_integers(model: nn.Module) -> Iterator[None]:
    """Let `int(size)` in the code of transformers that a model calls keep symbolic sizes, within the block."""
    names = {"transformers.utils.generic", *(type(part).__module__ for part in model.modules())}
    spaces = [vars(sys.modules[name]) for name in names if name.startswith("transformers.") and name in sys.modules]
    for space in spaces:
        space["int"] = _Integer
    try:
        yield
    finally:
        for space in spaces:
            del space["int"]
