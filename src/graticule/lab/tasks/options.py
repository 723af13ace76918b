"""The recipes of the tasks' runs, and the options of their evaluations, without PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from graticule.lab.arguments import Rare, Usual
from graticule.lab.data.augmentation import Augmentation, DenseAugmentation
from graticule.lab.training.recipe import TrainingRecipe
from graticule.lab.training.results import BITS_PER_BYTE, BOX_MAP, COSINE, MIOU, TOP1, Metric, SizeOptions
from graticule.registry.checks import parse_sizes
from graticule.registry.fields import (
    Count,
    Epochs,
    Flag,
    NotNegative,
    Positive,
    Share,
    ShareAboveZero,
    ShareBelowOne,
    Side,
    Size,
    Whole,
    check_fields,
)

#: The parts that an adaptation trains.
Stage = Literal["position", "attention", "all"]


@dataclass(frozen=True)
class ImageMixing:
    """Mixing of two images and their labels (timm's Mixup)."""

    mixup: NotNegative = 0.0
    """alpha of mixup; 0 for none"""
    cutmix: NotNegative = 0.0
    """alpha of cutmix; 0 for none"""
    prob: Share = 1.0
    """probability that a batch is mixed"""
    switch_prob: Share = 0.5
    """probability of cutmix if both are on"""
    off_epoch: Epochs = 0
    """epoch, counted from 0, at which mixing ends; 0 for never"""

    def __post_init__(self) -> None:
        check_fields(self, "mixing.")


@dataclass(frozen=True)
class Distillation:
    """The teacher of a student, and the combination of its loss with the loss of the labels (`Teacher.combine`)."""

    teacher: str | None = None
    """path of a run folder, such as ./NAME or runs/NAME, or the name of a model of timm or of this library
    (default: none)"""
    teacher_checkpoint: Path | None = None
    """weights of the named model, .safetensors or .pth; a run folder has its own"""
    form: Literal["hard", "soft"] = "hard"
    """learn the teacher's decision (hard) or its probabilities (soft)"""
    alpha: Share | None = None
    """share of the teacher's loss (default: 0.5 if hard, 0.1 if soft)"""
    temperature: Positive | None = None
    """divisor of the logits in the soft form (default: 3)"""

    def __post_init__(self) -> None:
        check_fields(self, "distillation.")
        if self.temperature is not None and self.form != "soft":
            raise ValueError(
                f"`distillation.temperature` must be left out unless `form` is soft, got {self.temperature}."
            )
        if self.teacher_checkpoint is not None and self.teacher is None:
            raise ValueError(
                "`distillation.teacher_checkpoint` must be given with `distillation.teacher`, got it alone."
            )

    @property
    def share(self) -> float:
        """Return the share of the teacher's loss: alpha, or the default of the paper."""
        return {"hard": 0.5, "soft": 0.1}[self.form] if self.alpha is None else self.alpha

    @property
    def tau(self) -> float:
        """Return the temperature of the soft form: the given one, or the default of the paper."""
        return 3.0 if self.temperature is None else self.temperature


@dataclass(frozen=True)
class Recipe(TrainingRecipe):
    """The values of a training run of an image classifier.

    Sizes are in pixels, (height, width); rates are per step; epochs count passes over the training images.
    """

    task: ClassVar[str] = "classification"
    metric: ClassVar[Metric] = TOP1
    needs: ClassVar[Mapping[str, str]] = {
        **TrainingRecipe.needs,
        **dict.fromkeys(("mixing.prob", "mixing.off_epoch"), "mixing.mixup or mixing.cutmix"),
        "mixing.switch_prob": "mixing.mixup and mixing.cutmix",
        **dict.fromkeys(("distillation.alpha", "distillation.temperature"), "distillation.teacher"),
        "augmentation.color_jitter": "augmentation.rand_augment=None",
    }

    model: Usual[str] = "vit_nano_patch4_28"
    """backbone, one of `graticule models`"""
    position_from: Path | None = None
    """start with the position parameters of this checkpoint; with peg(frozen=True) they are not trained"""
    dataset: Usual[str] = "digits"
    """data set of `graticule models`, such as digits or image_folder"""
    img_size: Usual[Size] = (28, 28)
    """height and width of the images, multiples of the patch"""
    train_sizes: tuple[str, ...] = ()
    """sizes of the training images, sides in pixels or HEIGHTxWIDTH, one per step at random (default: `img_size`)"""
    patch_size: Side | None = None
    """side of a patch (default: the backbone's)"""
    global_pool: Literal["token", "avg"] | None = None
    """class token or global average pooling (default: the backbone's, mostly the class token)"""
    val_split: Annotated[float, Field(gt=0, lt=1)] | None = None
    """test on this share of each class's training images, held out, such as 0.2 for a folder without val"""
    train_share: ShareAboveZero | None = None
    """train on only this share of each class, the same images with any seed, such as 0.5 for a half (default: all)"""
    augmentation: Augmentation = field(default_factory=Augmentation)
    aug_repeats: Count = 1
    """repeated augmentation: times that each image comes in a row, in epochs of the same length; 3 for DeiT"""
    mixing: ImageMixing = field(default_factory=ImageMixing)
    label_smoothing: ShareBelowOne = 0.0
    """share of a label that is spread over all classes"""
    distillation: Distillation = field(default_factory=Distillation)
    workers: Annotated[Whole, Field(le=1024)] = 0
    """processes that load images; 0 loads them in the main process"""
    sync_batchnorm: Flag = False
    """synchronize BatchNorm over all GPUs"""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = parse_sizes(self.train_sizes, "train_sizes")
        if len(set(sizes)) < len(sizes):
            raise ValueError(f"`train_sizes` must be different sizes, got {' '.join(self.train_sizes)}.")


@dataclass(frozen=True)
class TextRecipe(TrainingRecipe):
    """The values of a training run of a language model.

    Lengths are in tokens; rates are per step; epochs count passes over the training text.
    """

    task: ClassVar[str] = "language"
    metric: ClassVar[Metric] = BITS_PER_BYTE

    model: Usual[str] = "lm_tiny"
    """language model, one of `graticule models`"""
    dataset: Usual[str] = "pydoc"
    """pydoc, Python's own help, or text_file, the file `data_root`"""
    batch_size: Usual[Count] = 16
    """windows per step, over all devices, nodes and micro-batches"""
    eval_batch_size: Count = 64
    """windows per batch in evaluation"""
    context: Usual[Count] = 128
    """tokens per window, for which position information is built"""
    tied: Flag = True
    """share the weights of the token embedding with the head"""
    drop_rate: ShareBelowOne = 0.0
    """dropout of the tokens before the first block, and of the outputs of attention and MLPs"""


@dataclass(frozen=True)
class DenseRecipe(TrainingRecipe):
    """The values of a training run of a detector or a segmentation model."""

    model: Usual[str] = "vit_nano_patch4_28"
    """backbone, one of `graticule models`"""
    neck: str | None = None
    """necks on the feature maps of the backbone, such as fpn(channels=128) or adapter + fpn (default: what fits)"""
    dataset: Usual[str] = "scenes"
    """data set of `graticule models` with boxes, masks or classes of pixels, such as scenes or coco"""
    img_size: Usual[Size] = (96, 96)
    """height and width for which the backbone's position information is built"""
    fit: Size = (96, 96)
    """shorter and longer side in pixels that images are resized to fit in, keeping their aspect ratio"""
    patch_size: Side | None = None
    """side of a patch (default: the backbone's)"""
    batch_size: Usual[Count] = 16
    """images per step, over all devices, nodes and micro-batches"""
    eval_batch_size: Count = 1
    """images per batch in evaluation; several of different sizes are padded to one"""
    augmentation: DenseAugmentation = field(default_factory=DenseAugmentation)
    workers: Annotated[Whole, Field(le=1024)] = 0
    """processes that load images; 0 loads them in the main process"""
    sync_batchnorm: Flag = False
    """synchronize BatchNorm over all GPUs"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fit[0] > self.fit[1]:
            shorter, longer = sorted(self.fit)
            raise ValueError(
                f"`fit` must be the shorter and the longer side, {shorter} {longer}, got {longer} {shorter}."
            )


@dataclass(frozen=True)
class DetectionRecipe(DenseRecipe):
    """The values of a training run of a detector."""

    task: ClassVar[str] = "detection"
    metric: ClassVar[Metric] = BOX_MAP

    head: Usual[str] = "retinanet"
    """detector: retinanet, fcos, faster_rcnn or mask_rcnn, with options such as retinanet(score=0.1)"""
    by_shape: Flag = False
    """put only wide or only tall images in a batch, which reduces padding"""


@dataclass(frozen=True)
class SegmentationRecipe(DenseRecipe):
    """The values of a training run of a segmentation model."""

    task: ClassVar[str] = "segmentation"
    metric: ClassVar[Metric] = MIOU

    decoder: str = "segmenter_linear"
    """segmenter_linear, segmenter_mask, uperhead or fpn, with options such as uperhead(channels=128)"""
    auxiliary: str | None = None
    """second decoder of the same maps, whose loss is added with the weight 0.4, such as fcn (default: none)"""
    hardest: ShareAboveZero = 1.0
    """share of the pixels of an image that are learned in a step, those with the highest loss, such as 0.2 if most
    pixels are background"""
    window: Side | None = None
    """in evaluation, side in pixels of the windows that an image is split into (default: the whole image)"""
    stride: Side | None = None
    """distance of the windows in pixels (default: two thirds of a window)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is None and self.stride is not None:
            raise ValueError("`stride` must be left out without `window`.")
        if self.window is not None and self.stride is not None and self.stride > self.window:
            raise ValueError(f"`stride` must be at most `window`, {self.window}, got {self.stride}.")

    @property
    def windows(self) -> tuple[int | None, int | None]:
        """Return `window` and `stride`, with the stride that is used by default."""
        return self.window, self.stride or (None if self.window is None else max(1, self.window * 2 // 3))


@dataclass(frozen=True)
class AdaptRecipe(TrainingRecipe):
    """The values of an adaptation: `encoding` and `joining` are the new position of `model`."""

    task: ClassVar[str] = "adaptation"
    metric: ClassVar[Metric] = COSINE

    model: str = ""
    """the trained model: timm:NAME, hf:OWNER/NAME, a published folder, a run, or FILE.py:NAME"""
    start_from: Path | None = None
    """weights of the trained model, for timm:NAME without its published ones"""
    batch_size: Usual[Count] = 16
    """images per step, over all devices and micro-batches"""
    devices: Count = 1
    """GPUs (or processes, on CPUs) per node"""
    dataset: str = "unlabeled_folder"
    """data set; `unlabeled_folder` has the images of a folder at any depth, every tenth of which is held out"""
    data_root: Path | None = None
    """folder of the data set"""
    img_size: Usual[tuple[Side, Side] | None] = None
    """height and width that the new position is built for (default: the model's)"""
    train_sizes: tuple[str, ...] = ()
    """sizes of the training images, one per step at random (default: `img_size`)"""
    anyway: Flag = False
    """start also if the fitted position is farther from the old one than no position is"""
    stages: Usual[tuple[Stage, ...]] = ("position", "attention", "all")
    """parts that are trained, in equal shares of the epochs; attention has position and norms"""
    augmentation: Augmentation = field(default_factory=Augmentation)
    workers: Annotated[Whole, Field(le=1024)] = 0
    """processes that load images; 0 loads them in the main process"""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_sizes(self.train_sizes, "train_sizes")
        if not self.stages or len(set(self.stages)) < len(self.stages) or len(self.stages) > self.epochs:
            stages = " ".join(self.stages) or "none"
            raise ValueError(f"`stages` must be different, at most as many as `epochs`, {self.epochs}, got {stages}.")
        if self.stages != ("all",) and self.devices * self.nodes > 1:
            raise ValueError(f"`stages` must be all on several devices, got {' '.join(self.stages)}.")
        for name in ("freeze", "layer_decay", "drop_path_rate"):
            if getattr(self, name):
                raise ValueError(f"`{name}` must be left out in an adaptation, which has `stages`.")

    def quick(self) -> Self:
        """Return a recipe with the last two stages in a few steps, on the CPU."""
        return super(AdaptRecipe, dataclasses.replace(self, stages=self.stages[-2:])).quick()


@dataclass(kw_only=True)
class ImageOptions(SizeOptions):
    """The options of evaluations of image classifiers."""

    mode: Literal["zoom", "canvas"] = "zoom"
    """for images: at other sizes, zoom scales the content; canvas keeps its scale on a larger canvas, or crops it"""
    real: Rare[Path | None] = None
    """for images of ImageNet's validation set: real.json of ImageNet-ReaL, or timm for the copy in timm; adds the
    percentage of images whose top-1 is one of their labels there"""


@dataclass(kw_only=True)
class DenseOptions(SizeOptions):
    """The options of evaluations of detectors and segmentation models."""

    per_class: Rare[bool] = False
    """for detection and segmentation: add a row for each class"""


@dataclass(kw_only=True)
class SegmentationOptions(DenseOptions):
    """The options of evaluations of segmentation models."""

    window: Rare[int | None] = None
    """for segmentation: side of the windows that images are split into, in pixels (default: as in the recipe)"""
    stride: Rare[int | None] = None
    """for segmentation: distance of the windows in pixels (default: two thirds of `--window`; without it, as in the
    recipe)"""
