"""`graticule debias`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

import graticule
from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.opening import choose_device, folder_data, open_models
from graticule.lab.commands.options import JsonOutput, NamedModels, OfSize, OnDevice, output_folder, square
from graticule.registry.fields import Count
from graticule.system.tables import format_table


@dataclass
class DebiasOptions(OfSize, NamedModels, JsonOutput, OnDevice):
    """Remove position information from the features of a model, save the model, and print what is left and lost.

        graticule debias timm:NAME --images FOLDER --output FOLDER2
        graticule debias RUN --images FOLDER --output FOLDER2 --method blank

    Two thirds of the images fit the removal, every third one is held out for the table. A model of timm or transformers
    is converted. graticule.from_pretrained opens the folder.
    """

    model: Positional[str]
    """run or published folder, file of weights, name, timm:NAME, hf:NAME, or FILE.py:NAME"""
    images: Path
    """folder of images, at any depth"""
    output: Path
    """folder to write to"""
    method: Literal["mean", "rows_columns", "leace", "blank"] = "mean"
    """what is removed: the mean of each position over images, only its functions of row and column, linearly decodable
    position, or the effect on images without content"""
    count: Annotated[int, Field(ge=9)] = 256
    """largest number of images, evenly spaced"""
    batch_size: Rare[Count] = 16
    """images per forward pass"""


def run(options: DebiasOptions) -> int:
    """Debias a model, and save it."""
    output_folder(options.output)
    (source,) = open_models([options.model], options, "debias", converted=True)
    size = square(options.img_size, len(source.size)) or source.size
    data = folder_data(dataclasses.replace(source, img_size=size), options.images, 9, count=options.count)
    device = choose_device(options.device)
    images = data.test_images(size, range(data.num_test))[0].to(device)
    debiased = graticule.debias(source.model.to(device), images, options.method, batch_size=options.batch_size)
    folder = debiased.cpu().save_pretrained(options.output, preprocessing=source.preprocessing)
    certificate = debiased.certificate
    assert certificate is not None
    options.say(certificate.heading, format_table(certificate.summary(), certificate.left))
    return options.finish(certificate, folder)
