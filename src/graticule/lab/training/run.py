"""A run folder and its recipe, results and model."""

from __future__ import annotations

import contextlib
import logging
import platform
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NotRequired

import torch
from pydantic import ConfigDict, with_config
from torch import nn
from typing_extensions import TypedDict

from graticule.lab.training.checkpoints import best_checkpoint, load_weights, saved_checkpoints
from graticule.lab.training.recipe import TrainingRecipe
from graticule.lab.training.run_folder import RunFolder
from graticule.lab.training.task import Task, read_recipe, task_of
from graticule.registry.fields import Count, NotNegative, Whole, read_typed
from graticule.registry.plugins import missing_plugins, named_again

log = logging.getLogger(__name__)

#: The packages whose versions weights depend on besides the recipe.
_PACKAGES = ("graticule", "torch", "torchvision", "timm", "lightning-fabric", "numpy")


class _Fingerprint(TypedDict):
    examples: Whole
    sha256: str
    times: NotRequired[str]
    oldest: NotRequired[int]
    newest: NotRequired[int]


class _RunDescription(TypedDict):
    """The contents of recipe.json for every task."""

    data: NotRequired[dict[str, _Fingerprint]]
    recipe: dict[str, Any]
    versions: NotRequired[dict[str, Any]]
    machine: NotRequired[dict[str, Any]]
    plugins: NotRequired[dict[str, str]]
    position: NotRequired[dict[str, str]]


@with_config(ConfigDict(extra="allow"))
class _Result(TypedDict):
    """The contents of result.json besides the best and the last score."""

    best_epoch: Count
    epochs: Count
    seconds: NotNegative
    skipped_images: list[str]


@dataclass(frozen=True)
class Run(RunFolder):
    """A run: its folder, with access to the recipe, the results and the model."""

    @property
    def last(self) -> Path | None:
        """The checkpoint from which training is resumed; None before the first."""
        saved = saved_checkpoints(self.checkpoints)
        return saved[-1] if saved else None

    @property
    def best(self) -> Path | None:
        """The checkpoint of the best score; None before the end of the first epoch."""
        return best_checkpoint(self.checkpoints)

    def recipe(self) -> Any:
        """Read the recipe, an instance of the recipe class of its task.

        Raises:
            ValueError: if the file is damaged, or needs a plugin that is not imported.
        """
        missing, changed = missing_plugins(self.plugins)
        if missing:
            raise ValueError(
                f"`run` {str(self.folder)!r} needs the plugin {' and '.join(missing)}, which is imported only if "
                f"named: pass {named_again(missing)}, or call graticule.load_plugin in Python."
            )
        for name in changed:
            warnings.warn(f"the plugin {name} has changed since {self.folder} was trained with it.", stacklevel=2)
        values = self._described()["recipe"]
        for name in ("model", "epochs", "task"):  # otherwise the defaults of this version would be used
            if name not in values:
                raise ValueError(f"{self.recipe_file} is not a recipe: `{name}` must be given.")
        try:
            return read_recipe(values)
        except ValueError as error:
            reason = str(error).rstrip(".")
            raise ValueError(f"{self.recipe_file} is not a recipe that this version can read: {reason}.") from None

    @property
    def plugins(self) -> dict[str, str]:
        """The files outside the package that define the run's classes, and their SHA-256."""
        return self._described().get("plugins", {})

    @property
    def position(self) -> str:
        """The encoding and the joining of the model as built, which a recipe may leave to the model it starts with."""
        recipe = self.recipe()
        words = {"encoding": recipe.encoding or "its own encoding", "joining": recipe.joining}
        return "{encoding}, joining {joining}".format(**words | self._described().get("position", {}))

    def check_use(self, recipe: TrainingRecipe, resume: bool) -> None:
        """Check that this folder has no run, or that it is resumed, with the same recipe and plugins.

        A link out of the folder is refused, too.
        """
        for path in self.folder.rglob("*"):  # training replaces, appends to and removes files
            if path.is_symlink() and not path.resolve().is_relative_to(self.folder.resolve()):
                raise ValueError(f"`folder` must contain its files, got {str(path)!r}, a link out of it; remove it.")
        if not self.recipe_file.exists():
            return
        if not resume:
            raise FileExistsError(
                f"`folder` must not contain a run, got {str(self.folder)!r}; resume it with --resume, or name another."
            )
        for name in missing_plugins(self.plugins)[1]:
            raise ValueError(
                f"`run` {str(self.folder)!r} cannot be resumed: its plugin {name} has changed since it was started; "
                "restore it, or start a new run in another folder."
            )
        if others := self.recipe().differences(recipe):
            raise ValueError(
                f"`folder` must contain no run or one of the same recipe, got {str(self.folder)!r}, whose recipe "
                f"differs: {', '.join(f'`{name}`' for name in others)} would change; name another folder, "
                f"with --start-from {self.folder} if it shall have the weights of this run."
            )

    def check_data(self, data: Any) -> None:
        """Check that a run in this folder was trained on `data`, as far as it recorded that."""
        if self.recipe_file.exists() and (changed := self.changes(data, times=False)):
            raise ValueError(
                f"`data_root` must be of the data that the run in {str(self.folder)!r} was trained on, "
                f"{self.recipe().data_root or self.recipe().dataset}, got {getattr(data, 'root', None) or 'others'}: "
                f"{'; '.join(changed)}. Restore the data, or name another folder for the run."
            )

    def result(self) -> dict[str, Any]:
        """Read the results of a finished run.

        Raises:
            FileNotFoundError: if it is not finished.
            ValueError: if the file is damaged.
        """
        return read_typed(self.result_file, _Result)

    def task(self) -> Task[Any, Any]:
        """Return the task of the recipe."""
        return task_of(self.recipe())

    def described(self) -> dict[str, Any]:
        """Read the description of the data that the task recorded, such as the names of classes."""
        return read_typed(self.recipe_file, self.task().description)

    def data(self) -> Any:
        """Build the data of the run, and check that they match the ones that it was trained on.

        Raises:
            ValueError: also if the meaning of the data differs, such as other classes or another order of them.
        """
        data = task_of(self.recipe()).build_data(self)
        if changed := self.changes(data):
            log.warning("the data are not those that %s was trained on: %s", self.folder, "; ".join(changed))
        return data

    def examples(self, split: str) -> int | None:
        """Return the number of examples of a split, train or test; None if the data have no fingerprint."""
        recorded = self._described().get("data", {}).get(split)
        return None if recorded is None else recorded["examples"]

    def changes(self, data: Any, *, times: bool = True) -> list[str]:
        """List the splits whose examples are not those that the run recorded, if it recorded any.

        With `times`, also the splits of which some files were written again, at the same size; a copy writes all.
        """
        recorded = self._described().get("data")
        if not recorded or not hasattr(data, "fingerprint"):
            return []
        current, changes = data.fingerprint(), []
        for split, known in recorded.items():
            now = current.get(split, {"examples": 0, "sha256": ""})
            if now["sha256"] != known["sha256"]:
                counts = f"{now['examples']:,} examples, and had {known['examples']:,}"
                changes.append(f"{split} has {counts}{' others' * (now['examples'] == known['examples'])}")
            elif times and now.get("times") != known.get("times") and now["oldest"] <= known["newest"]:
                changes.append(f"{split} has files that were written again, of the same sizes")
        return changes

    def _described(self) -> _RunDescription:
        return read_typed(self.recipe_file, _RunDescription)

    def model(self, data: Any = None, checkpoint: Literal["best", "last"] = "best") -> nn.Module:
        """Build the model with its best or last weights, in evaluation mode.

        Raises:
            FileNotFoundError: if nothing was saved yet.
            ValueError: if the checkpoint cannot be read or does not fit.
        """
        task = self.task()
        described = self.described() if data is None else task.describe(data)
        path = self.best if checkpoint == "best" else self.last
        if path is None or not path.exists():
            raise FileNotFoundError(
                f"{self.folder} has no {checkpoint} checkpoint yet; its first epoch was not completed."
            )
        return load_weights(task.build_model(described), path).eval()


def run_of(source: Path) -> Run | None:
    """Return the run with the folder `source`, or with the checkpoint or file of weights `source` in its folder."""
    folders = [source, source.parent, *([source.parent.parent] if source.parent.name == "checkpoints" else [])]
    folders = folders[:1] if source.is_dir() else folders  # a published folder in a run's folder has its own weights
    return next((Run(folder) for folder in folders if Run(folder).recipe_file.is_file()), None)


def surroundings() -> dict[str, Any]:
    """Return the versions and the machine of this process, as plain values for JSON."""
    versions = {"python": platform.python_version(), **dict.fromkeys(_PACKAGES, "not installed")}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # imported from a folder, as from a checkout of the repository
            versions[name] = version(name)
    machine = {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {"versions": versions, "machine": {**machine, **gpu}}
