"""The config.json of a detector or a segmentation model: the names of its backbone and of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graticule.backbones import Backbone
from graticule.backbones.hub_config import architecture_of, configuration_of, words_of


def dense_config(model: Any, kind: str, preprocessing: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model of `create_detector` or `create_segmenter`.

    Raises:
        ValueError: if it or its backbone was built in another way.
    """
    backbone: Backbone = model.backbone
    if model.created is None:
        raise ValueError(
            f"`model` must be built by create_detector or create_segmenter, whose names a file can store, got a "
            f"{type(model).__name__} that was built in another way."
        )
    described = architecture_of(backbone)
    return {
        "num_classes": model.num_classes,
        "pretrained_cfg": configuration_of(backbone, model.num_classes, preprocessing),
        "backbone": described,
        "parts": dict(model.created),
        "graticule": {"kind": kind, **words_of(model, backbone)},
    }
