"""The interface of a task: its data, model, loss and score. The engine knows tasks by name only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import TypedDict

from graticule.backbones.registry import definitions_of
from graticule.checkpoints.transfer import Transfer, transfer
from graticule.lab.data.images import DatasetInfo
from graticule.lab.data.registry import DATASETS
from graticule.lab.data.sampling import TaskData
from graticule.lab.training.recipe import TrainingRecipe
from graticule.lab.training.results import Evaluation, Metric, Prediction
from graticule.lab.training.validation import HeldOutEvaluation
from graticule.registry.plugins import Definition, plugins_of
from graticule.registry.registry import Registry, options_of

#: A run, as read by a task: its `folder`, `recipe()` and `described()`, the description of the data. `Run` is one.
TrainedRun = Any


class _NoDescription(TypedDict):
    """A task whose model needs no facts about the data."""


class SourceModel(TypedDict):
    """A backbone that a recipe starts with, in recipe.json, so that its run does not need the source."""

    architecture: str
    model_args: dict[str, Any]


R = TypeVar("R", bound=TrainingRecipe)
D = TypeVar("D", bound=TaskData)


class Task(ABC, Generic[R, D]):
    """The interface of a task: data, model, loss, metric and evaluation.

    A task is one class, registered by `register_task`, and an instance is the task of one recipe.

    Args:
        recipe: the values of the run, an instance of `recipe_class`.
    """

    #: The recipe of the task: its fields are the options of `graticule train`.
    recipe_class: ClassVar[type[TrainingRecipe]]
    #: The evaluation of runs: its fields are the task's options of `graticule evaluate`.
    evaluation: ClassVar[type[Evaluation[Any]]] = HeldOutEvaluation
    #: The type (a TypedDict) of the values of `describe`; it is checked when recipe.json is read.
    description: ClassVar[Any] = _NoDescription
    #: The unit of an example in the progress bar.
    unit: ClassVar[str] = "ex"
    #: The inputs of the model, images or text: commands for classifiers accept runs on "images" only.
    inputs: ClassVar[str] = "images"
    #: `mixed_loss(model, batch)`: the loss of a batch after `mix`. It depends on tensors alone and never waits for the
    #: device, so its steps can be captured as a CUDA graph. A task may define it in the class that defines `loss`.
    mixed_loss: ClassVar[Any] = None

    recipe: R

    def __init__(self, recipe: R) -> None:
        self.recipe = recipe

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the task itself: a copy of a model, such as a moving average, has the same task."""
        return self

    @property
    def metric(self) -> Metric:
        return self.recipe.metric

    @abstractmethod
    def build_data(self, run: TrainedRun | None = None) -> D:
        """Build the data and check them as far as possible without reading all.

        Args:
            run: an existing run; the data must be those that it was trained on, as far as `describe` tells.
        """

    def loader(self) -> Definition | None:
        """Return the registered function that loads the data set of the recipe; recipe.json records its file."""
        if self.recipe.dataset not in DATASETS:
            return None  # the task has data of its own
        return DATASETS[self.recipe.dataset]

    def describe(self, data: D) -> dict[str, Any]:
        """Return the facts about the data that the model depends on, as plain values for recipe.json."""
        return {}

    def images(self, described: Mapping[str, Any]) -> DatasetInfo | None:
        """Return the facts of a classifier's images, from `describe`; None for other inputs."""
        if self.inputs != "images" or "class_names" not in described:
            return None
        facts = (described[name] for name in ("channels", "size", "mean", "std"))
        return DatasetInfo(self.recipe.dataset, tuple(described["class_names"]), *facts)

    @abstractmethod
    def build_model(self, described: Mapping[str, Any]) -> nn.Module:
        """Build the untrained model for the facts of `describe`."""

    def notes(self, data: D) -> list[str]:
        """Return sentences on data that the run leaves out; they are printed at its start."""
        return []

    def save(self, data: D, folder: Path) -> None:
        """Write files of the task into the folder of a new run."""

    def same_outputs(self, source: TrainedRun | None, names: Sequence[str], data: D) -> bool:
        """Return whether the outputs of weights mean the same as ours, so that their head can be loaded.

        Args:
            source: the run that the weights are from; None for others.
            names: the names of their classes; empty if they are not known.
            data: our data.

        Raises:
            ValueError: if the inputs of the run have another meaning, so that its weights cannot be used.
        """
        return True

    def take_weights(self, model: nn.Module, source: Path | Mapping[str, Tensor], same: bool) -> Transfer:
        """Load the weights of a checkpoint that fit into a new model, with the head if outputs mean the same."""
        return transfer(model, source, classifier=same)

    def setup(self, model: nn.Module, data: D, device: torch.device) -> None:
        """Prepare for the training or validation of `model` on `device`."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any, epoch: int) -> Tensor:
        """Return the mean loss of a training batch in an epoch, counted from 0.

        The batch has one entry per example in each of its elements.
        """

    def mix(self, batch: Any, epoch: int) -> Any:
        """Return a training batch after the changes that the host draws, such as mixup; by default, the same batch."""
        return batch

    def start_validation(self) -> None:
        """Clear the values that `validate` has collected, before the next validation."""

    @abstractmethod
    def validate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the values of the examples of a held-out batch, (n,) each: any `loss`, and those for `score`.

        Padding examples are left out. A metric that is not a function of sums, such as the average precision, is
        computed from values that this method collects in the task.
        """

    def score(self, sums: Mapping[str, float], count: int) -> float:
        """Return the metric from the sums of the values of `validate` over `count` examples of all processes.

        All processes call it, so that it can gather their collected values.
        """
        return sums[self.metric.key] / count

    def predict(self, model: nn.Module, image: Tensor, number: int, described: Mapping[str, Any]) -> Prediction:
        """Return the predictions of `model`, in evaluation mode, for an image.

        Args:
            model: the model of a run.
            image: uint8, (3, height, width), as in its file.
            number: id of the image in the output.
            described: the description of the data that the run recorded.

        Raises:
            ValueError: if the task has no predictions for images.
        """
        raise ValueError(f"`run` must be of a task that predicts for images, got one of {self.recipe.task}.")

    @property
    def rate(self) -> tuple[str, int]:
        """Return the unit of progress, and the amount per step."""
        return self.unit, self.recipe.batch_size

    @property
    def sync_batchnorm(self) -> bool:
        """Return whether BatchNorm sees the examples of all devices."""
        return bool(getattr(self.recipe, "sync_batchnorm", False))

    def finish(self, run: Any, data: D) -> None:
        """Write further files when the training of a `Run` has ended; here, none. It may be called again."""

    def next_step(self, folder: str) -> str:
        """Return a line with the next command for a finished run, or an empty string."""
        return ""


T = TypeVar("T", bound="type[Task[Any, Any]]")

_TASKS: Registry[type[Task[Any, Any]]] = Registry(
    "task", Task, lambda task: options_of(task.recipe_class, frozenset()), "graticule.lab.tasks"
)


def register_task(name: str) -> Callable[[T], T]:
    """Return a decorator that registers a `Task` as `name`, the `task` of its recipe class.

    Raises:
        ValueError: if `name` is not an identifier, another class has it, or the recipe class has another `task`.
        TypeError: if the class is not a subclass of `Task`.
    """
    register = _TASKS.register(name)

    def add(cls: T) -> T:
        recipe = getattr(cls, "recipe_class", None)
        if isinstance(cls, type) and issubclass(cls, Task) and getattr(recipe, "task", None) != name:
            raise ValueError(
                f"`recipe_class` of the task {name!r} must be a TrainingRecipe with task = {name!r}, got {recipe!r}."
            )
        register(cls)
        return cls

    return add


def list_tasks() -> Registry[type[Task[Any, Any]]]:
    """Return the registry of tasks, of the library and of plugins."""
    return _TASKS


def metric_of(name: str) -> Metric | None:
    """Return the metric of a registered task by its key or its column in metrics.csv; None for another name."""
    tables = _TASKS.data, _TASKS  # without importing all tasks if one of those used has it
    metrics = (task.recipe_class.metric for table in tables for task in tuple(table.values()))
    return next((metric for metric in metrics if name in (metric.key, metric.column)), None)


def _class_of(task: str) -> type[Task[Any, Any]]:
    """Return the class of a task, without importing all tasks if it is used already."""
    return _TASKS.data.get(task) or _TASKS[task]


def task_of(recipe: TrainingRecipe) -> Task[Any, Any]:
    """Return the task of a recipe; a ValueError if it is not registered."""
    return _class_of(recipe.task)(recipe)


def read_recipe(values: Mapping[str, Any]) -> TrainingRecipe:
    """Rebuild a recipe from the values of its `to_dict`."""
    if "task" not in values:
        raise ValueError(f"`task` must be given, got the keys {', '.join(list(values)[:5]) or 'none'}.")
    return _class_of(str(values["task"])).recipe_class.from_dict(dict(values))


def build_data(recipe: TrainingRecipe) -> Any:
    """Build and check the data of a recipe."""
    return task_of(recipe).build_data()


def build_model(recipe: TrainingRecipe, **described: Any) -> Any:
    """Build the untrained model of a recipe for facts about the data, such as `num_classes` and `channels`.

    Raises:
        ValueError: for an argument that the model does not have, or a combination that it refuses.
    """
    return task_of(recipe).build_model(described)


def recipe_plugins(recipe: TrainingRecipe, further: Iterable[Definition] = ()) -> dict[str, str]:
    """Return the plugins that define the names in a recipe, or any of `further`, and their SHA-256."""
    task = task_of(recipe)
    loader = task.loader()
    named = definitions_of(recipe.model, recipe.encoding, recipe.joining)
    return plugins_of([*named, type(task), *([] if loader is None else [loader]), *further])
