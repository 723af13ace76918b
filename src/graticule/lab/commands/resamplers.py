"""`graticule resamplers`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from graticule.backbones.token_model import TokenModel
from graticule.external.convert.conversion import convert
from graticule.external.convert.parts import can_convert
from graticule.external.traced_model import ResampledTables, TracedModel
from graticule.lab.arguments import Positional
from graticule.lab.commands.opening import choose_device, open_models, pictures_of
from graticule.lab.commands.options import JsonOutput, NamedModels, OnDevice, output_folder, parse
from graticule.lab.data.pictures import find_pictures
from graticule.lab.studies.resamplers import try_resamplers
from graticule.lab.tasks.parts.image_scores import check_sizes
from graticule.registry.checks import Range, parse_sizes, printable
from graticule.surgery.resize import resampled_modules


@dataclass
class Resamplers(NamedModels, JsonOutput, OnDevice):
    """Compare all resamplers on a model at other image sizes, by its features and its scores.

        graticule resamplers RUN --images FOLDER --sizes 160 288

    Features are compared with those of the same images at the size of the training. Scores need a run and images in
    one folder per class. A model of timm or transformers is converted first; of one that does not convert, the tables
    that it adds to its tokens are resampled, and compared with those that it computes itself.
    """

    model: Positional[str]
    """run or published folder, file of weights, or name of a model"""
    images: Path
    """folder of images, at any depth; FOLDER/CLASS/*, or FOLDER/val/CLASS/*, where classes are known"""
    sizes: list[str] = field(default_factory=list)
    """sides in pixels, or HEIGHTxWIDTH"""
    count: Annotated[int, Range(2)] = 256
    """largest number of images, evenly spaced; at least two, for an error bar"""
    output: Path | None = None
    """folder for the values of every image as JSON (default: the run's, or runs/NAME)"""


def run(arguments: list[str]) -> int:
    """Compare all resamplers on a model at other image sizes."""
    options = parse(Resamplers, "resamplers", arguments)
    sizes = parse_sizes(options.sizes)
    if not sizes or len(set(sizes)) < len(sizes):
        raise ValueError(f"`sizes` must be different sizes, at least one, got {' '.join(options.sizes) or 'none'}.")

    find_pictures(options.images)  # before the model is built
    (opened,) = open_models([options.model], options, "resamplers")
    model: Any = opened.model
    if not isinstance(model, TokenModel) and can_convert(model):
        model = convert(model)
    pictures = pictures_of(replace(opened, model=model), options.images, 2, count=options.count)
    check_sizes(model, sizes)
    if isinstance(model, TokenModel):
        resampled_modules(model)  # raises if there are none
    else:
        model = ResampledTables(TracedModel(model))
    trained_at: Any = opened.size
    device, output = choose_device(options.device), output_folder(options.output, opened.folder)
    every = range(pictures.num_test)
    images = {size: list(pictures.test_images(size, every)[0]) for size in dict.fromkeys([trained_at, *sizes])}
    labels = None if pictures.labels is None else pictures.labels.tolist()
    study = try_resamplers(model, images, trained_at, labels, device=device)
    options.print_table(*study.rows())
    options.say(*study.notes())
    if labels is None and opened.info is not None and opened.info.class_names:
        options.say(f"no scores: the folders in {printable(str(options.images))} are not the classes of the run")
    output.mkdir(parents=True, exist_ok=True)
    return options.finish(study.record(), study.write(output / "resamplers.json"))
