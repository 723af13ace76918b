"""Adaptation: replace the position of a trained model, and distill its features on images without labels."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import TypedDict

from graticule.backbones.base import Backbone
from graticule.checkpoints.transfer import Transfer, transfer
from graticule.hub.config import Preparation, prepare
from graticule.lab.data.augmentation import Augmentation
from graticule.lab.data.module import DataModule
from graticule.lab.tasks.options import AdaptRecipe, Stage
from graticule.lab.tasks.parts.models import build_backbone, describe_backbone
from graticule.lab.training.opening import label_names, open_backbone
from graticule.lab.training.run import Run
from graticule.lab.training.task import SourceModel, Task, TrainedRun, register_task
from graticule.registry.checks import parse_sizes
from graticule.registry.fields import Finite
from graticule.surgery.change import Certificate, change_position, drift_of, features
from graticule.surgery.resize import resize
from graticule.system.files import read_json, write_json

#: Training images on which the new position is fitted to the old one.
_FITTED = 16
#: Held-out images on which the certificate compares features.
_HELD_OUT = 32


class _ImageSource(TypedDict):
    """The description of the data and of the model in recipe.json."""

    mean: tuple[Finite, ...]
    std: tuple[Finite, ...]
    interpolation: NotRequired[str]
    crop_pct: NotRequired[float]
    crop_mode: NotRequired[str]
    class_names: NotRequired[tuple[str, ...]]
    backbone: SourceModel


@register_task("adaptation")
class Adaptation(Task[AdaptRecipe, "DataModule"]):
    """A backbone with a new position, which learns the tokens of the original on the same images.

    The loss is the mean distance of the tokens, half of prefix tokens and half of patches, over up to three layers,
    evenly spaced, and the features. The model is in evaluation mode, so that nothing but the position differs from the
    original. The head is kept. The run ends with certificate.json and the folder `published`.
    """

    recipe_class = AdaptRecipe
    description = _ImageSource
    unit = "img"
    inputs = "images without labels"

    _data: DataModule | None = None
    _certificate: Mapping[str, Any] | None = None
    _stages: dict[Stage, set[nn.Parameter]]
    _stage: Stage | None = None

    @cached_property
    def original(self) -> Backbone:
        """The model before, in evaluation mode, without gradients."""
        recipe = self.recipe
        if not recipe.of_source:
            raise ValueError(f"`model` must be a trained model, such as timm:NAME or a folder, got {recipe.model!r}.")
        model = open_backbone(recipe.model, weights=recipe.start_from is None)
        if recipe.start_from is not None:
            transfer(model, recipe.start_from)
        return model.requires_grad_(False).eval()

    @property
    def size(self) -> tuple[int, int]:
        return self.recipe.img_size or self.original.img_size

    def build_data(self, run: TrainedRun | None = None) -> DataModule:
        """Build the data, resized, cropped and normalized as for the original."""
        recipe, original = self.recipe, self.original
        if recipe.encoding is None and recipe.joining == "default":
            raise ValueError("`encoding` or `joining` must be given: the new position of the model, got none.")
        known = {key: value for key, value in (original.pretrained_cfg or {}).items() if value is not None}
        augmentation, usual = recipe.augmentation, Augmentation()
        for name in known.keys() & {"interpolation", "crop_pct"}:
            if getattr(augmentation, name) == getattr(usual, name):  # the recipe leaves it open
                augmentation = dataclasses.replace(augmentation, **{name: known[name]})
        data = DataModule(
            **recipe.data_arguments(),
            size=self.size,
            augmentation=augmentation,
            train_sizes=parse_sizes(recipe.train_sizes, "train_sizes"),
        )
        if data.info.channels != original.in_chans:
            raise ValueError(
                f"`model` must take {data.info.channels} channels, as {recipe.dataset} has, got {original.in_chans}."
            )
        for size in (self.size, *data.train_sizes):
            original.grid_at(size)
        mean, std = (tuple(known.get(name) or getattr(data.info, name)) for name in ("mean", "std"))
        mode = known.get("crop_mode", data.info.crop_mode)
        data.info = dataclasses.replace(data.info, mean=mean, std=std, crop_mode=mode)
        self._data = data
        return data

    def describe(self, data: DataModule) -> dict[str, Any]:
        """Return preprocessing, names of classes and architecture of the original, with its own position."""
        return {
            **{name: getattr(data.info, name) for name in ("mean", "std", "crop_mode")},
            **{name: getattr(data.augmentation, name) for name in ("interpolation", "crop_pct")},
            "class_names": label_names(self.original),
            "backbone": describe_backbone(self.original),
        }

    def build_model(self, described: Mapping[str, Any]) -> Backbone:
        """Build the model with the new position and the head of the original."""
        source = described["backbone"]
        classes, channels = (source["model_args"][name] for name in ("num_classes", "in_chans"))
        size = self.recipe.img_size or source["model_args"]["img_size"]
        model = build_backbone(self.recipe, classes, channels, size, source=source)
        crop = {name: described.get(name) for name in ("interpolation", "crop_pct", "crop_mode")}
        names = list(described.get("class_names", ())) or None
        prepare(model, Preparation(list(described["mean"]), list(described["std"]), label_names=names, **crop))
        return model.eval()

    def take_weights(self, model: nn.Module, source: Path | Mapping[str, Tensor], same: bool) -> Transfer:
        """Load the original with the new position, fitted to the old one on some of the images."""
        recipe, data = self.recipe, self._data
        assert data is not None
        changed = resize(copy.deepcopy(self.original), self.size)
        created: Any = changed.created  # known, as the architecture was described
        words = {name: created["arguments"][name] for name in ("encoding", "joining")}
        encoding = recipe.encoding or words["encoding"]
        images = data.spread_images("train", self.size, _FITTED)
        if float(images.std(0).max()) == 0:
            raise ValueError(f"`data_root` must have different images, got {len(images)} that are all alike.")
        change_position(changed, encoding, recipe.joining, images, least=None if recipe.anyway else 0.0)
        certificate: Certificate = changed.certificate
        self._certificate = {
            "model": recipe.model,
            "before": words,
            "after": {"encoding": encoding, "joining": recipe.joining},
            **json.loads(certificate.to_json()),
            "drift": {"fitted": self._drift(changed, data)},
        }
        return transfer(model, changed.state_dict())

    @torch.no_grad()
    def _drift(self, model: Backbone, data: DataModule) -> list[dict[str, Any]]:
        """Compare the tokens of held-out images with the tokens of the original, per layer."""
        images = data.spread_images("test", self.size, _HELD_OUT)
        return [layer._asdict() for layer in drift_of(features(self.original.cpu(), images), features(model, images))]

    def save(self, data: DataModule, folder: Path) -> None:
        write_json(folder / "certificate.json", dict(self._certificate or {}))

    def setup(self, model: nn.Module, data: DataModule, device: torch.device) -> None:
        """Move the original to the device, and freeze the parameters that no stage trains."""
        self.original.to(device)
        trainable = {parameter for parameter in model.parameters() if parameter.requires_grad}
        stages = {stage: trainable.intersection(stage_parameters(model, stage)) for stage in self.recipe.stages}
        self._stages = {stage: parameters for stage, parameters in stages.items() if parameters}
        if not self._stages:
            raise ValueError(f"`stages` must train something, got {' '.join(self.recipe.stages)}.")
        _train_only(model, set.union(*self._stages.values()))  # the optimizer is built with these
        model.eval()

    def loss(self, model: nn.Module, batch: Any, epoch: int) -> Tensor:
        """Return the mean distance of the tokens from the original's, (B,) averaged; trains the stage of the epoch."""
        stages = list(self._stages)
        stage = stages[min(epoch * len(stages) // self.recipe.epochs, len(stages) - 1)]
        if stage != self._stage:
            self._stage = stage
            _train_only(model, self._stages[stage])
        return self._distances(model, batch[0])[0].mean()

    def _distances(self, model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean distance of the tokens of each image, and the mean cosine of its features, (B,) each."""
        with torch.no_grad():
            expected = self._tokens(self.original, images)
        distances = []
        for (new, prefix), (old, _) in zip(self._tokens(model, images), expected, strict=True):
            cosine = F.cosine_similarity(new, old, dim=-1)  # (B, N)
            distance = 1 - cosine
            patches = distance[:, prefix:].mean(1)
            distances.append((distance[:, :prefix].mean(1) + patches) / 2 if prefix else patches)
        return torch.stack(distances).mean(0), cosine.mean(1)

    def _tokens(self, model: Any, images: Tensor) -> list[tuple[Tensor, int]]:
        """Return the tokens of some layers and the features, with their numbers of prefix tokens."""
        last = sum(model.depths) - 1
        chosen = sorted({(part * (last + 1) + last) // 4 for part in range(1, 4)} - {last})
        layers = []
        for layer, (tokens, grid) in enumerate(model.each_layer(images)):
            needed = layer in (*chosen, last)  # of other layers, features read the prefix tokens at most
            layers.append((tokens if needed else tokens[:, : grid.prefix].clone(), grid))
        chosen_tokens = [(layers[layer][0], layers[layer][1].prefix) for layer in chosen]
        return [*chosen_tokens, (model.features_of(layers), layers[-1][1].prefix)]

    def validate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the loss and the mean cosine of the features of each image."""
        loss, cosine = self._distances(model, batch[0])
        return {"loss": loss, self.metric.key: cosine}

    def finish(self, run: Run, data: DataModule) -> None:
        """Complete the certificate with the drift after training, and publish the model."""
        model: Any = run.model()
        path = run.folder / "certificate.json"
        certificate = read_json(path)
        certificate["drift"]["adapted"] = self._drift(model, data)
        write_json(path, certificate)
        model.save_pretrained(run.folder / "published")

    def next_step(self, folder: str) -> str:
        return f"the adapted model: {folder}/published, for graticule.load, timm and the commands"


def _train_only(model: nn.Module, trained: set[nn.Parameter]) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in trained)


def stage_parameters(model: Any, stage: Stage) -> Iterator[Any]:
    """Yield the parameters that a stage trains; the classifier is in none."""
    classifier = model.get_classifier()
    heads = {*nn.ModuleList(classifier if isinstance(classifier, tuple) else (classifier,)).parameters()}
    position = {*model.position.parameters()}
    for name, module in model.named_modules():
        attention = isinstance(module, nn.LayerNorm) or ".attn" in name or name.startswith("attn")
        for parameter in module.parameters(recurse=False):
            trained = stage == "all" or parameter in position or (stage == "attention" and attention)
            if trained and parameter not in heads:
                yield parameter
