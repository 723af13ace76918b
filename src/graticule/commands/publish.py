"""`graticule publish`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from graticule.commands.kinds import check_on_images
from graticule.commands.options import open_runs, parse, parse_checkpoint, print_written


@dataclass
class Publish:
    """Write a run as a folder for the Hugging Face hub: config.json, model.safetensors and a model card.

        graticule publish RUN FOLDER
        graticule publish RUN FOLDER --push OWNER/NAME

    graticule.from_pretrained opens it, and so does timm.create_model("local-dir:FOLDER", pretrained=True).
    """

    run: tyro.conf.Positional[Path]
    """run folder"""
    folder: tyro.conf.Positional[Path]
    """folder to write to"""
    push: str | None = None
    """upload the folder to this repository of the hub, OWNER/NAME"""
    private: bool = False
    """make a new repository private"""
    checkpoint: str = "best"
    """best or last"""
    format: Literal["png", "pdf", "svg"] = "png"
    """of the figure: pdf and svg, for papers, are written beside the png of the model card"""


def run(arguments: list[str]) -> int:
    """Write a run as a folder for the hub, and upload it if asked."""
    options = parse(Publish, "publish", arguments)
    if options.private and options.push is None:
        raise ValueError("`private` must be left out without --push, which makes the repository.")
    checkpoint = parse_checkpoint(options.checkpoint)
    (opened,) = open_runs([options.run], "publish")
    check_on_images([opened], "publish")
    from graticule.backbones.hub import check_repo_id, push_folder
    from graticule.studies.publishing import publish

    if options.push is not None:
        check_repo_id(options.push)

    folder = publish(opened, options.folder, checkpoint, options.format)
    print_written(
        *sorted(
            path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".md", ".png", ".pdf", ".svg")
        )
    )
    if options.push is not None:
        print(f"uploaded to {push_folder(folder, options.push, options.private)}")
    return 0
