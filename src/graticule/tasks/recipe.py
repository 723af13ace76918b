"""What a training run of an image classifier is made of, as one plain dataclass."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from graticule.data import Augmentation
from graticule.metric import TOP1, Metric
from graticule.tasks.distillation import Distillation
from graticule.training.recipe import TrainingRecipe
from graticule.typed import (
    Count,
    Epochs,
    Flag,
    NotNegative,
    Share,
    ShareAboveZero,
    ShareBelowOne,
    Side,
    Whole,
    check_fields,
)


@dataclass(frozen=True)
class Mixing:
    """Mixing of two images and their labels (timm's Mixup)."""

    mixup: NotNegative = 0.0
    """alpha of mixup; 0 for none"""
    cutmix: NotNegative = 0.0
    """alpha of cutmix; 0 for none"""
    prob: Share = 1.0
    """probability that a batch is mixed"""
    switch_prob: Share = 0.5
    """probability of cutmix where both are on"""
    off_epoch: Epochs = 0
    """epoch, counted from 0, from which on nothing is mixed; 0 for never"""

    def __post_init__(self) -> None:
        check_fields(self, "mixing.")


@dataclass(frozen=True)
class Recipe(TrainingRecipe):
    """A training run of an image classifier: every value that decides its result is here, and a run folder keeps it.

    Sizes are in pixels, (height, width); rates are per step; epochs count passes over the training images.
    """

    task: ClassVar[str] = "classification"
    metric: ClassVar[Metric] = TOP1

    model: str = "vit_nano_patch4_28"
    """backbone, one of `graticule models`"""
    position_from: Path | None = None
    """start with the position parameters of this checkpoint; with peg(frozen=True) they stay as they are"""
    model_kwargs: tuple[str, ...] = ()
    """arguments of the backbone, as windows=[28,14,14,7] combine=add"""
    dataset: str = "digits"
    """data set, one of digits, fashion_mnist, cifar10, cifar100, image_folder, hugging_face"""
    limit_train: Count | None = None
    """train on so many images only, balanced over the classes"""
    limit_test: Count | None = None
    """test on so many images only, balanced over the classes"""
    batch_size: Count = 64
    """images a step, over all devices, nodes and accumulated parts"""
    eval_batch_size: Count = 256
    """images a batch in evaluation"""
    img_size: tuple[Side, Side] = (28, 28)
    """height and width of the images, multiples of the patch"""
    patch_size: Side | None = None
    """side of a patch (default: the backbone's)"""
    global_pool: Literal["token", "avg"] | None = None
    """class token or global average pooling (default: the backbone's own; the class token for most)"""
    train_share: ShareAboveZero | None = None
    """train on this share of every class only, as 0.5 for a half (default: all)"""
    share_seed: Whole = 0
    """which images of the share; apart from `seed`, so that runs with several seeds see the same ones"""
    augmentation: Augmentation = field(default_factory=Augmentation)
    aug_repeats: Count = 1
    """repeated augmentation: an image comes so many times in turn, in epochs as long as without; 3 for DeiT"""
    mixing: Mixing = field(default_factory=Mixing)
    label_smoothing: ShareBelowOne = 0.0
    """how much of a label is spread over all classes"""
    distillation: Distillation = field(default_factory=Distillation)
    workers: Annotated[Whole, Field(le=1024)] = 0
    """processes that load images; 0 loads them in the main process"""
    sync_batchnorm: Flag = False
    """let BatchNorm see the images of all GPUs"""

    def quick(self) -> Self:
        """The same code path in a few steps: two epochs of some tens of images, on the CPU."""
        return dataclasses.replace(super().quick(), workers=0, sync_batchnorm=False)
