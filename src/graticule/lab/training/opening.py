"""Open the model of a name: a run or its weights, a published model, a name of graticule or timm, or FILE.py:NAME."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NotRequired

import timm
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn
from typing_extensions import TypedDict

from graticule.backbones.base import Backbone
from graticule.backbones.registry import create_model, list_models
from graticule.checkpoints.load import load_checkpoint, load_own
from graticule.checkpoints.read import read_state
from graticule.external.attach import NAME
from graticule.external.convert.conversion import convert
from graticule.external.convert.parts import can_convert
from graticule.external.traced_model import view_of
from graticule.hub.config import Preparation
from graticule.hub.files import CONFIG, quick_hub
from graticule.hub.kinds import HUB, TIMM, from_pretrained
from graticule.lab.data.augmentation import Augmentation
from graticule.lab.data.images import DatasetInfo
from graticule.lab.training.checkpoints import load_weights
from graticule.lab.training.run import Run, run_of
from graticule.lab.training.run_folder import RunFolder, runs_in
from graticule.registry.checks import checked, is_path, known_name
from graticule.registry.fields import read_typed
from graticule.registry.plugins import load_plugin, load_plugins, module_name

#: The ends of the names of files of weights.
_WEIGHTS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
#: The value of `weights` for the initial weights.
RANDOM = "random"


@dataclass(frozen=True)
class LoadedModel:
    """A model and its properties.

    target: its source, as given.
    title: a line about it.
    model: the model, in evaluation mode.
    run: its run, if it has one.
    images: facts of its images, with the names of its classes if they are known; None for a run that is not on images.
    img_size: (height, width) in pixels of its images, or with a depth; None if unknown.
    augmentation: the resizing of its images.
    has_own_normalization: whether mean and std come from the configuration of its weights, not only of its name.
    """

    target: str
    title: str
    model: nn.Module
    run: Run | None = None
    images: DatasetInfo | None = None
    img_size: tuple[int, ...] | None = None
    augmentation: Augmentation = field(default_factory=Augmentation)
    has_own_normalization: bool = True

    @property
    def folder(self) -> Path:
        """The default folder of results: its run folder, or runs/NAME."""
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
    def preprocessing(self) -> dict[str, Any]:
        """The entries of timm's configuration that the model of a run lacks: mean, std and names of classes."""
        if self.run is None:
            return {}
        facts = self.run.described() if self.images is None else vars(self.images)
        names = list(facts["class_names"])  # none if the model can be adapted alone
        return {"mean": list(facts["mean"]), "std": list(facts["std"]), **({"label_names": names} if names else {})}

    @property
    def num_classes(self) -> int:
        """The number of its classes; 0 if it is not a classifier."""
        return int(getattr(self.model, "num_classes", 0))


def open_model(
    target: str,
    weights: str | None = None,
    *,
    encoding: str | None = None,
    joining: str | None = None,
    checkpoint: Literal["best", "last"] = "best",
    converted: bool = False,
) -> LoadedModel:
    """Open a model for inspection.

    Args:
        target: the folder of a run or of a published model, `hf:OWNER/NAME`, a file of weights in a run, the name of a
            model of graticule or timm, `timm:NAME`, or FILE.py:NAME.
        weights: of a model by name: a file, or random (default: its published weights, if any).
        encoding: of a model by name.
        joining: of a model by name.
        checkpoint: of a run.
        converted: convert a model of timm, which then takes an encoding and a joining, too, or of FILE.py:NAME, unless
            a position is attached to it.
    """
    kind, path = source_kind(target), Path(target)
    position = {key: value for key, value in (("encoding", encoding), ("joining", joining)) if value is not None}
    if kind == "name":
        return _open_by_name(target, weights, position, converted)
    for name, value in (("weights", weights), *position.items()):
        if value is not None:
            raise ValueError(f"`{name}` must be left out with {target!r}, which has its own, got {value!r}.")
    if kind == "run" and not path.exists():
        RunFolder.open(target)  # an error that names the nearest runs
    model = open_module(target, checkpoint=checkpoint if kind == "run" and path.is_dir() else "best")
    if converted and kind == "module" and can_convert(model) and not hasattr(model, NAME):
        model = convert(model)
    run = run_of(path) if kind == "run" else None
    if run is None:
        return describe_model(target, model, target)
    recipe, task = run.recipe(), run.task()
    title = f"{recipe.model}, {run.position}"
    size = getattr(recipe, "img_size", None) or getattr(model, "img_size", None)  # of an adaptation, the model's
    augmentation = getattr(recipe, "augmentation", Augmentation())
    return LoadedModel(target, title, model, run, task.images(run.described()), size, augmentation)


def describe_model(target: str, model: nn.Module, title: str) -> LoadedModel:
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
    images = DatasetInfo("images", label_names(model), channels, None, mean, std, mode)
    augmentation = Augmentation(**resizing)
    return LoadedModel(target, title, model, None, images, view_of(model).img_size, augmentation, "mean" in configured)


def _open_by_name(target: str, weights: str | None, position: dict[str, str], converted: bool) -> LoadedModel:
    """Build a model that is given by name, with its published weights, the weights of a file, or random ones."""
    ours = is_ours(target)
    if position and not (ours or converted):
        raise ValueError(
            f"`{next(iter(position))}` must be left out with {target!r}, a model of timm, which has its own; "
            "graticule.convert makes a model of graticule of it."
        )
    model = create_named(target, **(position if ours else {}))
    has_source = any(model.pretrained_cfg.get(key) for key in ("hf_hub_id", "url", "file"))
    source = weights or ("published weights" if has_source and not (ours and position) else RANDOM)
    if weights is None and source != RANDOM:
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
    elif source == RANDOM:
        print(f"{target} has the weights of its initialization{'' if weights else '; see --weights'}", file=sys.stderr)
    else:
        weight = read_state(source).get(f"{model.pretrained_cfg.get('classifier')}.weight")
        if weight is not None and len(weight) != model.num_classes:
            print(f"{source} has {len(weight)} classes, and {target} is built with as many", file=sys.stderr)
            model.reset_classifier(len(weight))
        (load_checkpoint if ours else load_own)(model, source)
    words = "".join(f", {kind} {value}" for kind, value in position.items())
    opened = describe_model(target, model, f"{target}{words}, weights: {source}")
    if weights not in (None, RANDOM) and opened.images is not None and (names := label_names(source)):
        opened = replace(opened, images=replace(opened.images, class_names=names))
    if converted and not ours:
        opened = replace(opened, model=convert(model, position.get("encoding"), position.get("joining")))
    return replace(opened, has_own_normalization=opened.has_own_normalization and (has_source or not ours))


def source_kind(source: str) -> Literal["module", "published", "run", "name"]:
    """Return the kind of a source; a name without a separator is a model, also beside a folder of this name."""
    if module_name(source) is not None:
        return "module"
    if source.startswith(HUB) or (is_path(source) and (Path(source) / CONFIG).is_file()):
        return "published"
    return "run" if is_path(source) or source.endswith(_WEIGHTS) else "name"


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
    path, hosted = Path(source), str(source).startswith((HUB, TIMM))
    run = None if hosted else run_of(path)
    if hosted or (run is None and (path / CONFIG).is_file()):
        if checkpoint != "best":
            raise ValueError(f"`checkpoint` must be left out for a published model, got {checkpoint!r}.")
        return from_pretrained(source, plugin=plugin)
    if not path.exists():
        raise FileNotFoundError(
            f"`source` must be a run or a file of its weights, got {str(path)!r}, which does not exist; the name of a "
            "published model begins with timm: or hf:, and graticule.create_model builds the models of list_models()."
        )
    if run is None:
        why = "has no recipe.json" if path.is_dir() else "is not in the folder of a run"
        raise ValueError(
            f"`source` must be a run or a file of its weights, whose model is known, got {str(path)!r}, which {why}; "
            "build the model and call graticule.load_checkpoint(model, path), or name it to a command, as in "
            "deit_tiny_patch16_224 --weights FILE."
        )
    if run.folder != path and checkpoint != "best":
        raise ValueError(f"`checkpoint` must be left out if `source` is a file, got {checkpoint!r}.")
    load_plugins(plugin)
    if run.folder == path:
        return run.model(checkpoint=checkpoint)
    return load_weights(run.task().build_model(run.described()), path).eval()


def open_module(source: str, *others: type, checkpoint: Literal["best", "last"] = "best") -> Any:
    """Open the module of FILE.py:NAME, or the result of a function of this name, or another source as `load` does.

    An object in a file can also be of one of the classes `others`. A model by name has random weights.
    """
    if source_kind(source) == "name":
        return create_named(source)
    if (in_file := module_name(source)) is None:
        return load(source, checkpoint=checkpoint)
    (file, name), kinds = in_file, (nn.Module, *others)
    if not Path(file).is_file():
        raise FileNotFoundError(f"`FILE` must be a Python file in FILE.py:NAME, got {file!r}, which does not exist.")
    plugin = load_plugin(file)
    names = [key for key in vars(plugin) if not key.startswith("_")]
    model = getattr(plugin, known_name("NAME", name, names))
    if not isinstance(model, kinds):
        if not callable(model):
            raise ValueError(f"`{name}` of {file} must be a module or a function that builds one, got {model!r}.")
        try:
            inspect.signature(model).bind()
        except TypeError as error:
            raise ValueError(f"`{name}` of {file} must need no arguments: {error}.") from None
        model = model()
    if not isinstance(model, kinds):
        raise ValueError(f"`{name}` of {file} must return a torch.nn.Module, got {type(model).__name__}.")
    return model.eval() if isinstance(model, nn.Module) else model


def is_ours(name: str) -> bool:
    """Return whether `create_named` builds a model of this library; timm's models of the same names are timm:NAME."""
    return not name.startswith(TIMM) and name in list_models()


def create_named(name: str, argument: str = "model", **options: Any) -> Any:
    """Build a model of graticule or timm by its name, where timm:NAME is always timm's.

    The error for an unknown one names `argument`, and the nearest models and runs.
    """
    if is_ours(name):
        return create_model(name, **options)
    bare = name.removeprefix(TIMM)
    if timm.is_model(bare) and ("." not in bare or bare in timm.list_pretrained()):  # with a known tag
        return timm.create_model(bare, **options)
    if Path(name).exists():
        paths = {bare: f"{name}:NAME" if name.endswith(".py") else f"./{name}"}
    else:
        paths = {known: known for known in (*list_models(), *timm.list_models(), *timm.list_pretrained())}
        paths |= {path.name: str(path) for folder in (Path("runs"), Path()) for path in runs_in(folder)}
    near = [repr(paths[known]) for known in difflib.get_close_matches(bare, paths, n=3)]
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    raise ValueError(
        f"`{argument}` must be the folder of a run or of a published model, a file of weights in a run, the name of a "
        f"model of graticule or timm, or FILE.py:NAME, got {name!r}: there is no such model{hint}"
    )


def open_backbone(source: str, weights: bool = True) -> Backbone:
    """Open any model as a backbone: one of timm or transformers is converted, and one of a dense model is taken out.

    Without `weights`, timm builds its model without a download.
    """
    model = from_pretrained(source) if weights and source.startswith(TIMM) else open_module(source)
    model = getattr(model, "backbone", model)
    try:
        return model if isinstance(model, Backbone) else convert(model)
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
    """Return the names of the classes of a model, a run, a published folder, or a file in one of these folders.

    They are in the order of the outputs, and empty if they are not known.
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
    config_values: _Named = read_typed(config, _Named)
    names = config_values.get("pretrained_cfg", Preparation()).label_names or config_values.get("label_names") or ()
    labels = config_values.get("id2label", {})
    generic = all(name == f"LABEL_{index}" for index, name in labels.items())
    return tuple(names or ([] if generic else [labels[index] for index in sorted(labels)]))
