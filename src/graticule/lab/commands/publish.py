"""`graticule publish`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.opening import open_source
from graticule.lab.commands.options import parse, print_written
from graticule.lab.commands.targets import NamedModels


@dataclass
class Publish(NamedModels):
    """Write a model as a folder for the Hugging Face hub: config.json, model.safetensors and a model card.

        graticule publish RUN FOLDER
        graticule publish timm:vit_small_patch16_224 FOLDER --joining lape
        graticule publish RUN FOLDER --push OWNER/NAME

    graticule.from_pretrained opens it, and timm.create_model("local-dir:FOLDER", pretrained=True) opens classifiers.
    """

    model: Positional[str]
    """folder of a run, file of its weights, name of a model, timm:NAME or hf:NAME (converted), or FILE.py:NAME"""
    folder: Positional[Path]
    """folder to write to"""
    push: str | None = None
    """upload the folder to this repository of the hub, OWNER/NAME"""
    private: Rare[bool] = False
    """make a new repository private"""
    host: str | None = None
    """for FILE.py:NAME with an attached position: the source of the module, such as torchvision:vit_b_16"""
    format: Literal["png", "pdf", "svg"] = "png"
    """format of the figure: pdf and svg, for papers, are written beside the png of the model card"""


def run(arguments: list[str]) -> int:
    """Write a model as a folder for the hub, and upload it with --push."""
    options = parse(Publish, "publish", arguments)
    if options.private and options.push is None:
        raise ValueError("`private` must be left out without --push, which creates the repository.")
    from graticule.hub.files import check_repo_id, push_folder

    if options.push is not None:
        check_repo_id(options.push)
    source = open_source(options.model, "publish", options)
    from graticule.lab.pages.publishing import publish, publish_run

    if source.run is None:
        folder = publish(source.model, options.folder, options.model, options.host, options.format)
    else:
        folder = publish_run(source.run, options.folder, source.model, options.format)
    print_written(
        *sorted(
            path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".md", ".png", ".pdf", ".svg")
        )
    )
    if options.push is not None:
        print(f"uploaded to {push_folder(folder, options.push, options.private)}")
    return 0
