"""`graticule resamplers`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graticule.backbones.token_model import TokenModel
from graticule.external.convert.conversion import convert
from graticule.external.convert.parts import can_convert
from graticule.external.traced_model import ResampledTables, TracedModel
from graticule.lab.commands.declared import Resamplers
from graticule.lab.commands.opening import choose_device, open_models, pictures_of
from graticule.lab.commands.options import output_folder
from graticule.lab.data.pictures import find_pictures
from graticule.lab.studies.resamplers import try_resamplers
from graticule.lab.tasks.parts.image_scores import check_sizes
from graticule.registry.checks import parse_sizes, printable
from graticule.surgery.resize import resampled_modules


def run(options: Resamplers) -> int:
    """Compare all resamplers on a model at other image sizes."""
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
