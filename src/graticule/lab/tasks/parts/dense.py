"""The base of detection and segmentation: recipe, data, and the weights that a run starts from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, NotRequired, TypeVar

from torch import Tensor, nn
from torchvision import tv_tensors
from typing_extensions import TypedDict

from graticule.backbones.base import Backbone
from graticule.checkpoints.transfer import Transfer, transfer
from graticule.lab.data.augmentation import fitted_sizes
from graticule.lab.data.dense_module import DenseModule
from graticule.lab.data.dense_transforms import EvaluationTransform, plain
from graticule.lab.data.images import DatasetInfo, check_class_names
from graticule.lab.tasks.options import DenseOptions, DenseRecipe
from graticule.lab.tasks.parts.models import backbone_arguments, build_backbone, build_checked, describe_source
from graticule.lab.training.results import Evaluation
from graticule.lab.training.task import SourceModel, Task, TrainedRun
from graticule.registry.fields import Count, Finite, Whole

#: The shorter and the longer side in pixels that images are fitted in.
Sides = tuple[int, int]


S = TypeVar("S", bound=Any)


class DenseEvaluation(DenseOptions, Evaluation[S], Generic[S]):
    """Scores of a detector or a segmentation model at several sizes, on the original images."""

    def check(self, task: Any, model: Any, data: Any) -> None:
        self.fits(task)

    def scores(self, task: Any, model: Any, data: Any, *, device: str) -> list[S]:
        return [self.score(task, model, data, size, device) for size in self.fits(task)]

    @abstractmethod
    def score(self, task: Any, model: Any, data: Any, size: Sides, device: str) -> S:
        """Score a model on the held-out images, fitted to `size`; targets are of the original images."""

    def fits(self, task: Any) -> list[Sides]:
        """Return the sizes that images are fitted to; by default, the size of the recipe."""
        return fitted_sizes(tuple(self.sizes), "sizes") or [tuple(task.recipe.fit)]


class DenseClasses(TypedDict):
    """The description of the data in recipe.json."""

    channels: Count
    class_names: tuple[str, ...]
    category_ids: tuple[Whole, ...]
    mean: tuple[Finite, ...]
    std: tuple[Finite, ...]
    backbone: NotRequired[SourceModel]


R = TypeVar("R", bound=DenseRecipe)


class DenseTask(Task[R, "DenseModule"], Generic[R]):
    """A backbone with a neck and a head or decoder; the backbone can start from any run or checkpoint of it."""

    description = DenseClasses
    unit = "img"
    inputs = "images with boxes, masks or classes of pixels"

    #: True if the data normalize the images; a model that normalizes gets them in [0, 1].
    normalize: ClassVar[bool] = True

    @property
    @abstractmethod
    def truth(self) -> tuple[str, ...]:
        """Return the targets that are learned, of boxes, masks and classes."""

    def build_data(self, run: TrainedRun | None = None) -> DenseModule:
        """Build the data; for a run, they must have its classes, in the same order."""
        recipe = self.recipe
        data = DenseModule(
            **recipe.data_arguments(),
            truth=self.truth,
            size=recipe.fit,
            augmentation=recipe.augmentation,
            by_shape=getattr(recipe, "by_shape", False),
            normalize=self.normalize,
        )
        if run is not None:
            check_class_names(data.class_names, run.described()["class_names"], str(run.folder))
        return data

    def describe(self, data: DenseModule) -> dict[str, Any]:
        """Return the classes, their names in the order of the model's outputs, and the channels of the images."""
        info = data.info
        return {
            "channels": info.channels,
            "class_names": data.class_names,
            "category_ids": info.category_ids or tuple(range(len(data.class_names))),
            "mean": info.mean,
            "std": info.std,
            **describe_source(self.recipe),
        }

    def build_model(self, described: Mapping[str, Any]) -> nn.Module:
        recipe, classes = self.recipe, len(described["class_names"])
        shape = (described["channels"], recipe.img_size, recipe.patch_size)
        if recipe.of_source:
            backbone = build_backbone(recipe, 0, *shape, source=described.get("backbone"))
            model: nn.Module = self.create(backbone, classes)
        else:
            arguments = {key: value for key, value in backbone_arguments(recipe, *shape).items() if value is not None}
            model = build_checked(partial(self.create, recipe.model, classes, **arguments), recipe)
        return model

    @abstractmethod
    def create(self, backbone: str | Backbone, num_classes: int, **arguments: Any) -> Any:
        """Create the model of a backbone, or of its name and arguments, for `num_classes`."""

    def prepared(self, image: Tensor, described: Mapping[str, Any]) -> Tensor:
        """Return a uint8 image as the input of the model: fitted, float32, and normalized if `normalize`."""
        names, mean, std = (tuple(described[key]) for key in ("class_names", "mean", "std"))
        info = DatasetInfo(self.recipe.dataset, names, described["channels"], None, mean, std)
        transform = EvaluationTransform(self.recipe.fit, info if self.normalize else None)
        return plain(transform(tv_tensors.Image(image), {})[0])

    def same_outputs(self, source: TrainedRun | None, names: Sequence[str], data: DenseModule) -> bool:
        """Return False: only the backbone takes weights, whatever the task of the run."""
        return False

    def take_weights(self, model: nn.Module, source: Path | Mapping[str, Tensor], same: bool) -> Transfer:
        """Load the weights that fit into the backbone: from a classifier, or from the backbone of a dense model."""
        return transfer(model.backbone, source, classifier=False)
