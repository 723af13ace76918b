"""Opening of models: a run, a file of its weights, a published folder, a name, or a module in a Python file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graticule.lab.commands.targets import (
    RANDOM,
    TIMM,
    NamedData,
    NamedModels,
    check_name,
    check_on_images,
    check_targets,
    is_named,
    is_published,
    run_labels,
)
from graticule.registry.checks import is_path, known_name, printable
from graticule.registry.plugins import module_name

if TYPE_CHECKING:
    from torch import nn

    from graticule.lab.data.augmentation import Augmentation
    from graticule.lab.data.images import DatasetInfo
    from graticule.lab.data.module import DataModule
    from graticule.lab.data.pictures import Pictures
    from graticule.lab.training.run import Run


@dataclass(frozen=True)
class Opened:
    """A model and its properties.

    target: its source, as given.
    title: a line about it.
    model: the model, in evaluation mode.
    img_size: (height, width) in pixels of its images, or with a depth; None if unknown.
    info: facts of its images, with the names of its classes if they are known.
    augmentation: the resizing of its images.
    run: its run, if it has one.
    states_info: whether the mean and the standard deviation of `info` belong to its weights, and not only to its name.
    """

    target: str
    title: str
    model: nn.Module
    img_size: tuple[int, ...] | None
    info: DatasetInfo | None
    augmentation: Augmentation | None
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
    """Check the sources of models, before PyTorch is imported, and open them.

    Args:
        targets: sources, as in `open_model`.
        options: options of the command.
        command: its name, for messages.
        images: whether runs must be on images.
    """
    check_targets(targets, options, command)
    if images:
        check_on_images(targets, command)
    return [open_model(target, options) for target in targets]


def open_model(target: str, options: NamedModels | None = None) -> Opened:
    """Open a model.

    Args:
        target: folder of a run or of a published model, `hf:OWNER/NAME`, file of weights in a run, name of a model of
            graticule or timm, `timm:NAME`, or FILE.py:NAME.
        options: checkpoint of a run, and options of models that are given by name.
    """
    options = options or NamedModels()
    if (built := _built(target)) is not None:
        return describe_model(target, built, target)
    if is_named(target):
        return _by_name(target, options)
    from graticule.lab.training.opening import load
    from graticule.lab.training.run import run_of

    path = Path(target)
    opened: Run | None = run_of(path)
    if opened is None:
        raise ValueError(
            f"`model` must be a run or a file of weights within its folder, got {target!r}, which does not say what "
            f"model it is for; name the model, as in deit_tiny_patch16_224 --weights {target}"
        )
    recipe = opened.recipe()
    title = f"{recipe.model}, {recipe.encoding or 'its own encoding'}, joining {recipe.joining}"
    in_folder = opened.folder != path
    model = load(path) if in_folder else opened.model(checkpoint=options.checkpoint)
    size = getattr(recipe, "img_size", None) or getattr(model, "img_size", None)  # of an adaptation, the model's
    augmentation = getattr(recipe, "augmentation", None)
    return Opened(target, title, model, size, None, augmentation, opened)


def open_source(target: str, command: str, options: NamedModels) -> Opened:
    """Open a model that is exported or published: one of timm is converted, and a new one needs no weights."""
    check_targets([target], options, command)
    if (built := _built(target)) is not None:
        return Opened(target, target, built, None, None, None)
    from graticule.backbones.registry import list_models

    if not is_named(target) or target in list_models():
        opened = open_model(target, replace(options, weights=options.weights or RANDOM))
    else:
        from graticule.external.convert.conversion import convert

        opened = open_model(target, replace(options, encoding=None, joining=None))
        opened = replace(opened, model=convert(opened.model, options.encoding, options.joining))
    if opened.run is not None and not opened.run.task().inputs.startswith("images"):
        raise ValueError(
            f"`model` must be on images for graticule {command}, got {str(opened.folder)!r}, which is on "
            f"{opened.run.task().inputs}."
        )
    return opened


def _built(target: str) -> nn.Module | None:
    """Return the module in a Python file, or the published model, that a target names; None for others."""
    if (module := module_name(target)) is not None:
        from graticule.lab.training.opening import module_of_file

        built: nn.Module = module_of_file(*module).eval()
        return built
    if not is_published(target):
        return None
    from graticule.hub.kinds import from_pretrained

    published: nn.Module = from_pretrained(target)
    return published


def with_images(opened: Opened) -> Opened:
    """Return an opened run with the facts of its images; a model without a run is unchanged."""
    from graticule.lab.tasks.classification import images_of

    if opened.run is None:
        return opened
    return replace(opened, info=images_of(opened.run), augmentation=opened.run.recipe().augmentation)


def test_data(opened: Opened, options: NamedData) -> DataModule:
    """Return the test images for a model: those of its run, or those of `options.images`."""
    if opened.run is not None:
        data: DataModule = opened.run.data()
        return data
    assert options.images is not None
    return named_data(opened, options.images, options.data_root)


def named_data(opened: Opened, name: str, root: Path | None = None) -> DataModule:
    """Return the test images of a folder or a data set, resized and normalized for a model."""
    assert opened.info is not None
    from graticule.lab.data.module import DataModule
    from graticule.lab.data.registry import list_datasets

    if name not in list_datasets():
        if not (is_path(name) or Path(name).is_dir()):
            known_name("images", name, list_datasets())
        return pictures_of(opened, Path(name))
    data = DataModule(name, root=root, size=opened.size, augmentation=opened.augmentation)
    data.setup()
    if data.info.channels != opened.info.channels:
        raise ValueError(
            f"`images` must have {opened.info.channels} channels, as {opened.target} takes, got "
            f"{name!r} with {data.info.channels}."
        )
    if opened.states_info:  # as for a folder of these images
        data.info = replace(opened.info, name=data.info.name, class_names=data.info.class_names)
    return data


def pictures_of(opened: Opened, folder: Path, least: int = 1, **options: Any) -> Pictures:
    """Return the images of a folder, at least `least`, resized and normalized for a model; see `Pictures`."""
    from graticule.lab.data.pictures import Pictures

    assert opened.info is not None
    size: Any = opened.size
    if len(size) > 2:
        raise ValueError(f"`model` must take images for a folder of images, got {opened.target!r}, which takes films.")
    found = Pictures(folder, opened.info, size, opened.classes, augmentation=opened.augmentation, **options)
    if found.num_test < least:
        raise ValueError(f"`images` must be at least {least}, got {found.num_test} in {folder}.")
    return found


def check_labels(opened: Opened, data: Any, given: str) -> None:
    """Check that the labels of data from `named_data` are outputs of a model; say so if only their number tells."""
    assert opened.info is not None
    from graticule.lab.data.images import check_class_names, class_labels

    names, count = opened.info.class_names, opened.classes
    found = getattr(data, "folders", data.info.class_names)
    labels = class_labels(found, names, count)
    if labels is None or (not hasattr(data, "folders") and labels != list(range(len(found)))):
        if names:
            check_class_names(found, names, opened.target, "images")
        raise ValueError(
            f"`images` must have the {count} classes of {opened.target}, got {len(found) or 'none'} in {given!r}."
        )
    if not names:
        print(f"{printable(opened.target)} does not name its classes: those of {given} are in order", file=sys.stderr)


def test_task(opened: Opened) -> Any:
    """Return the task that scores a model: that of its run, or classification for a model by name."""
    if opened.run is not None:
        return opened.run.task()
    if not opened.classes:
        raise ValueError(f"`models` must have classes to be scored, got {opened.target!r}, which has none.")
    from graticule.lab.tasks.classification import Recipe
    from graticule.lab.training.task import task_of

    return task_of(Recipe(model=opened.target, img_size=opened.size))


def labels_of(opened: Sequence[Opened]) -> list[str]:
    """Return distinct labels of models."""
    runs = [one.run for one in opened if one.run is not None and Path(one.target) == one.run.folder]
    names = dict(zip([id(run) for run in runs], run_labels(runs), strict=True)) if runs else {}
    return [names.get(id(one.run), printable(one.target)) for one in opened]


def _by_name(target: str, options: NamedModels) -> Opened:
    """Build a model that is given by name."""
    import timm

    from graticule.backbones.registry import create_model, list_models
    from graticule.checkpoints.load import load_checkpoint, load_own
    from graticule.hub.files import quick_hub
    from graticule.lab.training.opening import label_names

    chosen = {name: value for name in ("encoding", "joining") if (value := getattr(options, name)) is not None}
    name = target.removeprefix(TIMM)
    check_name(target)
    own = name in list_models() and not target.startswith(TIMM)
    if not own and chosen:
        raise ValueError(
            f"`{next(iter(chosen))}` must be left out with {target!r}, a model of timm, which has its own; "
            "graticule.convert makes a model of graticule of it."
        )
    build: Any = create_model if own else timm.create_model
    model: Any = build(name, **chosen)
    sourced = any(model.pretrained_cfg.get(key) for key in ("hf_hub_id", "url", "file"))
    published = sourced and not chosen
    if options.weights is None and published:
        print(f"loading the published weights of {name}, which are downloaded once", file=sys.stderr)
        try:
            with quick_hub():
                model = build(name, pretrained=True)
        except (OSError, RuntimeError) as error:  # raised by the client of the hub without a connection
            reason = str(error).strip().partition("\n")[0][:200]
            raise ValueError(
                f"`weights` must be given, as the published weights of {name} could not be downloaded "
                f"({type(error).__name__}: {reason}): --weights FILE, or --weights random."
            ) from error
    elif options.weights in (None, RANDOM):
        hint = "" if options.weights else "; see --weights"
        print(f"{name} has the weights of its initialization{hint}", file=sys.stderr)
    else:
        (load_checkpoint if own else load_own)(model, options.weights)
    position = "".join(f", {what} {value}" for what, value in chosen.items())
    weights = "published weights" if options.weights is None and published else options.weights or RANDOM
    opened = describe_model(target, model, f"{target}{position}, weights: {weights}")
    if options.weights not in (None, RANDOM) and opened.info is not None and (names := label_names(options.weights)):
        opened = replace(opened, info=replace(opened.info, class_names=names))
    return replace(opened, states_info=opened.states_info and (sourced or not own))


def describe_model(target: str, model: nn.Module, title: str) -> Opened:
    """Return a model with the properties of its images from its configuration."""
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    from torch.nn import Conv2d

    from graticule.external.open_view import view_of
    from graticule.lab.data.augmentation import Augmentation
    from graticule.lab.data.images import DatasetInfo
    from graticule.lab.training.opening import label_names

    model = model.eval()
    configured = getattr(model, "pretrained_cfg", None) or {}
    size = view_of(model).img_size
    stem = next((one.in_channels for one in model.modules() if isinstance(one, Conv2d)), 3)
    channels = int(getattr(model, "in_chans", 0) or (configured.get("input_size") or (stem,))[0])
    mean, std = (
        (tuple(configured.get(key) or known) * channels)[:channels]
        for key, known in (("mean", IMAGENET_DEFAULT_MEAN), ("std", IMAGENET_DEFAULT_STD))
    )
    given = {name: value for name in ("interpolation", "crop_pct") if (value := configured.get(name))}
    mode: Any = configured.get("crop_mode") or "center"
    info = DatasetInfo("images", label_names(model), channels, None, mean, std, mode)
    augmentation = Augmentation(**given)
    return Opened(target, title, model, size, info, augmentation, states_info="mean" in configured)
