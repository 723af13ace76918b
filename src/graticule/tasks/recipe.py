"""What a training run is made of, as one plain dataclass."""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from timm.optim import list_optimizers

from graticule.data import Augmentation
from graticule.factory import MixingOptions, PegOptions, known_name
from graticule.tasks.distillation import Distillation


@dataclass(frozen=True)
class Mixing:
    """Mixing of two images and their labels (timm's Mixup)."""

    mixup: float = 0.0
    """alpha of mixup; 0 for none"""
    cutmix: float = 0.0
    """alpha of cutmix; 0 for none"""
    prob: float = 1.0
    """probability that a batch is mixed"""
    switch_prob: float = 0.5
    """probability of cutmix where both are on"""


#: What a run may change when it goes on, for it does not decide what comes out.
MACHINE = (
    *("devices", "nodes", "accumulate", "accelerator", "workers", "eval_batch_size", "compile", "grad_checkpointing"),
    *("keep", "checkpoint_steps", "data_root"),
)


@dataclass(frozen=True)
class Recipe:
    """A training run: every value that decides its result is here, and a run folder keeps it.

    Sizes are in pixels, (height, width); rates are per step; epochs count passes over the training images.
    """

    model: str = "vit_nano_patch4_28"
    """backbone, one of `graticule models`"""
    encoding: str | None = None
    """position encoding, or several joined by + (default: the backbone's own; learnable for most)"""
    joining: str = "default"
    """how the encoding reaches each layer"""
    joined_layers: int | None = None
    """eta: only the first layers are joined (default: all)"""
    decomposition: str | None = None
    """what stands in the place of LaPE's norm (default: the whole LayerNorm)"""
    peg: PegOptions = field(default_factory=PegOptions)
    shaw_clip: int | None = None
    """K of Shaw's encoding, in patches (default: 8)"""
    bias_norm: Literal["keys", "heads"] | None = None
    """what LaPE's norm of a relative bias is over (default: the keys)"""
    token_mixing: MixingOptions = field(default_factory=MixingOptions)
    start_from: Path | None = None
    """start with the weights of this checkpoint or run, of whatever size, classes, encoding or joining: what fits is
    taken, resampled where it must be, and the rest is new"""
    position_from: Path | None = None
    """start with the position parameters of this checkpoint; with peg.frozen they stay as they are"""
    model_kwargs: tuple[str, ...] = ()
    """arguments of the backbone, as windows=[28,14,14,7] combine=add"""
    img_size: tuple[int, int] = (28, 28)
    """height and width of the images, multiples of the patch"""
    patch_size: int | None = None
    """side of a patch (default: the backbone's)"""
    global_pool: Literal["token", "avg"] | None = None
    """class token or global average pooling (default: the backbone's own; the class token for most)"""
    drop_path_rate: float = 0.0
    """stochastic depth of the last block"""
    dataset: str = "digits"
    """data set, one of digits, fashion_mnist, cifar10, cifar100, image_folder, shards, hf_disk"""
    data_root: Path | None = None
    """folder of the data set (default: where the data set is looked for)"""
    train_share: float | None = None
    """train on this share of every class only, as 0.5 for a half (default: all)"""
    share_seed: int = 0
    """which images of the share; apart from `seed`, so that runs with several seeds see the same ones"""
    limit_train: int | None = None
    """train on so many images only, balanced over the classes"""
    limit_test: int | None = None
    """test on so many images only, balanced over the classes"""
    augmentation: Augmentation = field(default_factory=Augmentation)
    aug_repeats: int = 1
    """repeated augmentation: an image comes so many times in turn, in epochs as long as without; 3 for DeiT"""
    mixing: Mixing = field(default_factory=Mixing)
    distillation: Distillation = field(default_factory=Distillation)
    batch_size: int = 64
    """images a step, over all devices, nodes and accumulated parts"""
    eval_batch_size: int = 256
    """images a batch in evaluation"""
    workers: int = 0
    """processes that load images; 0 loads them in the main process"""
    epochs: int = 10
    """passes over the training images, cool-down not counted"""
    optimizer: str = "adamw"
    """timm's name of the optimiser: adamw, sgd, lamb, ..."""
    lr: float = 1e-3
    """highest learning rate"""
    min_lr: float = 1e-5
    """learning rate at the end of the cosine"""
    warmup_lr: float = 1e-6
    """learning rate at the start of the warm-up"""
    warmup_epochs: int = 0
    """epochs of linear warm-up, counted within `epochs`"""
    cooldown_epochs: int = 0
    """epochs at `min_lr` behind the cosine, beyond `epochs`"""
    weight_decay: float = 0.05
    """decay of all weights but norms, biases and what says where tokens are"""
    label_smoothing: float = 0.0
    """how much of a label is spread over all classes"""
    clip_grad: float | None = None
    """largest norm of the gradient (default: no clipping)"""
    ema_decay: float | None = None
    """decay of the moving average of the weights, which is what is then evaluated (default: none)"""
    precision: Literal["32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true"] = "32-true"
    """Lightning's precision"""
    accelerator: str = "auto"
    """Lightning's accelerator: auto, cpu, gpu, ..."""
    devices: int = 1
    """GPUs (or processes, on CPUs) of a node"""
    nodes: int = 1
    """machines; start the same command on each, by torchrun or SLURM"""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """how several devices work together: ddp keeps a whole model on each (auto does, too), fsdp shares it out"""
    accumulate: int = 1
    """parts in which every device works through its share of a batch, where it does not fit at once"""
    sync_batchnorm: bool = False
    """let BatchNorm see the images of all GPUs"""
    grad_checkpointing: bool = False
    """compute the activations of blocks again in the backward pass instead of keeping them"""
    compile: bool = False
    """compile the model with torch.compile"""
    keep: int = 1
    """how many of the last checkpoints are kept, besides the best"""
    checkpoint_steps: int | None = None
    """save a checkpoint every so many steps too (default: at the end of an epoch only)"""
    nonfinite: Literal["stop", "skip"] = "stop"
    """what a loss that is not finite does: stop the run, or skip the step and count it"""
    seed: int = 0
    """decides initialisation, order and augmentation"""

    def __post_init__(self) -> None:
        for name, least in (
            ("batch_size", 1),
            ("eval_batch_size", 1),
            ("epochs", 1),
            ("workers", 0),
            ("warmup_epochs", 0),
            ("cooldown_epochs", 0),
            ("seed", 0),
            ("share_seed", 0),
            ("aug_repeats", 1),
            ("devices", 1),
            ("nodes", 1),
            ("accumulate", 1),
            ("keep", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}.")
        if self.checkpoint_steps is not None and self.checkpoint_steps < 1:
            raise ValueError(f"`checkpoint_steps` must be at least 1, got {self.checkpoint_steps}.")
        if shares := self.batch_size % (self.devices * self.nodes * self.accumulate):
            raise ValueError(
                f"`batch_size` must be a multiple of devices x nodes x accumulate, {self.devices} x {self.nodes} x "
                f"{self.accumulate}, got {self.batch_size}, which leaves {shares}."
            )
        if self.strategy == "fsdp" and self.ema_decay is not None:
            raise ValueError(
                f"`ema_decay` must be left out with strategy fsdp: Lightning's moving average is not shared out, got "
                f"{self.ema_decay}."
            )
        self.backbone_arguments()
        known_name("optimizer", self.optimizer, [str(name) for name in list_optimizers()])
        if self.train_share is not None and not 0 < self.train_share <= 1:
            raise ValueError(f"`train_share` must be in (0, 1], as 0.5 for a half, got {self.train_share}.")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"`label_smoothing` must be in [0, 1), got {self.label_smoothing}.")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"`ema_decay` must be in (0, 1), got {self.ema_decay}.")
        if self.warmup_epochs >= self.epochs and self.warmup_epochs:
            raise ValueError(f"`warmup_epochs` must be fewer than `epochs`, {self.epochs}, got {self.warmup_epochs}.")
        if self.lr <= 0:
            raise ValueError(f"`lr` must be positive, got {self.lr}.")

    def backbone_arguments(self) -> dict[str, Any]:
        """Read `model_kwargs`: what stands behind each = is JSON, or a word."""
        found: dict[str, Any] = {}
        for text in self.model_kwargs:
            name, equals, value = text.partition("=")
            if not (name.isidentifier() and equals and value) or name in found:
                raise ValueError(f"`model_kwargs` must be different NAME=VALUE, as windows=[28,14,14,7], got {text!r}.")
            try:
                found[name] = json.loads({"True": "true", "False": "false"}.get(value, value), parse_constant=_refused)
            except ValueError:
                if not value.isidentifier():
                    raise ValueError(
                        f"`model_kwargs` must have JSON or a word behind =, as windows=[28,14,14,7], got {text!r}."
                    ) from None
                found[name] = value
            if found[name] is None:
                raise ValueError(
                    f"`model_kwargs` must not have null, which is the default: leave it out, got {text!r}."
                )
        return found

    def differences(self, other: Recipe) -> list[str]:
        """Name what differs and decides the result, which the machines do not, but for the order of sums."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in MACHINE]
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    def quick(self) -> Recipe:
        """The same code path in a few steps: two epochs of some tens of images, on the CPU."""
        return dataclasses.replace(
            self,
            epochs=2,
            warmup_epochs=min(self.warmup_epochs, 1),
            cooldown_epochs=0,
            batch_size=8,
            eval_batch_size=16,
            limit_train=40,
            limit_test=40,
            workers=0,
            precision="32-true",
            accelerator="cpu",
            devices=1,
            nodes=1,
            accumulate=1,
            sync_batchnorm=False,
            checkpoint_steps=None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """Rebuild what `to_dict` wrote.

        Raises:
            ValueError: for a key that no recipe has.
        """
        values = dict(values)
        if unknown := values.keys() - {f.name for f in dataclasses.fields(cls)}:
            raise ValueError(f"a recipe must not have the keys {_with_hints(unknown, cls)}.")
        kinds: dict[str, Any] = {
            "augmentation": Augmentation,
            "mixing": Mixing,
            "peg": PegOptions,
            "token_mixing": MixingOptions,
            "distillation": Distillation,
        }
        for name in kinds.keys() & values.keys():
            given = {key: tuple(value) if isinstance(value, list) else value for key, value in values[name].items()}
            if unknown := given.keys() - {f.name for f in dataclasses.fields(kinds[name])}:
                raise ValueError(f"`{name}` of a recipe must not have the keys {_with_hints(unknown, kinds[name])}.")
            values[name] = kinds[name](**given)
        for name in ("img_size", "model_kwargs"):
            if name in values:
                values[name] = tuple(values[name])
        for name in ("data_root", "position_from", "start_from"):
            if values.get(name) is not None:
                values[name] = Path(values[name])
        return cls(**values)


def _with_hints(unknown: set[str], kind: Any) -> str:
    """List keys, each with the name of a field that looks like it."""
    fields = [f.name for f in dataclasses.fields(kind)]
    close = {key: difflib.get_close_matches(key, fields, n=1) for key in sorted(unknown)}
    return ", ".join(f"{key} (did you mean {found[0]}?)" if found else key for key, found in close.items())


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not a number.")
