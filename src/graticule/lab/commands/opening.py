"""Models on the command line: opened, with the facts of their images and data to run them on."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from graticule.lab import data as lab_data
from graticule.lab import training
from graticule.lab.commands.options import NamedData, NamedModels, reads_files
from graticule.registry.checks import is_path, known_name, printable


def open_models(
    targets: Sequence[str], options: NamedModels, command: str, inputs: str = "images", **how: Any
) -> list[training.LoadedModel]:
    """Open different models by `open_model`; the inputs of the tasks of runs must match the pattern `inputs`.

    Options of models by name and their images must be given for those alone; `how` is for these, too.
    """
    if not targets or len(set(targets)) < len(targets):
        raise ValueError(f"`models` must differ, and be one or more, got {', '.join(targets) or 'none'}.")
    kinds = [training.source_kind(target) for target in targets]
    values = {name: getattr(options, name) for name in ("weights", "encoding", "joining")}
    if isinstance(options, NamedData):
        others = [target for target, kind in zip(targets, kinds, strict=True) if kind != "run"]
        for name in ("images", "data_root"):
            if not others and all(map(os.path.exists, targets)) and (value := getattr(options, name)) is not None:
                raise ValueError(f"`{name}` must be left out with a run, which has its own, got {str(value)!r}.")
        if others and options.images is None:
            is_folder = Path(others[0]).is_dir() and not is_path(others[0])
            folder = f" For the folder of this name, write ./{others[0]}." if is_folder else ""
            raise ValueError(
                f"`images` must be given for {others[0]!r}, which is not the folder of a run: a folder of images, or "
                f"the name of a data set.{folder}"
            )
    models = []
    for target, kind in zip(targets, kinds, strict=True):
        of_name = how | values if kind == "name" or "name" not in kinds else {}  # refused if no model is by name
        models.append(training.open_model(target, **of_name, checkpoint=options.checkpoint))
        run = models[-1].run
        if run is not None and not fnmatch(run.task().inputs, inputs):
            raise ValueError(
                f"`runs` must be on images, which graticule {command} reads, got {str(run.folder)!r}, which is on "
                f"{run.task().inputs}; graticule evaluate scores runs of every task."
            )
    return models


def test_data(opened: training.LoadedModel, options: NamedData) -> Any:
    """Return the test images of a model's run, or of `options.images`."""
    if opened.run is not None:
        return opened.run.data()
    assert options.images is not None
    return named_data(opened, options.images, options.data_root)


def named_data(opened: training.LoadedModel, name: str, root: Path | None = None) -> Any:
    """Return the test images of a folder or a data set, resized and normalized for a model."""
    assert opened.images is not None
    if name not in lab_data.list_datasets():
        if not (is_path(name) or Path(name).is_dir()):
            known_name("images", name, [*lab_data.list_datasets(), "a folder"])
        return folder_data(opened, Path(name))
    if root is not None and not reads_files(name):
        raise ValueError(f"`data_root` must be left out with {name}, which reads no files, got {str(root)!r}.")
    data = lab_data.DataModule(name, root=root, size=opened.size, augmentation=opened.augmentation)
    if data.info.channels != opened.images.channels:
        raise ValueError(
            f"`images` must have {opened.images.channels} channels, as {opened.target} takes, got "
            f"{name!r} with {data.info.channels}."
        )
    if opened.has_own_normalization:  # as for a folder of these images
        data.info = replace(opened.images, name=data.info.name, class_names=data.info.class_names)
    return data


def folder_data(opened: training.LoadedModel, folder: Path, least: int = 1, **options: Any) -> Any:
    """Return the images of a folder, at least `least`, resized and normalized for a model; see `FolderModule`."""
    assert opened.images is not None
    if len(opened.size) > 2:
        raise ValueError(f"`model` must take images for a folder of images, got {opened.target!r}, which takes videos.")
    data = lab_data.FolderModule(
        folder, opened.images, opened.size, opened.num_classes, augmentation=opened.augmentation, **options
    )
    if data.num_test < least:
        raise ValueError(f"`images` must be at least {least}, got {data.num_test} in {folder}.")
    return data


def check_labels(opened: training.LoadedModel, data: Any, source: str) -> None:
    """Check that the labels of data from `named_data` are outputs of a model; say so if only their number tells."""
    assert opened.images is not None
    names, count = opened.images.class_names, opened.num_classes
    classes = getattr(data, "folders", data.info.class_names)
    labels = lab_data.class_labels(classes, names, count)
    if labels is None or (not hasattr(data, "folders") and labels != list(range(len(classes)))):
        if names:
            lab_data.check_class_names(classes, names, opened.target, "images")
        raise ValueError(
            f"`images` must have the {count} classes of {opened.target}, got {len(classes) or 'none'} in {source!r}; "
            "--probe knn scores its features on other classes."
        )
    if not names:
        words = f"does not name its classes: the classes of {source} are used in order"
        print(f"{printable(opened.target)} {words}", file=sys.stderr)


def label_models(opened: Sequence[training.LoadedModel]) -> list[str]:
    """Return distinct labels of models: what differs in the folders of runs, and other sources as given."""
    runs = [model.target for model in opened if model.run is not None and Path(model.target) == model.run.folder]
    folders = {target: Path(target).resolve() for target in runs}
    common = Path(os.path.commonpath(folders.values())) if len(folders) > 1 else None
    parts = {
        target: (path.name,) if common is None else path.relative_to(common).parts for target, path in folders.items()
    }
    while len({names[-1:] for names in parts.values()}) == 1 and all(len(names) > 1 for names in parts.values()):
        parts = {target: names[:-1] for target, names in parts.items()}
    labels = {target: "/".join(names) or folders[target].name for target, names in parts.items()}
    return [printable(labels.get(model.target, model.target)) for model in opened]


def read_input(path: Path, read: Any) -> Any:
    """Read an image; one that cannot be read is a ValueError."""
    from PIL import Image

    try:
        return read(path)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise ValueError(f"`images` must be images, got {path}, which cannot be read as one ({reason}).") from None


def choose_device(name: str) -> str:
    """Resolve auto to cuda if there is a GPU, otherwise to cpu."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.Generator(name)
    except (RuntimeError, AssertionError) as error:  # the latter if PyTorch was built without it
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"`device` must be one that PyTorch has here, such as cpu, got {name!r} ({reason}).") from None
    return name
