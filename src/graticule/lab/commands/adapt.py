"""`graticule adapt`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graticule.lab.arguments import Positional
from graticule.lab.commands.options import parse
from graticule.lab.commands.train import TrainOptions, run, with_folder
from graticule.lab.recipes.load import load_recipe

__all__ = ["AdaptOptions", "read", "run"]  # an adaptation runs as a training does


@dataclass(kw_only=True)
class AdaptOptions(TrainOptions):
    """Replace a model's position, and recover its features by distillation.

        graticule adapt timm:NAME --encoding rope --images FOLDER
        graticule adapt FOLDER --joining lape --images FOLDER --output RUN

    The model learns the tokens that it had before, on images without labels. The run, which graticule train resumes,
    has certificate.json and the folder `published`.
    """

    trained: Positional[str]
    """timm:NAME, hf:OWNER/NAME, a published folder, a run, or FILE.py:NAME"""
    recipe: Any = field(default_factory=lambda: load_recipe("adapt"))
    images: Path | None = None
    """folder of images; every tenth is held out"""


def read(arguments: list[str]) -> AdaptOptions:
    """Read the options, with a recipe of the model and the images."""
    options = parse(AdaptOptions, "adapt", arguments, load_recipe("adapt"))
    for name, instead in (("model", "the first argument"), ("data_root", "`--images`")):
        if name in options.recipe.overrides:
            raise ValueError(f"`{name}` must be left out of graticule adapt, which has {instead} for it.")
    if options.images is None and options.recipe.dataset == "unlabeled_folder":
        raise ValueError("`images` must be given: a folder of images, got none.")
    if options.images is not None and not options.images.is_dir():
        raise FileNotFoundError(f"`images` must be a folder of images, got {str(options.images)!r}, which is none.")
    recipe: Any = dataclasses.replace(options.recipe, model=options.trained, data_root=options.images)
    recipe.record_overrides(options.recipe.overrides)
    options.recipe = recipe
    with_folder(options, "adapt")
    return options
