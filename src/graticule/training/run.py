"""A run folder: the recipe as resolved, versions, metrics, checkpoints, weights."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NotRequired

from torch import nn
from typing_extensions import TypedDict

from graticule.data import BytePairTokenizer, ByteTokenizer, Tokenizer, check_class_names, check_vocabulary
from graticule.files import locked
from graticule.metric import Metric
from graticule.plugins import missing_plugins
from graticule.run_folder import RunFolder
from graticule.tasks.build import build_data, build_model, data_sizes, read_recipe
from graticule.tasks.text_recipe import TextRecipe
from graticule.training.checkpoints import best_checkpoint, saved_checkpoints
from graticule.training.devices import load_weights
from graticule.training.recipe import TrainingRecipe
from graticule.training.surroundings import changed_surroundings
from graticule.typed import Count, Finite, NotNegative, Number, Whole, read_typed


class _Described(TypedDict):
    """The contents of recipe.json."""

    recipe: dict[str, Any]
    num_classes: Count
    channels: Count
    class_names: NotRequired[tuple[str, ...]]
    vocabulary: NotRequired[str]
    versions: NotRequired[dict[str, Any]]
    machine: NotRequired[dict[str, Any]]
    plugins: NotRequired[dict[str, str]]


@dataclass(frozen=True)
class Run(RunFolder):
    """A run: its folder, opened to read the recipe, the results and the model."""

    @property
    def last(self) -> Path | None:
        """The checkpoint that training is resumed from; None before the first."""
        saved = saved_checkpoints(self.checkpoints)
        return saved[-1] if saved else None

    @property
    def best(self) -> Path | None:
        """The checkpoint of the best score; None before the end of the first epoch."""
        return best_checkpoint(self.checkpoints)

    @property
    def running(self) -> bool:
        """Whether a process on this machine trains it now."""
        with locked(self.folder) as free:
            return not free

    def recipe(self) -> Any:
        """Read the recipe, a `Recipe` or a `TextRecipe`.

        Raises:
            ValueError: if the file is damaged, or needs a plugin that is not imported.
        """
        missing, changed = missing_plugins(self.plugins)
        if missing:
            raise ValueError(
                f"`run` {str(self.folder)!r} needs the plugin {missing[0]}, which is imported only if you name it: "
                f"pass --plugin {missing[0]}, or call graticule.load_plugin in Python."
            )
        for name in changed:
            warnings.warn(f"the plugin {name} has changed since {self.folder} was trained with it.", stacklevel=2)
        values = self._described()["recipe"]
        for name in ("model", "epochs"):  # without them, the defaults of this version would be trained
            if name not in values:
                raise ValueError(f"{self.recipe_file} is no recipe: `{name}` must be given.")
        try:
            return read_recipe(values)
        except ValueError as error:
            reason = str(error).rstrip(".")
            raise ValueError(f"{self.recipe_file} is no recipe that this version can read: {reason}.") from None

    @property
    def plugins(self) -> dict[str, str]:
        """The files outside of the package that the run's classes are from, and their SHA-256."""
        return self._described().get("plugins", {})

    def check_plugins(self) -> None:
        """Check that no plugin has changed since the run was started.

        Raises:
            ValueError: naming the first that has.
        """
        for name in missing_plugins(self.plugins)[1]:
            raise ValueError(
                f"`run` {str(self.folder)!r} cannot be resumed: its plugin {name} has changed since it was started."
            )

    def check_links(self) -> None:
        """Check that no file or folder of the run is a link that leads out of its folder.

        Training replaces, appends to and removes them, and would do so to what belongs to something else.

        Raises:
            ValueError: naming the first that is.
        """
        files = (
            self.recipe_file,
            self.metrics_file,
            self.log_file,
            self.weights,
            self.result_file,
            self.tokenizer_file,
        )
        folders = (self.checkpoints, self.folder / "tensorboard")
        within = [path for folder in folders if not folder.is_symlink() for path in folder.rglob("*")]
        for path in (*files, self.folder / ".lock", *folders, *within):
            if path.is_symlink() and not path.resolve().is_relative_to(self.folder.resolve()):
                raise ValueError(
                    f"`folder` must hold the files of its run itself, got {str(path)!r}, a link out of it; copy there "
                    "what it leads to, or remove it."
                )

    def changed_surroundings(self) -> list[str]:
        """List the versions and numbers of threads that are not as the run recorded them."""
        return changed_surroundings(self._described())

    def check_recipe(self, recipe: TrainingRecipe) -> None:
        """Check that a run that is here was made by `recipe`, on whatever machines.

        Raises:
            ValueError: if another recipe made it.
        """
        if self.recipe_file.exists() and (others := self.recipe().differences(recipe)):
            raise ValueError(
                f"`folder` must hold no run or one of the same recipe, got {str(self.folder)!r}, which another recipe "
                f"made: {', '.join(f'`{name}`' for name in others)} would change; name another folder."
            )

    def result(self) -> dict[str, Any]:
        """Read the results of a finished run.

        Raises:
            FileNotFoundError: if it is not finished.
            ValueError: if the file is damaged.
        """
        return read_typed(self.result_file, _result(self.recipe().metric))

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer of a run on text.

        Raises:
            FileNotFoundError, ValueError: if it is not there, damaged, or not the one that the run was trained with.
            ImportError: if the library `tokenizers` is needed and not installed.
        """
        fingerprint = self._described().get("vocabulary")
        if fingerprint is None:
            raise ValueError(f"`run` must be one on text, got {str(self.folder)!r}, which is not.")
        bytes_alone = ByteTokenizer()
        if fingerprint == bytes_alone.fingerprint:
            return bytes_alone
        found = BytePairTokenizer.load(self.tokenizer_file)
        check_vocabulary(found, fingerprint, str(self.folder))
        return found

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes of a run on images, in the order of the model's outputs.

        Raises:
            ValueError: if the run has none: it is on text, or its file is damaged.
        """
        names = self._described().get("class_names")
        if names is None:
            raise ValueError(f"{self.recipe_file} must list the names of the classes (`class_names`), got none.")
        return names

    def data(self, recipe: TrainingRecipe | None = None) -> Any:
        """Build the data of the run, checked: a `DataModule`, or a `TextModule` with the run's tokenizer.

        Args:
            recipe: replaces the run's own, as where it is resumed with data in another folder.

        Raises:
            ValueError: also if the data have other classes, or in another order, than the run was trained on.
        """
        recipe = self.recipe() if recipe is None else recipe
        if isinstance(recipe, TextRecipe):
            return build_data(recipe, self.tokenizer())
        data = build_data(recipe)
        check_class_names(data.info.class_names, self.class_names, str(self.folder))
        return data

    def _described(self) -> _Described:
        return read_typed(self.recipe_file, _Described)

    def model(self, data: Any = None, checkpoint: Literal["best", "last"] = "best") -> nn.Module:
        """Build the model with its best or last weights, in evaluation mode.

        Raises:
            FileNotFoundError: if nothing was saved yet.
            ValueError: if the checkpoint cannot be read or does not fit.
        """
        recipe = self.recipe()
        described = self._described()
        sizes = (described["num_classes"], described["channels"]) if data is None else data_sizes(data)
        path = self.best if checkpoint == "best" else self.last
        if path is None or not path.exists():
            raise FileNotFoundError(
                f"{self.folder} has no {checkpoint} checkpoint yet; its training ended before the first epoch did."
            )
        return load_weights(build_model(recipe, *sizes), path).eval()


@cache
def _result(metric: Metric) -> Any:
    """Return the type of result.json where runs are judged by `metric`."""
    build: Any = TypedDict
    return build(
        "Result",
        {
            f"best_{metric.key}": Finite,
            "best_epoch": Count,
            f"last_{metric.key}": Number,
            "epochs": Count,
            "seconds": NotNegative,
            "skipped_images": list[str],
            "skipped_steps": Whole,
        },
    )
