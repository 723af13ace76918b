"""Opening of models: a run, a file of its weights, a published folder, a name, or a module in a Python file."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graticule.lab.arguments import Rare
from graticule.lab.training.run_folder import RunFolder, runs_in
from graticule.registry.checks import is_path, known_name, printable

if TYPE_CHECKING:
    from torch import nn

    from graticule.lab.data.augmentation import Augmentation
    from graticule.lab.data.images import DatasetInfo
    from graticule.lab.data.module import DataModule
    from graticule.lab.training.run import Run


def check_task_options(task: str, **given: Any) -> None:
    """Check that no option of the evaluation of another task is given.

    Raises:
        ValueError: naming the option, and the options of the task.
    """
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


def check_on_images(runs: Sequence[Any], command: str) -> None:
    """Check that all runs are on images.

    Raises:
        ValueError: for the first that is not, naming the commands that accept it.
    """
    for run in runs:
        if run.task().inputs != "images":
            raise ValueError(
                f"`runs` must be on images, which graticule {command} draws, got {str(run.folder)!r}, which is on "
                f"{run.task().inputs}; for text there are graticule evaluate RUN --lengths 128 512, graticule "
                "correlations RUN and graticule generate RUN; for detection and segmentation, graticule evaluate RUN "
                "and graticule predict RUN."
            )


#: The prefixes of names on the hub, and of timm's models; those of `graticule.hub.kinds`, which imports PyTorch.
HUB, TIMM = "hf:", "timm:"
#: The value of `weights` for those of the initialization.
RANDOM = "random"
#: The ends of the names of files of weights.
WEIGHTS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")


@dataclass(kw_only=True)
class NamedModels:
    """The options of models that are given by name."""

    weights: str | None = None
    """for a model given by name: checkpoint file, or random (default: its published weights, if any)"""
    encoding: str | None = None
    """for a model of graticule given by name: encoding (default: its own)"""
    joining: str | None = None
    """for a model of graticule given by name: joining (default: its own)"""
    checkpoint: Rare[Literal["best", "last"]] = "best"
    """checkpoint of a run"""


@dataclass(kw_only=True)
class NamedData(NamedModels):
    """The options of models that are given by name, and of the images for them."""

    data: str | None = None
    """for models that are not runs: folder of images at any depth, or name of a data set; runs have their own"""
    data_root: Rare[Path | None] = None
    """folder of the data set, if `data` is a name"""


@dataclass(frozen=True)
class Opened:
    """A model and its properties.

    target: its source, as given.
    title: a line about it.
    model: the model, in evaluation mode.
    img_size: (height, width) in pixels of its images; None if unknown.
    info: facts of its images, with the names of its classes if they are known.
    augmentation: the resizing of its images.
    folder: the default folder of results.
    run: its run, if it has one.
    states_info: whether the mean and the standard deviation of `info` belong to its weights, and not only to its name.
    """

    target: str
    title: str
    model: nn.Module
    img_size: tuple[int, int] | None
    info: DatasetInfo | None
    augmentation: Augmentation | None
    folder: Path = field(default_factory=Path)
    run: Run | None = None
    states_info: bool = True


def check_targets(targets: Sequence[str], options: NamedModels, command: str) -> None:
    """Check the sources of models, before PyTorch is imported.

    Raises:
        ValueError, FileNotFoundError: if there are none or duplicates, a path is not a run, or options are for names.
    """
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
        for name in ("weights", "encoding", "joining"):
            if (given := getattr(options, name)) is not None:
                raise ValueError(
                    f"`{name}` must be left out with {targets[0]!r}, which has its own, got {str(given)!r}."
                )
    if not isinstance(options, NamedData):
        return
    if not any(is_named(target) for target in targets):
        for name in ("data", "data_root"):
            if (given := getattr(options, name)) is not None:
                raise ValueError(f"`{name}` must be left out with a run, which has its own, got {str(given)!r}.")
    elif options.data is None:
        named = next(target for target in targets if is_named(target))
        check_name(named)
        raise ValueError(
            f"`data` must be given for {named!r}, which is not the folder of a run: a folder of images, or the name of "
            "a data set."
        )


def check_inputs(targets: Sequence[str], command: str) -> None:
    """Check that all runs among the sources of models are on images.

    Raises:
        ValueError: for the first that is not, naming the commands that accept it.
    """
    from graticule.lab.training.run import run_of

    runs = [run_of(Path(target)) for target in targets if not is_named(target)]
    check_on_images([run for run in runs if run is not None], command)


def is_named(target: str) -> bool:
    """Return whether a model is no run and no file of its weights, so that it has no data of its own."""
    return is_published(target) or not (is_folder(target) or _is_file(target))


def is_folder(target: str) -> bool:
    """Return whether a model is given by a folder, or by a name on the hub; a bare name is a model."""
    return is_path(target) and not target.rpartition(":")[0].endswith(".py")


def is_published(target: str) -> bool:
    """Return whether a model is given by a folder that was published or saved, or by a name on the hub."""
    return target.startswith(HUB) or (is_folder(target) and (Path(target) / "config.json").is_file())


def check_name(target: str) -> None:
    """Check that there is a model of this name, the file of FILE.py:NAME, or the published folder.

    Raises:
        ValueError, FileNotFoundError: if there is none, with the nearest names and runs.
    """
    from graticule.lab.studies.catalog import catalog

    file, colon, _ = target.rpartition(":")
    if colon and file.endswith(".py"):
        if not Path(file).is_file():
            raise FileNotFoundError(f"`model` must be FILE.py:NAME, got {target!r}, whose file does not exist.")
        return
    if target in catalog()["models"] or is_published(target):  # without PyTorch
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


def open_models(targets: Sequence[str], options: NamedModels, command: str, images: bool = True) -> list[Opened]:
    """Check the sources of models, before PyTorch is imported, and open them.

    Args:
        targets: sources, as in `open_model`.
        options: options of the command.
        command: its name, for messages.
        images: whether runs must be on images.

    Raises:
        ValueError, FileNotFoundError: if one cannot be opened.
    """
    check_targets(targets, options, command)
    if images:
        check_inputs(targets, command)
    return [open_model(target, options) for target in targets]


def open_model(target: str, options: NamedModels | None = None) -> Opened:
    """Open a model.

    Args:
        target: folder of a run or of a published model, `hf:OWNER/NAME`, file of weights in a run, name of a model of
            graticule or timm, `timm:NAME`, or FILE.py:NAME.
        options: checkpoint of a run, and options of models that are given by name.

    Raises:
        ValueError, FileNotFoundError: if it cannot be opened.
    """
    options = options or NamedModels()
    if is_named(target):
        file, colon, name = target.rpartition(":")
        if colon and file.endswith(".py"):
            return describe_model(target, module_of_file(file, name), target)
        if is_published(target):
            from graticule.hub.kinds import from_pretrained

            return describe_model(target, from_pretrained(target), target)
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
    size = getattr(recipe, "img_size", None)
    augmentation = getattr(recipe, "augmentation", None)
    return Opened(target, title, model, size, None, augmentation, opened.folder, opened)


def open_source(target: str, command: str, options: NamedModels) -> Opened:
    """Open a model that is exported or published: one of timm is converted, and a new one needs no weights.

    Raises:
        ValueError, FileNotFoundError: if it cannot be opened, or is on text.
    """
    check_targets([target], options, command)
    file, _, name = target.rpartition(":")
    if file.endswith(".py"):
        return Opened(target, target, module_of_file(file, name).eval(), None, None, None)
    if is_published(target):
        from graticule.hub.kinds import from_pretrained

        return Opened(target, target, from_pretrained(target), None, None, None)
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


def with_images(opened: Opened) -> Opened:
    """Return an opened run with the facts of its images; a model without a run is unchanged."""
    from graticule.lab.tasks.classification import images_of

    if opened.run is None:
        return opened
    return replace(opened, info=images_of(opened.run), augmentation=opened.run.recipe().augmentation)


def test_data(opened: Opened, options: NamedData) -> DataModule:
    """Return the test images for a model: those of its run, or those of `options.data`.

    Raises:
        ValueError, FileNotFoundError: if they do not exist, or have another number of channels.
    """
    if opened.run is not None:
        data: DataModule = opened.run.data()
        return data
    assert options.data is not None
    return named_data(opened, options.data, options.data_root)


def named_data(opened: Opened, name: str, root: Path | None = None) -> DataModule:
    """Return the test images of a folder or a data set, resized and normalized for a model.

    Raises:
        ValueError, FileNotFoundError: if they do not exist, or have another number of channels.
    """
    assert opened.info is not None
    from graticule.lab.data.module import DataModule
    from graticule.lab.data.registry import list_datasets

    size = size_of(opened)
    if name not in list_datasets():
        if not (is_path(name) or Path(name).is_dir()):
            known_name("data", name, list_datasets())
        from graticule.lab.data.pictures import Pictures

        return Pictures(Path(name), opened.info, size, _classes(opened.model), augmentation=opened.augmentation)
    data = DataModule(name, root=root, size=size, augmentation=opened.augmentation)
    data.setup()
    if data.info.channels != opened.info.channels:
        raise ValueError(
            f"`data` must have images of {opened.info.channels} channels, as {opened.target} takes, got "
            f"{name!r} with {data.info.channels}."
        )
    if opened.states_info:
        data.info = replace(data.info, mean=opened.info.mean, std=opened.info.std)
    return data


def check_labels(opened: Opened, data: Any, given: str) -> None:
    """Check that the labels of data from `named_data` are outputs of a model; say so if only their number tells.

    Raises:
        ValueError: if they are not.
    """
    assert opened.info is not None
    from graticule.lab.data.images import check_class_names, class_labels

    names, count = opened.info.class_names, _classes(opened.model)
    found = getattr(data, "folders", data.info.class_names)
    labels = class_labels(found, names, count)
    if labels is None or (not hasattr(data, "folders") and labels != list(range(len(found)))):
        if names:
            check_class_names(found, names, opened.target, "data")
        raise ValueError(
            f"`data` must have the {count} classes of {opened.target}, got {len(found) or 'none'} in {given!r}."
        )
    if not names:
        print(f"{printable(opened.target)} does not name its classes: those of {given} are in order", file=sys.stderr)


def test_task(opened: Opened) -> Any:
    """Return the task that scores a model: that of its run, or classification for a model by name.

    Raises:
        ValueError: if a model by name has no classes.
    """
    if opened.run is not None:
        return opened.run.task()
    if not _classes(opened.model):
        raise ValueError(f"`models` must have classes to be scored, got {opened.target!r}, which has none.")
    from graticule.lab.tasks.classification import Recipe
    from graticule.lab.training.task import task_of

    return task_of(Recipe(model=opened.target, img_size=size_of(opened)))


def size_of(opened: Opened) -> tuple[int, int]:
    """Return the (height, width) in pixels of a model's images.

    Raises:
        ValueError: if it is unknown.
    """
    if opened.img_size is None:
        raise ValueError(f"`model` must have a known image size, got {opened.target!r}, which has none.")
    return opened.img_size


def labels_of(opened: Sequence[Opened]) -> list[str]:
    """Return distinct labels of models."""
    from graticule.lab.commands.options import run_labels

    runs = [one.run for one in opened if one.run is not None and Path(one.target) == one.run.folder]
    names = dict(zip([id(run) for run in runs], run_labels(runs), strict=True)) if runs else {}
    return [names.get(id(one.run), printable(one.target)) for one in opened]


def module_of_file(file: str, name: str) -> nn.Module:
    """Return the module `name` of a Python file, or the module that its function `name` builds.

    Raises:
        ValueError: if it is neither.
    """
    from torch import nn

    from graticule.registry.plugins import load_plugin

    module = load_plugin(file)
    known = [one for one in vars(module) if not one.startswith("_")]
    given = getattr(module, known_name("NAME", name, known))
    if not isinstance(given, nn.Module):
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
    if not isinstance(given, nn.Module):
        raise ValueError(f"`{name}` of {file} must return a torch.nn.Module, got {type(given).__name__}.")
    return given


def _by_name(target: str, options: NamedModels) -> Opened:
    """Build a model that is given by name."""
    import timm

    from graticule.backbones.registry import create_model, list_models
    from graticule.checkpoints.load import load_checkpoint
    from graticule.hub.files import quick_hub

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
    elif own:
        load_checkpoint(model, options.weights)
    else:
        _load_timm(model, name, options.weights)
    position = "".join(f", {what} {value}" for what, value in chosen.items())
    weights = "published weights" if options.weights is None and published else options.weights or RANDOM
    opened = describe_model(target, model, f"{target}{position}, weights: {weights}")
    return replace(opened, states_info=opened.states_info and (sourced or not own))


def _load_timm(model: nn.Module, name: str, path: str) -> None:
    from graticule.checkpoints.read import read_state

    state = read_state(path)
    own = model.state_dict()
    wrong = [key for key in own if key not in state or state[key].shape != own[key].shape]
    wrong += [key for key in state if key not in own]
    if wrong:
        raise ValueError(
            f"`weights` must be those of timm's {name}, got {path}, in which {len(wrong)} names or shapes differ, as "
            f"{printable(wrong[0])}."
        )
    model.load_state_dict(state)


def describe_model(target: str, model: nn.Module, title: str) -> Opened:
    """Return a model with the properties of its images from its configuration."""
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    from torch.nn import Conv2d

    from graticule.external.open_view import view_of
    from graticule.lab.data.augmentation import Augmentation
    from graticule.lab.data.images import DatasetInfo

    model = model.eval()
    configured = getattr(model, "pretrained_cfg", None) or {}
    size = view_of(model).img_size
    stem = next((one.in_channels for one in model.modules() if isinstance(one, Conv2d)), 3)
    channels = int(getattr(model, "in_chans", 0) or (configured.get("input_size") or (stem,))[0])
    mean, std = (
        (tuple(configured.get(key) or known) * channels)[:channels]
        for key, known in (("mean", IMAGENET_DEFAULT_MEAN), ("std", IMAGENET_DEFAULT_STD))
    )
    interpolation = configured.get("interpolation")
    crop = configured.get("crop_pct")
    given = {"interpolation": interpolation, "crop_pct": crop}
    augmentation = Augmentation(**{name: value for name, value in given.items() if value})
    names = tuple(configured.get("label_names") or ())
    info = DatasetInfo("images", names if len(names) == _classes(model) else (), channels, None, mean, std)
    return Opened(target, title, model, size, info, augmentation, states_info="mean" in configured)


def _classes(model: nn.Module) -> int:
    return int(getattr(model, "num_classes", 0))


def _is_plain(target: str) -> bool:
    """Return whether a target is the name of a model, which can have other weights and another position."""
    return is_named(target) and not is_published(target) and not target.rpartition(":")[0].endswith(".py")


def _is_file(target: str) -> bool:
    return target.endswith(WEIGHTS) or (is_path(target) and Path(target).is_file() and ".py" not in target)
