"""`graticule publish`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import graticule
from graticule import analysis, external, hub
from graticule.lab import figures, training
from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.opening import open_models
from graticule.lab.commands.options import NamedModels, print_written
from graticule.registry.fields import read_typed
from graticule.system.files import make_folder


@dataclass
class PublishOptions(NamedModels):
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

    needs: ClassVar[Mapping[str, str]] = {"private": "push"}


#: Untrained models of the same shape that the correlations are compared with.
_UNTRAINED = 39


def run(options: PublishOptions) -> int:
    """Write a model as a folder for the hub, and upload it with --push."""
    if options.push is not None:
        hub.check_repo_id(options.push)
    folder = options.folder
    if (folder / "recipe.json").exists():
        raise ValueError(f"`folder` must be new or contain a published model, got {str(folder)!r}, a run.")
    (source,) = open_models([options.model], options, "publish", "images*", converted=True)

    if source.run is not None:
        _publish_run(source.run, source, folder, options.format)
    else:
        external.save_pretrained(source.model, folder, host=options.host)
        is_backbone = isinstance(source.model, graticule.Backbone)
        if drawn := _figures(source.model, options.model, folder, options.format) if is_backbone else []:
            external.save_pretrained(source.model, folder, host=options.host, card=hub.Card(figures=drawn))
    suffixes = (".json", ".safetensors", ".md", ".png", ".pdf", ".svg")
    print_written(*sorted(path for path in folder.iterdir() if path.suffix in suffixes))
    if options.push is not None:
        print(f"uploaded to {hub.push_folder(folder, options.push, options.private)}")
    return 0


def _publish_run(run: training.Run, source: training.LoadedModel, folder: Path, figure_format: str) -> None:
    """Write a model of a run, its card with the results, and the sheet of its correlations or biases."""

    recipe: Any = run.recipe()
    limit = "" if recipe.limit_train is None else f", {recipe.limit_train:,} images of it"
    data = f"{recipe.dataset}{limit}, {recipe.epochs} epochs, seed {recipe.seed}"
    model: Any = source.model
    drawn = _figures(getattr(model, "backbone", model), source.title, folder, figure_format)
    card = hub.Card(data, _results(run, recipe), _describe_training(run), drawn)
    model.save_pretrained(folder, preprocessing=source.preprocessing, card=card)


def _results(run: training.Run, recipe: Any) -> list[tuple[str, str]]:
    if not run.finished:
        return []
    result, metric, count = run.result(), recipe.metric, run.examples("test")
    return [
        (f"best {metric.title}, epoch {result['best_epoch']}", metric.show(result[f"best_{metric.key}"], unit=False)),
        (f"last {metric.title}", metric.show(result[f"last_{metric.key}"], unit=False)),
        *([] if count is None else [("held-out images", f"{count:,}")]),
        ("seconds of training", f"{result['seconds']:,.0f}"),
    ]


def _describe_training(run: training.Run) -> str:
    """Describe the machine and the versions that a run was trained with."""
    described: dict[str, Any] = read_typed(run.recipe_file, dict[str, Any])
    versions, machine = described.get("versions", {}), described.get("machine", {})
    with_ = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "timm") if name in versions)
    where = f"on {machine['processor']}" if machine.get("processor") else ""
    return f"Measured in training {where} ({with_})." if with_ else ""


def _figures(model: Any, title: str, folder: Path, figure_format: str) -> list[tuple[str, str]]:
    """Draw the position correlations of the first stage, or its biases if it has no table."""
    from graticule.encodings.forms.absolute import AbsoluteEncoding

    make_folder(folder)
    formats = dict.fromkeys(("png", figure_format))
    if any(isinstance(module, AbsoluteEncoding) for module in model.modules()):
        sheet = figures.correlation_sheet(analysis.position_correlations(model, None, 0, _UNTRAINED), title)
        name, about = "correlations", "Position correlations of each layer: similarity of a patch with all others"
    elif (maps := analysis.bias_maps(model, None, 0)) is not None:
        sheet = figures.bias_map_sheet(maps, title)
        name, about = "bias", "The bias of each head, from a patch in the middle to all others"
    else:
        return []
    for kind in formats:
        figures.save_figure(sheet, folder / f"{name}.{kind}")
    return [(f"{name}.png", about)]
