"""Open a trained model from its files, which describe the model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired

import timm
from torch import nn
from typing_extensions import TypedDict

from graticule.backbones.base import Backbone
from graticule.hub.config import Preparation
from graticule.hub.files import CONFIG
from graticule.hub.kinds import HUB, TIMM, from_pretrained
from graticule.lab.training.checkpoints import load_weights
from graticule.lab.training.run import Run, run_of
from graticule.registry.checks import checked, known_name
from graticule.registry.fields import read_typed
from graticule.registry.plugins import load_plugin, load_plugins, module_name


@checked
def load(
    source: str | Path,
    plugin: str | Path | Sequence[str | Path] | None = None,
    checkpoint: Literal["best", "last"] = "best",
) -> nn.Module:
    """Open a trained model with its weights, in evaluation mode.

    Args:
        source: `hf:OWNER/NAME` on the Hugging Face hub, or `timm:NAME` with its published weights, both as backbones of
            this library or, with a warning, as they are if they do not convert; the folder of a run; a file of its
            weights in that folder: `weights.safetensors`, or a checkpoint (`checkpoints/step-000000100.ckpt`); or a
            folder of `graticule publish` or `save_pretrained`, also of transformers.
        plugin: a Python file or an installed entry point that registers the classes of the run, or several. Code that
            is not named is not imported.
        checkpoint: the checkpoint of a run, best or last.

    Raises:
        FileNotFoundError: if there is no such run or file, or the run has saved nothing yet.
        ValueError: if the file is damaged, does not fit the model of its run, belongs to no run, or needs a plugin.
    """
    if str(source).startswith((HUB, TIMM)):
        if checkpoint != "best":
            raise ValueError(f"`checkpoint` must be left out for a published model, got {checkpoint!r}.")
        named: nn.Module = from_pretrained(source, plugin=plugin)
        return named
    path = Path(source)
    run = run_of(path)
    if not path.exists():
        raise FileNotFoundError(
            f"`source` must be a run or a file of its weights, got {str(path)!r}, which does not exist."
        )
    if run is None and (path / CONFIG).is_file():
        if checkpoint != "best":
            raise ValueError(f"`checkpoint` must be left out for a published model, got {checkpoint!r}.")
        published: nn.Module = from_pretrained(path, plugin=plugin)
        return published
    if run is None:
        what = "has no recipe.json" if path.is_dir() else "is not in the folder of a run"
        raise ValueError(
            f"`source` must be a run or a file of its weights, whose model is known, got {str(path)!r}, "
            f"which {what}; build the model and call graticule.load_checkpoint(model, path)."
        )
    if run.folder != path and checkpoint != "best":
        raise ValueError(f"`checkpoint` must be left out if `source` is a file, got {checkpoint!r}.")
    load_plugins(plugin)
    return run.model(checkpoint=checkpoint) if run.folder == path else _with_weights(run, path)


def _with_weights(run: Run, path: Path) -> nn.Module:
    """Build the model of a run with the weights at `path`."""
    return load_weights(run.task().build_model(run.described()), path).eval()


def open_backbone(source: str, weights: bool = True) -> Backbone:
    """Open any model as a backbone: one of timm or transformers is converted, and one of a dense model is taken out.

    Args:
        source: as in `load`, or FILE.py:NAME, a module in a Python file or a function that builds one.
        weights: whether they are needed; otherwise timm builds its model without a download.

    Raises:
        ValueError: if the model is none of this library and does not convert.
    """
    from graticule.external.convert.conversion import convert

    module = module_name(source)
    if module is not None:
        model = module_of_file(*module)
    elif not weights and source.startswith(TIMM):
        model = timm.create_model(source.removeprefix(TIMM))
    else:
        model = load(source)
    model = getattr(model, "backbone", model)
    if isinstance(model, Backbone):
        return model
    try:
        return convert(model)
    except ValueError as error:
        raise ValueError(
            f"`model` must be a backbone, or a model of timm or transformers that converts, got {source!r}: {error}"
        ) from error


class _Named(TypedDict):
    """The entries of a config.json of this library, timm or transformers that name classes."""

    pretrained_cfg: NotRequired[Preparation]
    label_names: NotRequired[list[str] | None]
    id2label: NotRequired[dict[int, str]]


def label_names(source: str | Path | nn.Module) -> tuple[str, ...]:
    """Return the names of the classes of weights, in the order of the outputs; empty if they are not known.

    Args:
        source: a model, a run, a published folder, or a file in one of these folders.
    """
    if isinstance(source, nn.Module):
        known = (getattr(source, "pretrained_cfg", None) or {}).get("label_names") or ()
        return tuple(known) if len(known) == getattr(source, "num_classes", 0) else ()
    path = Path(source)
    if (run := run_of(path)) is not None:
        return tuple(run.described().get("class_names") or ())
    config = (path if path.is_dir() else path.parent) / CONFIG
    if not config.is_file():
        return ()
    found: _Named = read_typed(config, _Named)
    names = found.get("pretrained_cfg", Preparation()).label_names or found.get("label_names") or ()
    labels = found.get("id2label", {})
    generic = all(name == f"LABEL_{index}" for index, name in labels.items())
    return tuple(names or ([] if generic else [labels[index] for index in sorted(labels)]))


def module_of_file(file: str, name: str, *others: type) -> Any:
    """Return the module `name` of a Python file, or the module that its function `name` builds, or one of `others`."""
    kinds = (nn.Module, *others)
    module = load_plugin(file)
    known = [one for one in vars(module) if not one.startswith("_")]
    given = getattr(module, known_name("NAME", name, known))
    if not isinstance(given, kinds):
        if not callable(given):
            raise ValueError(f"`{name}` of {file} must be a module or a function that builds one, got {given!r}.")
        missing = [
            key
            for key, one in inspect.signature(given).parameters.items()
            if one.default is one.empty
            and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        ]
        if missing:
            raise ValueError(f"`{name}` of {file} must need no arguments, got {', '.join(missing)}.")
        given = given()
    if not isinstance(given, kinds):
        raise ValueError(f"`{name}` of {file} must return a torch.nn.Module, got {type(given).__name__}.")
    return given
