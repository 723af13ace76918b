"""The names of models and runs on the command line, checked before PyTorch is imported."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graticule.lab.arguments import Rare
from graticule.lab.commands.options import OfCheckpoint
from graticule.lab.training.run_folder import RunFolder, runs_in
from graticule.registry.checks import is_path, printable
from graticule.registry.plugins import module_name

if TYPE_CHECKING:
    from graticule.lab.training.run import Run

#: The prefixes of names on the hub, and of timm's models; those of `graticule.hub.kinds`, which imports PyTorch.
HUB, TIMM = "hf:", "timm:"
#: The value of `weights` for those of the initialization.
RANDOM = "random"
#: The ends of the names of files of weights.
WEIGHTS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")


@dataclass(kw_only=True)
class NamedModels(OfCheckpoint):
    """The options of models that are given by name."""

    weights: str | None = None
    """for a model given by name: checkpoint file, or random (default: its published weights, if any)"""
    encoding: str | None = None
    """for a model of graticule given by name: encoding (default: its own)"""
    joining: str | None = None
    """for a model of graticule given by name: joining (default: its own)"""


@dataclass(kw_only=True)
class NamedData(NamedModels):
    """The options of models that are given by name, and of the images for them."""

    images: str | None = None
    """for models that are not runs: folder of images at any depth, or name of a data set; runs have their own"""
    data_root: Rare[Path | None] = None
    """folder of the data set, if `images` is a name"""


def check_targets(targets: Sequence[str], options: NamedModels, command: str) -> None:
    """Check the sources of models, and that options for models by name are given for those alone."""
    if not targets:
        raise ValueError(f"`models` must be one model or more, got none; see graticule {command} --help.")
    if len(set(targets)) < len(targets):
        raise ValueError(f"`models` must differ, got {', '.join(targets)}.")
    for target in targets:
        if _is_file(target):
            if not Path(target).is_file():
                raise FileNotFoundError(f"`model` must be a file of weights, got {target!r}, which does not exist.")
        elif is_folder(target) and not is_published(target):
            RunFolder.open(target)
    if not any(_is_plain(target) for target in targets):
        _check_left_out(repr(targets[0]), weights=options.weights, encoding=options.encoding, joining=options.joining)
    images = getattr(options, "images", None)
    folder = Path(images) if isinstance(images, Path) or (isinstance(images, str) and is_path(images)) else None
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"`images` must be a folder, got {str(images)!r}, which does not exist.")
    if not isinstance(options, NamedData):
        return
    named = next((target for target in targets if is_named(target)), None)
    if named is None:
        _check_left_out("a run", images=options.images, data_root=options.data_root)
    elif options.images is None:
        check_name(named)
        raise ValueError(
            f"`images` must be given for {named!r}, which is not the folder of a run: a folder of images, or the name "
            "of a data set."
        )


def _check_left_out(owner: str, **given: object) -> None:
    """Check that no option is given for what `owner` has itself."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"`{name}` must be left out with {owner}, which has its own, got {str(value)!r}.")


def check_on_images(targets: Sequence[str], command: str) -> None:
    """Check that all runs among the sources of models are on images."""
    from graticule.lab.training.run import run_of

    for target in targets:
        run = None if is_named(target) else run_of(Path(target))
        if run is not None and run.task().inputs != "images":
            raise ValueError(
                f"`runs` must be on images, which graticule {command} draws, got {str(run.folder)!r}, which is on "
                f"{run.task().inputs}; for text there are graticule evaluate RUN --lengths 128 512 and graticule look "
                "correlations RUN; for detection and segmentation, graticule evaluate RUN and graticule predict RUN."
            )


def check_task_options(task: str, **given: Any) -> None:
    """Check that no option of the evaluation of another task is given."""
    from graticule.lab.training.task import list_tasks

    tasks = list_tasks()
    options = {name: [field.name for field in dataclasses.fields(tasks[name].evaluation)] for name in tasks}
    known = options[task]
    for name, values in given.items():
        if values and name not in known:
            others = [other for other, names in options.items() if name in names]
            has = f"has {' and '.join(f'--{option}' for option in known)}" if known else "has no such options"
            shown = " ".join(map(str, values)) if isinstance(values, list) else values
            raise ValueError(
                f"`{name}` must be left out with the task {task}, which {has}, got {shown}; --{name} is for "
                f"{' and '.join(others)}."
            )


def is_named(target: str) -> bool:
    """Return whether a model is no run and no file of its weights, so that it has no data of its own."""
    return is_published(target) or not (is_folder(target) or _is_file(target))


def is_folder(target: str) -> bool:
    """Return whether a model is given by a folder, or by a name on the hub; a bare name is a model."""
    return is_path(target) and module_name(target) is None


def is_published(target: str) -> bool:
    """Return whether a model is given by a folder that was published or saved, or by a name on the hub."""
    return target.startswith(HUB) or (is_folder(target) and (Path(target) / "config.json").is_file())


def check_name(target: str) -> None:
    """Check that there is a model of this name, the file of FILE.py:NAME, or the published folder.

    An error names the nearest models and runs.
    """
    if (module := module_name(target)) is not None:
        if not Path(module[0]).is_file():
            raise FileNotFoundError(f"`model` must be FILE.py:NAME, got {target!r}, whose file does not exist.")
        return
    if is_published(target):
        return
    import timm

    from graticule.backbones.registry import list_models

    name = target.removeprefix(TIMM)
    if timm.is_model(name) or (name == target and name in list_models()):
        return
    runs = {folder.name: str(folder) for place in (Path("runs"), Path()) for folder in runs_in(place)}
    names = {**dict.fromkeys([*list_models(), *timm.list_models()]), **runs}
    near = [names[found] or found for found in difflib.get_close_matches(name, names, n=3)]
    near = [f"./{target}"] if Path(target).exists() else near
    raise ValueError(
        f"`model` must be the folder of a run or of a published model, a file of weights in a run, the name of a model "
        f"of graticule or timm, or FILE.py:NAME, got {target!r}: there is no such model; "
        + (f"did you mean {' or '.join(map(repr, near))}?" if near else "graticule models lists the names.")
    )


def _is_plain(target: str) -> bool:
    """Return whether a target is the name of a model, which can have other weights and another position."""
    return is_named(target) and not is_published(target) and module_name(target) is None


def _is_file(target: str) -> bool:
    return target.endswith(WEIGHTS) or (is_path(target) and Path(target).is_file() and ".py" not in target)


def open_runs(folders: Sequence[Path]) -> list[Run]:
    """Open different runs; a folder without a run is an error before PyTorch is imported."""
    if len(set(folders)) < len(folders):
        raise ValueError(f"`runs` must differ, got {', '.join(map(str, folders))}.")
    found = [RunFolder.open(folder) for folder in folders]
    from graticule.lab.training.run import Run

    return [Run(one.folder) for one in found]


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Return distinct labels of runs from their folders."""
    folders = [run.folder.resolve() for run in runs]
    if len(folders) == 1:
        return [printable(folders[0].name)]
    common = Path(os.path.commonpath(folders))
    names = [folder.relative_to(common).parts for folder in folders]
    while len({parts[-1:] for parts in names}) == 1 and all(len(parts) > 1 for parts in names):
        names = [parts[:-1] for parts in names]
    return [printable("/".join(parts) or common.name) for parts in names]
