"""Real images, on this machine or shipped with a package, as batches that can be repeated."""

from graticule.data.images import ArrayImages, DatasetInfo
from graticule.data.module import DataModule, build_mixup, list_datasets, load_dataset
from graticule.data.sampling import PADDING, BatchOrder, EpochSampler, EvaluationOrder, SeededImages
from graticule.data.transforms import Augmentation, evaluation_transform, training_transform

__all__ = [
    "PADDING",
    "ArrayImages",
    "Augmentation",
    "BatchOrder",
    "DataModule",
    "DatasetInfo",
    "EpochSampler",
    "EvaluationOrder",
    "SeededImages",
    "build_mixup",
    "evaluation_transform",
    "list_datasets",
    "load_dataset",
    "training_transform",
]
