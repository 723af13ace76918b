"""The values of a training run that are common to all tasks: model, position, optimizer, devices.

PyTorch is imported only if a value needs it to be checked, so that printing options takes no time.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from graticule.lab.arguments import Usual, check_effect, check_effects
from graticule.lab.training.results import Metric
from graticule.registry.checks import is_path, known_name, parse_freeze
from graticule.registry.fields import (
    Count,
    Epochs,
    Flag,
    NotNegative,
    Positive,
    Seed,
    ShareAboveZero,
    ShareBelowOne,
    Whole,
    check_fields,
    keys_with_hints,
)
from graticule.registry.plugins import module_name
from graticule.registry.specs import Spec

#: Fields that a resumed run may change, since they do not change its result.
RUNTIME_FIELDS = (
    *("devices", "nodes", "accumulate", "accelerator", "workers", "eval_batch_size", "compile", "grad_checkpointing"),
    *("keep", "checkpoint_epochs", "checkpoint_steps", "data_root", "strategy", "cuda_graph"),
)

#: Optimizers of timm and the joining that need no check.
USUAL_OPTIMIZERS = ("adam", "adamw", "lamb", "sgd")
USUAL_JOINING = "default"
#: Optimizers that need other libraries and GPUs, or second derivatives, and are not proposed.
_SPECIAL = ("fused", "bnb", "adahessian")


@dataclass(frozen=True)
class TrainingRecipe:
    """The values that determine the result of a training run; they are stored in its folder.

    Rates are per step; epochs count passes over the training data. The recipe class of a task adds its own fields and
    sets two class variables.

    task: the name of the task.
    metric: the score of its runs.
    """

    task: ClassVar[str]
    metric: ClassVar[Metric]
    #: Value -> the values that use it, joined by `or` and `and`; it must not be given without them.
    needs: ClassVar[Mapping[str, str]] = {
        "min_lr": "schedule=cosine or schedule=poly",
        "warmup_lr": "warmup_epochs or warmup_steps",
    }
    #: The values that a user gave in place of the values of a recipe file, such as mixing.prob.
    overrides: ClassVar[frozenset[str]] = frozenset()

    model: Usual[str]
    """name of the model, or a model to start with: timm:NAME, hf:OWNER/NAME, or the path of a published folder or of a
    run, whose own encoding and joining it has by default"""
    encoding: Usual[str | None] = None
    """position encoding with its options, such as shaw(clip=4), or several combined by + (default: the model's)"""
    joining: Usual[str] = USUAL_JOINING
    """joining of the encoding to the layers, with its options, such as lape(layers=6)"""
    start_from: Usual[Path | None] = None
    """start with the weights of this checkpoint or run, of any size, classes, encoding or joining: weights that fit are
    loaded, resampled where needed, and the rest is initialized"""
    position_from: Path | None = None
    """start with the position parameters of this checkpoint"""
    model_kwargs: tuple[str, ...] = ()
    """arguments of the model, such as depth=2 or windows=[28,14,14,7]"""
    dataset: Usual[str] = ""
    """data set"""
    data_root: Usual[Path | None] = None
    """folder of the data set (default: its usual folder)"""
    limit_train: Count | None = None
    """train on only this many examples: images balanced over the classes, or windows from the beginning of a text"""
    limit_test: Count | None = None
    """test on only this many examples, chosen in the same way"""
    drop_path_rate: ShareBelowOne = 0.0
    """stochastic depth of the last block"""
    batch_size: Usual[Count] = 64
    """examples per step, over all devices, nodes and micro-batches"""
    eval_batch_size: Count = 256
    """examples per batch in evaluation"""
    epochs: Usual[Annotated[Epochs, Field(ge=1)]] = 10
    """passes over the training data, without the cool-down"""
    optimizer: str = "adamw"
    """timm's name of the optimizer: adamw, sgd, lamb, ..."""
    lr: Usual[Positive] = 1e-3
    """highest learning rate"""
    min_lr: NotNegative = 1e-5
    """learning rate at the end of the schedules cosine and poly"""
    warmup_lr: NotNegative = 1e-6
    """learning rate at the start of the warm-up"""
    warmup_epochs: Epochs = 0
    """epochs of linear warm-up, counted within `epochs`"""
    warmup_steps: Whole = 0
    """steps of linear warm-up, instead of `warmup_epochs`"""
    schedule: Literal["cosine", "step", "poly"] = "cosine"
    """learning rate after the warm-up: cosine, step (divided by 10 after each of `decay_epochs`) or poly"""
    decay_epochs: tuple[Count, ...] = ()
    """epochs after which the schedule step divides the learning rate by 10, such as 8 11 (1x) or 27 33 (3x)"""
    poly_power: Positive = 1.0
    """exponent of the schedule poly, which falls from `lr` to `min_lr`"""
    layer_decay: ShareAboveZero | None = None
    """factor of the learning rate from each layer of the backbone to the previous one (default: none)"""
    freeze: str | None = None
    """train only some parts: all-but-head, all-but-position, all-but-last-2 (blocks and final norm), or several, such
    as all-but-position+head; head is all of a dense model outside of its backbone (default: train all)"""
    cooldown_epochs: Epochs = 0
    """epochs at the last learning rate, beyond `epochs`"""
    optimizer_eps: Annotated[Positive, Field(lt=1)] | None = None
    """epsilon in the denominators of the optimizer (default: the optimizer's, mostly 1e-8)"""
    weight_decay: Usual[NotNegative] = 0.05
    """decay of all weights except norms, biases and, without --decay-position, position parameters; those that mix
    tokens (gMLP, PosMLP) decay"""
    decay_position: Flag = False
    """also decay tables of position and prefix tokens, as in ViT-Adapter's UperNet"""
    clip_grad: Positive | None = None
    """largest norm of the gradient (default: no clipping)"""
    ema_decay: Annotated[Positive, Field(lt=1)] | None = None
    """decay of the moving average of the weights, which is then evaluated (default: none)"""
    precision: Usual[Literal["32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true"]] = "32-true"
    """precision of Lightning Fabric"""
    accelerator: str = "auto"
    """accelerator of Lightning Fabric: auto, cpu, gpu, ..."""
    devices: Usual[Count] = 1
    """GPUs (or processes, on CPUs) per node"""
    nodes: Count = 1
    """machines; start the same command on each, by torchrun or SLURM"""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """several devices: ddp copies the model to each, fsdp shards parameters, gradients and optimizer state"""
    accumulate: Count = 1
    """micro-batches per step on every device, whose gradients are accumulated"""
    grad_checkpointing: Flag = False
    """recompute the activations of blocks in the backward pass instead of storing them"""
    compile: Flag = False
    """compile the model with torch.compile"""
    cuda_graph: Flag = True
    """on one GPU, capture a training step as a CUDA graph and replay it, if the task, model and optimizer allow it;
    log.txt says why if they do not"""
    keep: Count = 1
    """number of last checkpoints that are kept, besides the best"""
    checkpoint_epochs: Count = 1
    """save a checkpoint at the end of every this many epochs; the best and the last epoch always have one"""
    checkpoint_steps: Count | None = None
    """also save a checkpoint every this many steps (default: only at the end of epochs)"""
    seed: Usual[Seed] = 0
    """seed of initialization, order and augmentation"""

    def __new__(cls, *_: Any, **values: Any) -> Self:
        if unknown := values.keys() - {field.name for field in dataclasses.fields(cls)}:
            raise ValueError(f"`{cls.__name__}` must not have the values {keys_with_hints(unknown, cls)}.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)
        parts = self.devices * self.nodes * self.accumulate
        if left := self.batch_size % parts:
            lower = self.batch_size - left
            near = f"{lower} or {lower + parts}" if lower else f"{parts}"
            raise ValueError(
                f"`batch_size` must be a multiple of devices x nodes x accumulate, {self.devices} x {self.nodes} x "
                f"{self.accumulate}, got {self.batch_size}; the nearest is {near}."
            )
        if self.strategy == "fsdp" and self.devices * self.nodes == 1:
            raise ValueError("`strategy` must be left out with one device, which has nothing to share, got fsdp.")
        if self.strategy == "fsdp" and self.precision in ("16-mixed", "64-true"):
            raise ValueError(
                f"`precision` must be 32-true, bf16-mixed or bf16-true with the strategy fsdp, got {self.precision}."
            )
        if self.freeze is not None:
            parse_freeze(self.freeze)
        self.backbone_arguments()
        self._check_names()
        self._check_schedule()

    def _check_schedule(self) -> None:
        decays, epochs = list(self.decay_epochs), self.epochs
        stepwise, warm = self.schedule == "step", f"`warmup_epochs` {self.warmup_epochs}"
        unordered = decays != sorted(set(decays)) or max(decays, default=0) >= epochs
        other = f"be given with the schedule step and no other, not with {self.schedule}"
        for name, wrong, rule in (
            ("warmup_epochs", self.warmup_epochs >= epochs, f"be fewer than `epochs`, {epochs}"),
            ("warmup_steps", self.warmup_epochs and self.warmup_steps, f"be 0 with {warm}"),
            ("decay_epochs", stepwise and epochs > 1 and not decays, "be given with the schedule step"),
            ("decay_epochs", decays and not stepwise, other),
            ("decay_epochs", unordered, f"increase and be below `epochs`, {epochs}"),
            ("poly_power", self.poly_power != 1 and self.schedule != "poly", "be left out without the schedule poly"),
        ):
            if wrong:
                raise ValueError(f"`{name}` must {rule}, got {getattr(self, name)}.")

    def _check_names(self) -> None:
        """Check the names that need PyTorch or timm; the usual ones need neither."""
        _specs(self.encoding, self.joining)
        if self.optimizer not in USUAL_OPTIMIZERS:
            from timm.optim import list_optimizers

            names = [str(name) for name in list_optimizers()]
            if self.optimizer not in names:
                known_name("optimizer", self.optimizer, [name for name in names if not name.startswith(_SPECIAL)])

    @property
    def of_source(self) -> bool:
        """Return whether `model` is no name of a backbone, but a model that exists."""
        source = self.model.startswith(("hf:", "timm:")) or module_name(self.model) is not None
        return source or is_path(self.model)

    def backbone_arguments(self) -> dict[str, Any]:
        """Parse `model_kwargs`: the value after each = is JSON or a word."""
        arguments: dict[str, Any] = {}
        for text in self.model_kwargs:
            name, _, value = text.partition("=")
            try:
                parsed = json.loads({"True": "true", "False": "false"}.get(value, value), parse_constant=_refused)
            except ValueError:
                parsed = value if value.isidentifier() else None
            if not name.isidentifier() or name in arguments or parsed is None:
                raise ValueError(
                    "`model_kwargs` must be different NAME=VALUE, where VALUE is JSON or a word, and not null, such as "
                    f"windows=[28,14,14,7], got {text!r}."
                )
            arguments[name] = parsed
        return arguments

    def record_overrides(self, names: Iterable[str]) -> None:
        """Record the values that a user gave, and check that they have an effect."""
        object.__setattr__(self, "overrides", frozenset(names))
        check_effects(self, self.overrides)

    def check_effect(self, name: str, used: bool, needs: str) -> None:
        """Check that a value is used, if the user gave it."""
        if name in self.overrides:
            check_effect(self, name, used, needs)

    def differences(self, other: TrainingRecipe) -> list[str]:
        """List the fields that differ and change the result; devices do not, except for the order of sums."""
        if self.task != other.task:
            return ["task"]
        names = [f.name for f in dataclasses.fields(self) if f.name not in RUNTIME_FIELDS]
        values, others = ({name: getattr(recipe, name) for name in names} for recipe in (self, other))
        for fields in (values, others):  # parsed, so spaces do not matter
            fields["encoding"] = _specs(fields["encoding"], USUAL_JOINING)
            fields["joining"] = _specs(None, fields["joining"])
        return [name for name in names if values[name] != others[name]]

    def data_arguments(self) -> dict[str, Any]:
        """Return the arguments of a data module that every recipe has: data set, folder, batches, seed and limits."""
        names = ("dataset", "batch_size", "eval_batch_size", "seed", "limit_train", "limit_test", "workers")
        return {"root": self.data_root, **{name: getattr(self, name) for name in names if hasattr(self, name)}}

    def warmup(self, steps: int) -> int:
        """Return the steps of the warm-up for `steps` per epoch: a tenth of the run, if the recipe's do not end in it.

        If the user gave such a warm-up, it is refused.
        """
        warm, total = self.warmup_steps or self.warmup_epochs * steps, self.epochs * steps
        if warm < total:
            return warm
        if "warmup_steps" in self.overrides:
            raise ValueError(
                f"`warmup_steps` must be fewer than the steps of the run, {total}, got {warm}; give fewer, or train "
                "longer."
            )
        return total // 10

    def quick(self) -> Self:
        """Return a recipe with the same code path: two epochs of a few dozen examples, on the CPU."""
        further: dict[str, Any] = {"workers": 0, "sync_batchnorm": False}  # of some tasks
        return dataclasses.replace(
            self,
            **{name: value for name, value in further.items() if hasattr(self, name)},
            epochs=2,
            warmup_epochs=min(self.warmup_epochs, 1),
            warmup_steps=min(self.warmup_steps, 2),
            decay_epochs=self.decay_epochs and (1,),
            cooldown_epochs=0,
            batch_size=8,
            eval_batch_size=16,
            limit_train=40,
            limit_test=40,
            precision="32-true",
            accelerator="cpu",
            devices=1,
            nodes=1,
            accumulate=1,
            checkpoint_steps=None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"task": self.task, **json.loads(json.dumps(dataclasses.asdict(self), default=str))}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild a recipe from the values of `to_dict`."""
        values = dict(values)
        if (task := values.pop("task", cls.task)) != cls.task:
            raise ValueError(f"`task` of the recipe must be {cls.task}, got {task!r}.")
        return cls(**values)


def _specs(encoding: str | None, joining: str) -> tuple[Spec, ...]:
    """Return checked specs of an encoding, if there is one, and a joining; the defaults need no PyTorch."""
    specs: tuple[Spec, ...] = ()
    if encoding is not None:
        from graticule.position.position import ENCODINGS

        specs += ENCODINGS.specs(encoding)
    if joining == USUAL_JOINING:
        return (*specs, Spec(joining, {}))
    from graticule.position.joining import JOININGS

    return (*specs, *JOININGS.specs(joining))


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not a valid number in a recipe.")
