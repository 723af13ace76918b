"""`graticule publish`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from graticule import analysis, external, hub
from graticule.lab import figures, training
from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.opening import open_models
from graticule.lab.commands.options import NamedModels, print_written
from graticule.registry.fields import read_typed


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

    needs: ClassVar[Mapping[str, str]] = {"private": "push"}


#: Kind of figure -> its caption in the model card.
_CAPTIONS = {
    "correlations": "Position correlations of each layer: similarity of a patch with all others",
    "rotary": "Similarity under rotation alone, of a patch with all others",
    "bias": "The bias of each head, from a patch in the middle to all others",
}


def run(options: PublishOptions) -> int:
    """Write a model as a folder for the hub, and upload it with --push."""
    if options.push is not None:
        hub.check_repo_id(options.push)
    folder = options.folder
    if (folder / "recipe.json").exists():
        raise ValueError(f"`folder` must be new or contain a published model, got {str(folder)!r}, a run.")
    (source,) = open_models([options.model], options, "publish", "images*", converted=True)

    model: Any = source.model
    sheet = _sheet(getattr(model, "backbone", model), source.title)
    drawn = [] if sheet is None else [(f"{sheet.name}.png", _CAPTIONS[sheet.kind])]
    card = hub.Card(figures=drawn) if source.run is None else _card(source.run, drawn)
    optional: Any = {"preprocessing": source.preprocessing or None, "card": card if card != hub.Card() else None}
    external.save_pretrained(model, folder, **optional)
    if sheet is not None:
        figures.save_figure(sheet.figure, folder / f"{sheet.name}.png")
    print_written(*sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".md", ".png")))
    if options.push is not None:
        print(f"uploaded to {hub.push_folder(folder, options.push, options.private)}")
    return 0


def _sheet(model: Any, title: str) -> Any:
    """Draw the correlations of the first stage, or its rotation or biases; None for a model without them."""
    try:
        stages = analysis.position_maps(model)
    except ValueError:  # no position, or one that cannot be drawn
        return None
    return next(figures.position_sheets(stages[:1], title), None)


def _card(run: training.Run, drawn: list[tuple[str, str]]) -> hub.Card:
    """Describe the data, the results, the machine and the versions of a run."""
    recipe: Any = run.recipe()
    limit = "" if recipe.limit_train is None else f", {recipe.limit_train:,} images of it"
    data = f"{recipe.dataset}{limit}, {recipe.epochs} epochs, seed {recipe.seed}"
    described: dict[str, Any] = read_typed(run.recipe_file, dict[str, Any])
    versions, machine = described.get("versions", {}), described.get("machine", {})
    with_ = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "timm") if name in versions)
    where = f"on {machine['processor']}" if machine.get("processor") else ""
    measured = f"Measured in training {where} ({with_})." if with_ else ""
    return hub.Card(data, _results(run, recipe), measured, drawn)


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
