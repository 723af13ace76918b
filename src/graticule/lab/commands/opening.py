"""Models on the command line: opened, with the facts of their images and data to run them on."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn

from graticule.checkpoints.load import load_checkpoint, load_own
from graticule.external.convert.conversion import convert
from graticule.external.traced_model import view_of
from graticule.hub.files import quick_hub
from graticule.lab.commands.options import NamedData, NamedModels
from graticule.lab.data.augmentation import Augmentation
from graticule.lab.data.folder_module import FolderModule
from graticule.lab.data.images import DatasetInfo, check_class_names, class_labels
from graticule.lab.data.module import DataModule
from graticule.lab.data.registry import list_datasets
from graticule.lab.tasks.classification import images_of
from graticule.lab.training.opening import create_named, is_ours, label_names, open_module, source_kind
from graticule.lab.training.run import Run, run_of
from graticule.lab.training.run_folder import RunFolder
from graticule.lab.training.task import list_tasks
from graticule.registry.checks import is_path, known_name, printable

#: The value of `weights` for those of the initialization.
RANDOM = "random"


@dataclass(frozen=True)
class Opened:
    """A model and its properties.

    target: its source, as given.
    title: a line about it.
    model: the model, in evaluation mode.
    img_size: (height, width) in pixels of its images, or with a depth; None if unknown.
    info: facts of its images, with the names of its classes if they are known; None for a run that is not on images.
    augmentation: the resizing of its images.
    run: its run, if it has one.
    states_info: whether the mean and the standard deviation of `info` belong to its weights, and not only to its name.
    """

    target: str
    title: str
    model: nn.Module
    img_size: tuple[int, ...] | None
    info: DatasetInfo | None = None
    augmentation: Augmentation = field(default_factory=Augmentation)
    run: Run | None = None
    states_info: bool = True

    @property
    def folder(self) -> Path:
        """The default folder of results: that of its run, or runs/NAME."""
        if self.run is not None:
            return self.run.folder
        return Path("runs") / Path(self.target.replace(":", "/")).resolve().name

    @property
    def size(self) -> Any:
        """The (height, width) in pixels of its images, which must be known."""
        if self.img_size is None:
            raise ValueError(f"`model` must have a known image size, got {self.target!r}, which has none.")
        return self.img_size

    @property
    def classes(self) -> int:
        """The number of its classes; 0 if it is not a classifier."""
        return int(getattr(self.model, "num_classes", 0))


def open_models(targets: Sequence[str], options: NamedModels, command: str, images: bool = True) -> list[Opened]:
    """Open different models, whose runs must be on images if `images`.

    Options of models by name and their images must be given for those alone.
    """
    if not targets or len(set(targets)) < len(targets):
        raise ValueError(f"`models` must differ, and be one or more, got {', '.join(targets) or 'none'}.")
    if not any(source_kind(target) == "name" for target in targets):
        names = ("weights", "encoding", "joining")
        _check_left_out(repr(targets[0]), {name: getattr(options, name) for name in names})
    if isinstance(options, NamedData):
        named = next((target for target in targets if source_kind(target) != "run"), None)
        if named is None:
            _check_left_out("a run", {"images": options.images, "data_root": options.data_root})
        elif options.images is None:
            folder = f" For the folder of this name, write ./{named}." if Path(named).is_dir() else ""
            raise ValueError(
                f"`images` must be given for {named!r}, which is not the folder of a run: a folder of images, or the "
                f"name of a data set.{folder}"
            )
    opened = [open_model(target, options) for target in targets]
    for model in opened if images else ():
        if model.run is not None and model.info is None:
            raise ValueError(
                f"`runs` must be on images, which graticule {command} draws, got {str(model.run.folder)!r}, which is "
                f"on {model.run.task().inputs}; graticule evaluate scores runs of every task."
            )
    return opened


def _check_left_out(owner: str, options: dict[str, object]) -> None:
    """Check that no option is given for what `owner` has itself."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"`{name}` must be left out with {owner}, which has its own, got {str(value)!r}.")


def open_model(target: str, options: NamedModels | None = None) -> Opened:
    """Open a model: the folder of a run or of a published model, `hf:OWNER/NAME`, a file of weights in a run, the name
    of a model of graticule or timm, `timm:NAME`, or FILE.py:NAME.
    """
    options = options or NamedModels()
    kind = source_kind(target)
    if kind == "name":
        return _open_by_name(target, options)
    path = Path(target)
    if kind == "run" and not path.exists():
        RunFolder.open(target)  # an error that names the nearest runs
    model = open_module(target, checkpoint=options.checkpoint if kind == "run" and path.is_dir() else "best")
    run = run_of(path) if kind == "run" else None
    if run is None:
        return describe_model(target, model, target)
    recipe = run.recipe()
    title = f"{recipe.model}, {recipe.encoding or 'its own encoding'}, joining {recipe.joining}"
    size = getattr(recipe, "img_size", None) or getattr(model, "img_size", None)  # of an adaptation, the model's
    info = images_of(run) if "class_names" in run.described() and run.task().inputs == "images" else None
    return Opened(target, title, model, size, info, getattr(recipe, "augmentation", Augmentation()), run)


def open_source(target: str, command: str, options: NamedModels) -> Opened:
    """Open a model that is exported or published: one of timm is converted, and a new one needs no weights."""
    if source_kind(target) != "name" or is_ours(target):
        weights = options.weights or (RANDOM if is_ours(target) else None)
        (opened,) = open_models([target], replace(options, weights=weights), command, images=False)
    else:
        opened = open_model(target, replace(options, encoding=None, joining=None))
        opened = replace(opened, model=convert(opened.model, options.encoding, options.joining))
    if opened.run is not None and not opened.run.task().inputs.startswith("images"):
        raise ValueError(
            f"`model` must be on images for graticule {command}, got {str(opened.run.folder)!r}, which is on "
            f"{opened.run.task().inputs}."
        )
    return opened


def _open_by_name(target: str, options: NamedModels) -> Opened:
    """Build a model that is given by name, with its published weights, those of a file, or random ones."""
    has_our_name = is_ours(target)
    choices = {key: value for key in ("encoding", "joining") if (value := getattr(options, key)) is not None}
    model = create_named(target, **(choices if has_our_name else {}))
    if choices and not has_our_name:
        raise ValueError(
            f"`{next(iter(choices))}` must be left out with {target!r}, a model of timm, which has its own; "
            "graticule.convert makes a model of graticule of it."
        )
    has_source = any(model.pretrained_cfg.get(key) for key in ("hf_hub_id", "url", "file"))
    weights = options.weights or ("published weights" if has_source and not choices else RANDOM)
    if options.weights is None and weights != RANDOM:
        print(f"loading the published weights of {target}, which are downloaded once", file=sys.stderr)
        try:
            with quick_hub():
                model = create_named(target, pretrained=True)
        except (OSError, RuntimeError) as error:  # raised by the client of the hub without a connection
            reason = str(error).strip().partition("\n")[0][:200]
            raise ValueError(
                f"`weights` must be given, as the published weights of {target} could not be downloaded "
                f"({type(error).__name__}: {reason}): --weights FILE, or --weights random."
            ) from error
    elif weights == RANDOM:
        hint = "" if options.weights else "; see --weights"
        print(f"{target} has the weights of its initialization{hint}", file=sys.stderr)
    else:
        (load_checkpoint if has_our_name else load_own)(model, weights)
    position = "".join(f", {kind} {value}" for kind, value in choices.items())
    opened = describe_model(target, model, f"{target}{position}, weights: {weights}")
    if options.weights not in (None, RANDOM) and opened.info is not None and (names := label_names(weights)):
        opened = replace(opened, info=replace(opened.info, class_names=names))
    return replace(opened, states_info=opened.states_info and (has_source or not has_our_name))


def describe_model(target: str, model: nn.Module, title: str) -> Opened:
    """Return a model with the properties of its images from its configuration."""
    model = model.eval()
    configured = getattr(model, "pretrained_cfg", None) or {}
    stem = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)
    channels = int(getattr(model, "in_chans", 0) or (configured.get("input_size") or (stem,))[0])
    mean, std = (
        (tuple(configured.get(key) or default) * channels)[:channels]
        for key, default in (("mean", IMAGENET_DEFAULT_MEAN), ("std", IMAGENET_DEFAULT_STD))
    )
    resizing = {name: value for name in ("interpolation", "crop_pct") if (value := configured.get(name))}
    mode: Any = configured.get("crop_mode") or "center"
    info = DatasetInfo("images", label_names(model), channels, None, mean, std, mode)
    size = view_of(model).img_size
    return Opened(target, title, model, size, info, Augmentation(**resizing), states_info="mean" in configured)


def test_data(opened: Opened, options: NamedData) -> DataModule:
    """Return the test images for a model: those of its run, or those of `options.images`."""
    if opened.run is not None:
        return opened.run.data()
    assert options.images is not None
    return named_data(opened, options.images, options.data_root)


def named_data(opened: Opened, name: str, root: Path | None = None) -> DataModule:
    """Return the test images of a folder or a data set, resized and normalized for a model."""
    assert opened.info is not None
    if name not in list_datasets():
        if not (is_path(name) or Path(name).is_dir()):
            known_name("images", name, list_datasets())
        return folder_data(opened, Path(name))
    data = DataModule(name, root=root, size=opened.size, augmentation=opened.augmentation)
    if data.info.channels != opened.info.channels:
        raise ValueError(
            f"`images` must have {opened.info.channels} channels, as {opened.target} takes, got "
            f"{name!r} with {data.info.channels}."
        )
    if opened.states_info:  # as for a folder of these images
        data.info = replace(opened.info, name=data.info.name, class_names=data.info.class_names)
    return data


def folder_data(opened: Opened, folder: Path, least: int = 1, **options: Any) -> FolderModule:
    """Return the images of a folder, at least `least`, resized and normalized for a model; see `FolderModule`."""
    assert opened.info is not None
    if len(opened.size) > 2:
        raise ValueError(f"`model` must take images for a folder of images, got {opened.target!r}, which takes videos.")
    data = FolderModule(folder, opened.info, opened.size, opened.classes, augmentation=opened.augmentation, **options)
    if data.num_test < least:
        raise ValueError(f"`images` must be at least {least}, got {data.num_test} in {folder}.")
    return data


def check_labels(opened: Opened, data: Any, source: str) -> None:
    """Check that the labels of data from `named_data` are outputs of a model; say so if only their number tells."""
    assert opened.info is not None
    names, count = opened.info.class_names, opened.classes
    classes = getattr(data, "folders", data.info.class_names)
    labels = class_labels(classes, names, count)
    if labels is None or (not hasattr(data, "folders") and labels != list(range(len(classes)))):
        if names:
            check_class_names(classes, names, opened.target, "images")
        raise ValueError(
            f"`images` must have the {count} classes of {opened.target}, got {len(classes) or 'none'} in {source!r}."
        )
    if not names:
        print(f"{printable(opened.target)} does not name its classes: those of {source} are in order", file=sys.stderr)


def label_models(opened: Sequence[Opened]) -> list[str]:
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
    try:
        return read(path)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise ValueError(f"`images` must be images, got {path}, which cannot be read as one ({reason}).") from None


def check_task_options(task: str, **values: Any) -> None:
    """Check that no option of the evaluation of another task is given."""
    options = {name: [field.name for field in fields(kind.evaluation)] for name, kind in list_tasks().items()}
    known = options[task]
    for name, value in values.items():
        if value and name not in known:
            others = [other for other, names in options.items() if name in names]
            has = f"has {' and '.join(f'--{option}' for option in known)}" if known else "has no such options"
            text = " ".join(map(str, value)) if isinstance(value, list) else value
            raise ValueError(
                f"`{name}` must be left out with the task {task}, which {has}, got {text}; --{name} is for "
                f"{' and '.join(others)}."
            )


def choose_device(name: str) -> str:
    """Resolve auto to cuda if there is a GPU, otherwise to cpu."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.Generator(name)
    except (RuntimeError, AssertionError) as error:  # the latter if PyTorch was built without it
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"`device` must be one that PyTorch has here, such as cpu, got {name!r} ({reason}).") from None
    return name
