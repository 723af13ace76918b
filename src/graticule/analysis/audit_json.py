"""Numbers of an audit as plain values for JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from graticule.analysis.attention_summary import AttentionSummary
from graticule.analysis.audit import Audit
from graticule.analysis.effect import Effect
from graticule.analysis.position_maps import StageMaps
from graticule.analysis.probe import Probe


def audit_json(found: Audit, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return all numbers of an audit as plain values; `about` describes the audit."""
    return {
        **about,
        "img_size": list(found.img_size),
        "images": found.images,
        "grids": [[grid.height, grid.width, grid.prefix] for grid in found.grids],
        "parameters": found.parameters,
        "position_parameters": found.position,
        "unknown_parameters": found.unknown,
        "seconds": [
            {"batch": one.batch, **{name: _plain(values) for name, values in one.seconds.items()}}
            for one in found.times
        ],
        "accuracy": None if found.accuracy is None else dict(zip(("top1", "error"), found.accuracy, strict=True)),
        "probe_of_patches": None if found.probe_content is None else _probe_record(found.probe_content),
        "probes": [_probe_record(one) for one in found.probes],
        "effects": [_effect_record(one) for one in found.effects],
        "sizes": [_effect_record(one) for one in found.sizes.values()],
        "translation": None
        if found.translation is None
        else {
            "inside": _plain(found.translation.inside),
            "border": _plain(found.translation.at_border),
            "all_patches": _plain(found.translation.all_patches),
            "prefix": _plain(found.translation.prefix),
            "logits": _plain(found.translation.logits),
            "flips": _plain(found.translation.flips),
        },
        "attention": None
        if found.attention is None
        else {one.name: _plain(getattr(found.attention, one.name)) for one in dataclasses.fields(AttentionSummary)},
        "maps": [_map_record(one) for one in found.maps],
        "unavailable": found.unavailable,
    }  # fmt: skip


def _map_record(maps: StageMaps) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for name, one in (("correlations", maps.correlations), ("rotary", maps.rotary)):
        if one is not None:
            uniform = _plain(one.uniform_distance)
            record[name] = {"sources": list(one.sources), "locality": _plain(one.locality), "uniform": uniform}
    if maps.biases is not None:
        biases = maps.biases
        spread, locality = _plain(biases.spread), _plain(biases.locality)
        record["biases"] = {"layers": _plain(biases.layers), "spread": spread, "locality": locality}
    return record


def _probe_record(one: Probe) -> dict[str, Any]:
    fields = ("mean", "error", "control_mean", "control_error", "r2", "control", "examples", "channels")
    return {name: _plain(getattr(one, name)) for name in fields}


def _effect_record(one: Effect) -> dict[str, Any]:
    accuracy = None if one.accuracy is None else dict(zip(("difference", "error"), one.accuracy, strict=True))
    return {
        "name": one.name,
        "change": _plain(one.mean_change),
        "change_error": _plain(one.change_error),
        "cosine": _plain(one.cosine.mean(1)),
        "same_top1": None if one.same is None else float(one.same.mean()),
        "accuracy": accuracy,
        "p_value": one.p_value,
    }


def _plain(value: object) -> Any:
    """Return numbers and arrays as plain values; NaN and infinities become None."""
    if isinstance(value, np.ndarray):
        return [_plain(one) for one in value]
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
