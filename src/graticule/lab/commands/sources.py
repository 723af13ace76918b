"""Sources of exported and published models: a run, a published folder, a name, a model of timm, or a Python file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graticule.lab.commands.opening import (
    TIMM,
    WEIGHTS,
    NamedModels,
    check_name,
    is_folder,
    is_published,
    module_of_file,
    open_model,
)
from graticule.lab.commands.options import open_runs, parse_checkpoint

#: The options of a model that is given by name.
_OF_NAMES = ("weights", "encoding", "joining")


@dataclass(frozen=True)
class Source:
    """A model and its source.

    model: the model, in evaluation mode.
    folder: the default folder of written files.
    run: its run; None if it has none.
    """

    model: Any
    folder: Path
    run: Any = None


def open_source(
    target: str,
    command: str,
    weights: Path | None = None,
    encoding: str | None = None,
    joining: str | None = None,
    checkpoint: str = "best",
) -> Source:
    """Open a model.

    Args:
        target: folder of a run or of a published model, file of weights in a run's folder, name of a model,
            `timm:NAME`, which is converted, or FILE.py:NAME.
        command: the calling command, for messages.
        weights: checkpoint of a model that is given by name.
        encoding: encoding of a model that is given by name.
        joining: joining of a model that is given by name.
        checkpoint: best or last, of a run.

    Raises:
        ValueError, FileNotFoundError: if it cannot be opened, or is on text.
    """
    given = dict(zip(_OF_NAMES, (weights, encoding, joining), strict=True))
    file, _, name = target.rpartition(":")
    in_file = file.endswith(".py")
    if in_file or is_folder(target) or target.endswith(WEIGHTS):
        for option, value in given.items():
            if value is not None:
                what = "a module of a file" if in_file else "a folder, whose model has its own"
                raise ValueError(f"`{option}` must be left out with {what}, got {value}.")
    if in_file:
        return Source(module_of_file(file, name).eval(), Path())
    if target.endswith(WEIGHTS):
        opened = open_model(target)
        _check_images(opened.run, command)
        return Source(opened.model, opened.folder, opened.run)
    if is_folder(target):
        if is_published(target):
            from graticule.hub.kinds import from_pretrained

            return Source(from_pretrained(target), Path())
        chosen = parse_checkpoint(checkpoint)
        (run,) = open_runs([Path(target)], command)
        _check_images(run, command)
        return Source(run.model(checkpoint=chosen), run.folder, run)
    if target.startswith(TIMM):
        from graticule.external.convert.conversion import convert

        named = NamedModels(weights=None if weights is None else str(weights))
        return Source(convert(open_model(target, named).model, encoding, joining), Path())
    from graticule.backbones.registry import create_model

    check_name(target)
    words: dict[str, Any] = {
        option: value for option, value in given.items() if value is not None and option != "weights"
    }
    model = create_model(target, checkpoint_path=weights, **words)
    if weights is None:
        print("the weights are those of the model's initialization; see --weights", file=sys.stderr)
    return Source(model.eval(), Path())


def _check_images(run: Any, command: str) -> None:
    """Check that a run is on images, with classes or with boxes and masks.

    Raises:
        ValueError: if it is on text.
    """
    if not run.task().inputs.startswith("images"):
        raise ValueError(
            f"`model` must be on images for graticule {command}, got {str(run.folder)!r}, which is on "
            f"{run.task().inputs}."
        )
