"""Write a run as a folder for the Hugging Face hub: its model, and a card with what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from graticule.analysis import bias_map_sheet, bias_maps, correlation_sheet, position_correlations, save_figure
from graticule.backbones import Card
from graticule.encodings import AbsoluteEncoding
from graticule.typed import read_typed

#: Untrained models of the same shape that the correlations of a run are compared with.
_UNTRAINED = 39


def publish(
    run: Any,
    folder: str | Path,
    checkpoint: Literal["best", "last"] = "best",
    figure_format: Literal["png", "pdf", "svg"] = "png",
) -> Path:
    """Write the model of a run, its card and the sheet of its position correlations or biases to `folder`.

    Args:
        run: of an image classifier.
        folder: is made if it is not there; a run's own folder is not taken.
        checkpoint: best or last.
        figure_format: pdf and svg are written beside the png, which is what a card can show.

    Raises:
        ValueError: if the run is not of an image classifier, or `folder` is that of a run.
        FileNotFoundError: if the run has saved nothing yet, or its data are not there, whose statistics a model needs.
    """
    folder = Path(folder)
    if (folder / "recipe.json").exists():
        raise ValueError(f"`folder` must be a new one or one of a published model, got {str(folder)!r}, a run.")
    if run.task().inputs != "images":
        raise ValueError(f"`run` must be of an image classifier, got {str(run.folder)!r}.")
    model = run.model(checkpoint=checkpoint)
    data = run.data()
    data.setup()
    info, recipe = data.info, run.recipe()
    preprocessing = {"mean": list(info.mean), "std": list(info.std), "label_names": list(info.class_names)}
    folder.mkdir(parents=True, exist_ok=True)
    card = Card(
        _data(recipe), _results(run, recipe, data), _measured(run), _figures(model, recipe, folder, figure_format)
    )
    written: Path = model.save_pretrained(folder, preprocessing=preprocessing, card=card)
    return written


def _data(recipe: Any) -> str:
    limit = "" if recipe.limit_train is None else f", {recipe.limit_train:,} images of it"
    return f"{recipe.dataset}{limit}, {recipe.epochs} epochs, seed {recipe.seed}"


def _results(run: Any, recipe: Any, data: Any) -> list[tuple[str, str]]:
    """Return the results of a finished run, in the words of its metric."""
    if not run.finished:
        return []
    result, metric = run.result(), recipe.metric
    return [
        (f"best {metric.title}, epoch {result['best_epoch']}", metric.show(result[f"best_{metric.key}"], unit=False)),
        (f"last {metric.title}", metric.show(result[f"last_{metric.key}"], unit=False)),
        ("held-out images", f"{data.num_test:,}"),
        ("seconds of training", f"{result['seconds']:,.0f}"),
    ]


def _measured(run: Any) -> str:
    """Say where and with what versions a run was trained."""
    described: dict[str, Any] = read_typed(run.recipe_file, dict[str, Any])
    versions, machine = described.get("versions", {}), described.get("machine", {})
    with_ = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "timm") if name in versions)
    where = f"on {machine['processor']}" if machine.get("processor") else ""
    return f"Measured in training {where} ({with_})." if with_ else ""


def _figures(model: Any, recipe: Any, folder: Path, figure_format: str) -> list[tuple[str, str]]:
    """Draw the position correlations of the first stage, or its biases where there is no table."""
    title = f"{recipe.model}, {recipe.encoding or 'its own encoding'}, joining {recipe.joining}"
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
