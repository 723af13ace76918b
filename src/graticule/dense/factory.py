"""Detectors and segmentation models from names: backbone, encoding, joining, neck, and head or decoder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from torch import nn

from graticule.backbones.base import Backbone
from graticule.backbones.registry import MODELS, create_model, list_arguments
from graticule.checkpoints.load import load_own
from graticule.dense.detector import HEADS, Detector
from graticule.dense.features import Features, build_features
from graticule.dense.segmentation import DECODERS, SegmentationModel
from graticule.hub.config import (
    PREFIX,
    Architecture,
    EncodingChoice,
    JoiningChoice,
    Preparation,
    build_backbone,
    built_from,
    given_choices,
    prepare,
)
from graticule.hub.kinds import HUB, TIMM, ModelWords, from_pretrained, register_kind
from graticule.registry.checks import checked, is_path, known_name
from graticule.registry.fields import Count, read_typed
from graticule.registry.specs import Spec
from graticule.system.memory import build_within_memory

#: Numbers of classes of dense models, whose heads have channels per class and anchor.
DenseClasses = Annotated[int, Field(ge=1, le=2**14)]


@checked
def create_detector(
    backbone: str | Backbone,
    num_classes: DenseClasses,
    head: str = "retinanet",
    neck: str | None = None,
    *,
    encoding: EncodingChoice = None,
    joining: JoiningChoice = None,
    **arguments: Any,
) -> Detector:
    """Create a detector: a backbone with any encoding and joining, a neck and a head.

    Args:
        backbone: a name of `list_models()`; or a backbone, whose unused parts are then removed; or one that
            `from_pretrained` opens: timm:NAME, hf:OWNER/NAME or a path.
        num_classes: number of classes of objects, without the background.
        head: 'retinanet', 'fcos', 'faster_rcnn' or 'mask_rcnn', with options such as 'retinanet(score=0.1)'.
        neck: 'fpn', 'simple_pyramid' or 'adapter', with options, or several in order, such as
            'adapter + fpn(norm=True)'. By default 'fpn' after a pyramid and 'simple_pyramid' after a plain ViT.
        encoding: as in `create_model`.
        joining: as in `create_model`.
        **arguments: others of `create_model`: `img_size`, `pretrained`, ... Class tokens are left out unless
            `class_token=True`.

    Raises:
        ValueError: for an unknown name or option, or parts that do not fit each other.

    Example:
        >>> model = create_detector("deit_tiny_patch16_224", num_classes=80, joining="lape", depth=2)
        >>> type(model).__name__, model.features.strides
        ('RetinaNet', (8, 16, 32, 64, 128))
    """
    spec = _single("head", HEADS.specs(head))
    kind = HEADS[spec.name]
    built = _backbone(backbone, arguments | given_choices(encoding, joining), tokens=False)
    plain = len(built.depths) == 1
    neck = ("simple_pyramid" if plain else "fpn") if neck is None else neck
    features = build_features(built, neck, defaults={"added": "last", "window": 14, **kind.neck_options})
    detector: Detector = kind(features, num_classes, **spec.options)
    detector.created = {"head": head, "neck": neck}
    return detector


@checked
def create_segmenter(
    backbone: str | Backbone,
    num_classes: DenseClasses,
    decoder: str = "segmenter_mask",
    neck: str | None = None,
    auxiliary: str | None = None,
    *,
    encoding: EncodingChoice = None,
    joining: JoiningChoice = None,
    **arguments: Any,
) -> SegmentationModel:
    """Create a model of semantic segmentation: a backbone with any encoding and joining, a neck and a decoder.

    Args:
        backbone: as in `create_detector`.
        num_classes: number of classes.
        decoder: 'segmenter_linear', 'segmenter_mask', 'uperhead', 'fpn' or 'fcn', with options, such as
            'uperhead(channels=128)'.
        neck: as in `create_detector`; by default none for Segmenter's decoders and for 'uperhead' after a pyramid,
            'fpn' for 'fpn' after a pyramid, and 'simple_pyramid' for both after a plain ViT.
        auxiliary: a second decoder of the same maps for training, such as 'fcn'; none by default.
        encoding: as in `create_model`.
        joining: as in `create_model`.
        **arguments: others of `create_model`. Class tokens are left out, unless the decoder is one of Segmenter's or
            `class_token=True`.

    Raises:
        ValueError: for an unknown name or option, or parts that do not fit each other.

    Example:
        >>> import torch
        >>> model = create_segmenter("deit_tiny_patch16_224", num_classes=11, encoding="rope", depth=2)
        >>> tuple(model(torch.zeros(1, 3, 40, 70)).shape)
        (1, 11, 40, 70)
    """
    spec = _single("decoder", DECODERS.specs(decoder))
    kind = DECODERS[spec.name]
    built = _backbone(backbone, arguments | given_choices(encoding, joining), kind.tokens)
    if neck is None:
        neck = kind.neck if len(built.depths) > 1 else kind.plain_neck
    features: Features = build_features(built, neck, norm=kind.tokens)
    losses = [
        DECODERS[decoder_spec.name](features.channels, features.strides, num_classes, **decoder_spec.options)
        for decoder_spec in (spec, *([] if auxiliary is None else [_single("auxiliary", DECODERS.specs(auxiliary))]))
    ]
    model = SegmentationModel(features, losses[0], num_classes, *losses[1:])
    model.created = {"decoder": decoder, "neck": neck, "auxiliary": auxiliary}
    return model


def _backbone(backbone: str | Backbone, arguments: dict[str, Any], tokens: bool) -> Backbone:
    """Return the backbone, built from a name without classifier, and without class token unless `tokens`."""
    is_source = isinstance(backbone, str) and (backbone.startswith((HUB, TIMM)) or is_path(backbone))
    if arguments and (is_source or isinstance(backbone, Backbone)):
        source_text = repr(backbone) if is_source else "a module"
        raise ValueError(f"`backbone` must be a name if {', '.join(arguments)} are given, got {source_text}.")
    if is_source:
        opened = from_pretrained(str(backbone))
        backbone = opened if isinstance(opened, Backbone) else getattr(opened, "backbone", "")
        if not isinstance(backbone, Backbone):
            raise ValueError(f"`backbone` must open as a backbone, got a {type(opened).__name__}.")
    if isinstance(backbone, Backbone):
        return backbone
    name = known_name("backbone", backbone.removeprefix(PREFIX), MODELS)
    optional = "class_token" in list_arguments(name) and not MODELS[name].kind.needs_class_token
    if not tokens and optional and "class_token" not in arguments:
        arguments = {"class_token": False, "global_pool": "avg", **arguments}
    return create_model(name, **{"num_classes": 0, **arguments})


def _single(argument: str, specs: tuple[Spec, ...]) -> Spec:
    spec, *more = specs
    if more:
        raise ValueError(f"`{argument}` must be one name, got {' + '.join(map(str, specs))}.")
    return spec


@dataclass(frozen=True)
class _DenseConfig:
    """The entries of the config.json of a dense model that are read."""

    num_classes: Count
    backbone: Architecture
    parts: dict[str, str | None]
    pretrained_cfg: Preparation
    graticule: ModelWords


@register_kind("segmenter")
@register_kind("detector")
def open_dense(config: Path, weights: Path | None) -> nn.Module:
    """Build the detector or segmentation model of a config.json, and load its weights unless they are None."""
    described = read_typed(config, _DenseConfig)
    create: Any = create_detector if described.graticule.kind == "detector" else create_segmenter

    def build() -> nn.Module:
        backbone = build_backbone(config, described.backbone)
        prepare(backbone, described.pretrained_cfg)  # a detector normalizes by this
        return create(backbone, described.num_classes, **described.parts)

    with built_from(config):
        model = build_within_memory(build)
    return model if weights is None else load_own(model, weights)
