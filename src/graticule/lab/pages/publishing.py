"""Publishing of a model as a folder for the Hugging Face hub, with a card; the card of a run has its results."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from torch import nn

from graticule.analysis.bias import bias_maps
from graticule.analysis.correlation import position_correlations
from graticule.backbones.base import Backbone
from graticule.encodings.forms.absolute import AbsoluteEncoding
from graticule.external.hub import save_pretrained
from graticule.hub.files import Card
from graticule.lab.figures.position_sheets import bias_map_sheet, correlation_sheet
from graticule.lab.figures.save import save_figure
from graticule.lab.tasks.classification import images_of
from graticule.registry.fields import read_typed

#: Untrained models of the same shape that the correlations of a run are compared with.
_UNTRAINED = 39


def publish_run(
    run: Any, folder: str | Path, model: Any = None, figure_format: Literal["png", "pdf", "svg"] = "png"
) -> Path:
    """Write the model of a run, its card and the sheet of its position correlations or biases to `folder`.

    Args:
        run: on images: a run of a classifier, a segmentation model or a detector.
        folder: created if it does not exist; it must not be the folder of a run.
        model: the model of the run with other weights than the best ones.
        figure_format: pdf and svg are written in addition to the png, which the card shows.

    Raises:
        ValueError: if the run is on text, or `folder` is that of a run.
        FileNotFoundError: if the run has no checkpoint yet.
    """
    folder = _checked(Path(folder))
    if not run.task().inputs.startswith("images"):
        raise ValueError(f"`run` must be on images, got {str(run.folder)!r}.")
    model = run.model() if model is None else model
    recipe = run.recipe()
    facts = vars(images_of(run)) if run.task().inputs == "images" else run.described()
    mean, std, names = (list(facts[key]) for key in ("mean", "std", "class_names"))
    preprocessing = {"mean": mean, "std": std, "label_names": names}
    figures = _figures(getattr(model, "backbone", model), f"{recipe.model}, {_words(recipe)}", folder, figure_format)
    card = Card(_data(recipe), _results(run, recipe), _measured(run), figures)
    written: Path = model.save_pretrained(folder, preprocessing=preprocessing, card=card)
    return written


def publish(
    model: nn.Module,
    folder: str | Path,
    name: str,
    host: str | None = None,
    figure_format: Literal["png", "pdf", "svg"] = "png",
) -> Path:
    """Write a model that does not belong to a run, its card and the sheet of its correlations or biases to `folder`.

    Args:
        model: as for `graticule.save_pretrained`.
        folder: created if it does not exist; it must not be the folder of a run.
        name: of the model, for the sheet.
        host: of a module with an attached position, as for `graticule.save_pretrained`.
        figure_format: pdf and svg are written in addition to the png, which the card shows.

    Raises:
        ValueError: if the model cannot be rebuilt from names, or `folder` is that of a run.
    """
    folder = _checked(Path(folder))
    written = save_pretrained(model, folder, host=host)
    figures = _figures(model, name, folder, figure_format) if isinstance(model, Backbone) else []
    return save_pretrained(model, folder, host=host, card=Card(figures=figures)) if figures else written


def _checked(folder: Path) -> Path:
    """Check that a model can be written to a folder."""
    if (folder / "recipe.json").exists():
        raise ValueError(f"`folder` must be new or that of a published model, got {str(folder)!r}, a run.")
    return folder


def _words(recipe: Any) -> str:
    return f"{recipe.encoding or 'its own encoding'}, joining {recipe.joining}"


def _data(recipe: Any) -> str:
    limit = "" if recipe.limit_train is None else f", {recipe.limit_train:,} images of it"
    return f"{recipe.dataset}{limit}, {recipe.epochs} epochs, seed {recipe.seed}"


def _results(run: Any, recipe: Any) -> list[tuple[str, str]]:
    """Return the results of a finished run, with names of its metric."""
    if not run.finished:
        return []
    result, metric, count = run.result(), recipe.metric, run.examples("test")
    return [
        (f"best {metric.title}, epoch {result['best_epoch']}", metric.show(result[f"best_{metric.key}"], unit=False)),
        (f"last {metric.title}", metric.show(result[f"last_{metric.key}"], unit=False)),
        *([] if count is None else [("held-out images", f"{count:,}")]),
        ("seconds of training", f"{result['seconds']:,.0f}"),
    ]


def _measured(run: Any) -> str:
    """Describe the machine and the versions that a run was trained with."""
    described: dict[str, Any] = read_typed(run.recipe_file, dict[str, Any])
    versions, machine = described.get("versions", {}), described.get("machine", {})
    with_ = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "timm") if name in versions)
    where = f"on {machine['processor']}" if machine.get("processor") else ""
    return f"Measured in training {where} ({with_})." if with_ else ""


def _figures(model: Any, title: str, folder: Path, figure_format: str) -> list[tuple[str, str]]:
    """Draw the position correlations of the first stage, or its biases if it has no table."""
    folder.mkdir(parents=True, exist_ok=True)
    formats = dict.fromkeys(("png", figure_format))
    if any(isinstance(module, AbsoluteEncoding) for module in model.modules()):
        sheet = correlation_sheet(position_correlations(model, None, 0, _UNTRAINED), title)
        name, about = "correlations", "Position correlations of each layer: similarity of a patch with all others"
    elif (maps := bias_maps(model, None, 0)) is not None:
        sheet = bias_map_sheet(maps, title)
        name, about = "bias", "The bias of each head, from a patch in the middle to all others"
    else:
        return []
    for kind in formats:
        save_figure(sheet, folder / f"{name}.{kind}")
    return [(f"{name}.png", about)]
