"""Opening of models in transformers' layout: the folder of its `save_pretrained`, or a repository on the hub."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from timm.data import create_transform
from torch import nn
from torchvision.transforms.functional import to_pil_image

from graticule.checkpoints.layouts import say_unused
from graticule.external.convert.conversion import convert
from graticule.external.convert.parts import CONVERSIONS, can_convert
from graticule.external.convert.sizes import config_for, encoders_of, read_config, sizes_of, without_sides
from graticule.external.images import image_channels
from graticule.external.resize import resize_in_place
from graticule.hub.config import Preparation, prepare
from graticule.hub.files import PREPROCESSOR, shards
from graticule.hub.kinds import register_kind
from graticule.position.places import by
from graticule.registry.checks import check_numbers, install, printable
from graticule.registry.fields import LayerIndex, check_value, read_typed
from graticule.surgery.export import errors_only
from graticule.system.files import read_json

#: Patterns of classes that have more than an encoder of images -> the class of the encoder, if that converts.
_ENCODERS = {
    r"For(?:MaskedImageModeling|PreTraining|ImageClassification|VideoClassification)$": "Model",
    r"^CLIPModel$": "CLIPVisionModelWithProjection",
    r"^(Sam|Siglip|Siglip2)Model$": r"\1VisionModel",
    r"^Qwen2VLForConditionalGeneration$": "Qwen2VisionTransformerPretrainedModel",
    r"^Qwen3VLForConditionalGeneration$": "Qwen3VLVisionModel",
}
#: Patterns of names of tensors of such a checkpoint -> names in the encoder, if transformers does not know them.
_WITHIN = {r"^(?:model\.)?visual\.": ""}
#: PIL's numbers of interpolations -> timm's names.
_INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
#: Height and width of the images on which the preprocessing that was read is compared with transformers'.
_COMPARED = ((64, 160), (160, 64), (96, 96))


@dataclass(frozen=True)
class _FolderDescription:
    """Entries that are read from transformers' config.json."""

    architectures: list[str] = field(default_factory=list)
    quantization_config: dict[str, Any] | None = None


@register_kind("transformers")
def open_transformers(config: Path, weights: Path) -> nn.Module:
    """Open a model in transformers' layout as a backbone, or as it is, with the preprocessing of its images.

    The class is one of transformers itself: code of a repository is never run.
    """
    transformers = import_transformers(config)
    described = read_typed(config, _FolderDescription)
    _check_layers(config)
    name = described.architectures[0] if described.architectures else "no architecture"
    encoders = (re.sub(pattern, encoder, name) for pattern, encoder in _ENCODERS.items())
    known = (encoder for encoder in (name, *encoders) if f"transformers.{encoder}" in CONVERSIONS)
    kind = class_of(transformers, next(known, name))
    of_images = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    # a class that converts, or that takes images
    takes_images = of_images and "pixel_values" in (kind.main_input_name, *signature(kind.forward).parameters)
    if not of_images or not (f"transformers.{kind.__name__}" in CONVERSIONS or takes_images):
        raise ValueError(
            f"{config} must be of one of transformers' classes of models of images, got {printable(name)}; code of a "
            "repository is never run."
        )
    if described.quantization_config is not None:
        raise ValueError(f"{config} must be of a model with floating-point weights, got a quantized one.")
    there = with_weights(transformers, kind, weights)
    settings: Any = there.config
    size = next((sizes_of(part)[0][-2:] for part in encoders_of([settings])), None)
    if size is not None and size[0] != size[1]:
        resize_in_place(there)  # whose grids its class reads as squares
    model = converted_or_itself(there, config.parent)
    outputs = getattr(settings, "out_features", None)
    if model is not there and outputs and outputs != settings.stage_names[-1:]:
        indices = [index - 1 for index in settings.out_indices if index > 0]
        warnings.warn(
            f"{config} has `out_features` {', '.join(outputs)}, which a {name} does not return: "
            f"forward_intermediates(images, indices={indices}) does, without the stem.",
            stacklevel=2,
        )
    if (preprocessor := config.parent / PREPROCESSOR).is_file():
        prepare(model, _preparation(transformers, preprocessor, size))
    if model is there and size is not None:
        untyped: Any = model
        untyped.pretrained_cfg = {**untyped.pretrained_cfg, "input_size": (image_channels(model), *size)}
    return model


#: In names of numbers of layers.
LAYERS = r"layers|depth|blocks"


def _check_layers(config: Path) -> None:
    """Refuse more layers than any model has, before a configuration of transformers names each of them."""
    left: list[Any] = [read_json(config)]
    while left:
        for name, value in left.pop().items():
            left += [value] if isinstance(value, dict) else []
            if re.search(LAYERS, name):
                check_numbers(name, value, LayerIndex)


def converted_or_itself(model: nn.Module, source: object) -> nn.Module:
    """Convert a model, or return it as it is, with a warning, if it does not convert."""
    try:
        return convert(model)
    except ValueError as error:
        why = f": {str(error).removesuffix('.')}" if can_convert(model) else ""
        takes_text = getattr(model, "main_input_name", "pixel_values") == "input_ids"
        warnings.warn(
            f"{source} is opened as {type(model).__name__} of its library, which does not convert{why}; it can be "
            f"{'resized' if takes_text else 'audited, checked, explored, exported and resized'}.",
            stacklevel=2,
        )
        untyped: Any = model
        untyped.pretrained_cfg = getattr(model, "pretrained_cfg", None) or {}
        return model


def import_transformers(config: Path) -> Any:
    """Import transformers, for a model that `config` describes."""
    try:
        with errors_only("torch.utils._pytree"):  # warnings for the authors of torchao, which it imports
            import transformers
            import transformers.modeling_utils
    except ImportError as error:
        raise ValueError(
            f"{config} is a model of transformers, which is not installed: {install('transformers')}."
        ) from error
    return transformers


def class_of(transformers: Any, name: str) -> Any:
    """Return a class of transformers by its name, also one of those encoders that are not among its public names."""
    model = next((model for start, model in _NOT_PUBLIC.items() if name.startswith(start)), None)
    if model is None:
        return getattr(transformers, name, None)
    return getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name, None)


#: Starts of the names of encoders -> their modules in transformers.
_NOT_PUBLIC = {"Qwen2Vision": "qwen2_vl", "Qwen2_5_Vision": "qwen2_5_vl"}


def with_weights(transformers: Any, kind: Any, weights: Path) -> nn.Module:
    """Return a model of a class with the file of its weights, or files that an index names; all must be there."""
    folder, name, files = weights.parent, kind.__name__, shards(weights)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "key_mapping": _WITHIN}
    with _silent(transformers):
        try:
            config = read_config(kind, folder)
            options["config"] = config_for(kind, config)
            with torch.device("meta"):
                empty = kind(options["config"])
            count = sum(parameter.numel() for parameter in empty.parameters())
            if count > sum(file.stat().st_size for file in files):
                raise ValueError(f"its config has {count:,} weights, more than the file has bytes.")
            model, problems = kind.from_pretrained(folder, **options)
            if poolers := {key.rpartition("pooler.")[0] for key in problems["missing_keys"] if "pooler." in key}:
                for place in poolers:  # built without one, as by add_pooling_layer=False
                    part = model.get_submodule(place.rstrip("."))
                    del part.pooler
                    part.pooler = None
                problems["missing_keys"] = {key for key in problems["missing_keys"] if "pooler." not in key}
            without_sides(model)
        except Exception as error:  # it has many kinds for a damaged file
            reason = printable(" ".join(str(error).split())[:200])
            raise ValueError(f"{folder} cannot be opened as {name}: {reason}") from error
    for verb, keys in (("lacks", "missing_keys"), ("has in another shape than by its config", "mismatched_keys")):
        if names := sorted(key if isinstance(key, str) else key[0] for key in problems[keys]):
            raise ValueError(f"{folder} must have all weights of {name}, but {verb} {printable(names[0])}.")
    for file in files:
        with safe_open(file, "pt") as tensors:  # transformers casts the whole numbers of a quantized tensor
            for key in tensors.keys():  # noqa: SIM118
                if (dtype := tensors.get_slice(key).get_dtype()) in ("I8", "U8"):
                    raise ValueError(f"{folder} must have floating-point weights, got {dtype} of {printable(key)}.")
                classes = tensors.get_slice(key).get_shape()[0] if key == "classifier.weight" else config.num_labels
                if classes != config.num_labels:
                    both = f"{config.num_labels} in its config.json and {classes} in {key}"
                    raise ValueError(f"{folder} must have one number of classes, got {both}.")
    if problems["unexpected_keys"]:
        say_unused(folder, sorted(problems["unexpected_keys"]), f"outside of the {name} that is opened")
    return model


@contextmanager
def _silent(transformers: Any) -> Iterator[None]:
    """Suppress progress bars and reports of transformers."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _preparation(transformers: Any, file: Path, model_size: tuple[int, ...] | None) -> Preparation:
    """Return the preprocessing of images in timm's words; what these cannot say, or another size, is a warning."""
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(file.parent, **options)
        # x / 255 is normalized to the value that rescaling by the factor and normalizing give
        scale = 255 * (processor.rescale_factor if processor.do_rescale else 1)
        normalized = processor.do_normalize
        mean, std = (processor.image_mean, processor.image_std) if normalized else ([0.0] * 3, [1.0] * 3)
        shortest, crop = processor.size.shortest_edge, processor.crop_size if processor.do_center_crop else None
        resized = (processor.size.height, processor.size.width) if shortest is None else (shortest, shortest)
        size = resized if crop is None else (crop.height, crop.width)
        words: dict[str, Any] = {
            "mean": [value / scale for value in mean],
            "std": [value / scale for value in std],
            "interpolation": _INTERPOLATIONS[processor.resample],
            "crop_pct": _share(size[0], resized[0]),
            "crop_mode": "squash" if shortest is None else "center",
        }
        preparation: Preparation = check_value(Preparation, words, str(file))
        for height, width in _COMPARED:
            generator = torch.Generator().manual_seed(0)
            image = to_pil_image(torch.randint(256, (3, height, width), dtype=torch.uint8, generator=generator))
            transformed = create_transform(size, **words)(image)
            expected = processor(image, return_tensors="pt")["pixel_values"][0]
            # bytes are rounded after each of two resized axes here, and at most once there
            tolerance = 2 / 255 / min(preparation.std or [1.0])
            if transformed.shape != expected.shape or (transformed - expected).abs().max() > tolerance:
                name = type(processor).__name__
                raise ValueError(f"`{name}` must resize, crop and normalize, got another change of images.")
    except Exception as error:  # it has many kinds for a damaged file
        reason = printable(" ".join(str(error).split())[:200]).removesuffix(".")
        warnings.warn(f"the preprocessing of {file} is not known: {reason}; give your own.", stacklevel=2)
        return Preparation()
    if model_size and size != model_size:
        warnings.warn(
            f"{file} makes images of {by(size)} pixels, and the model is for {by(model_size)}, to which they are "
            "prepared; resize(model, size) makes a model for others.",
            stacklevel=2,
        )
    return preparation


def _share(cropped: int, resized: int) -> float:
    """Return the share of the resized side that is cropped, so that timm's division returns that side."""
    share = cropped / resized
    return share if math.floor(cropped / share) == resized else math.nextafter(share, 0)
