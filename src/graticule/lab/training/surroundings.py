"""The environment that weights depend on besides the recipe: versions of packages, and the number of threads."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

_PACKAGES = ("graticule", "torch", "torchvision", "timm", "lightning", "torchmetrics", "numpy")


def surroundings() -> dict[str, Any]:
    """Return the versions and the machine of this process, as plain values for JSON."""
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
    }


def changed_surroundings(recorded: Mapping[str, Any]) -> list[str]:
    """List the differences from the record of a run, such as 'threads 2 where the run had 4'."""
    found = []
    for part, values in surroundings().items():
        before = recorded.get(part)
        if isinstance(before, Mapping):
            found += [
                f"{name} {value} where the run had {before[name]}"
                for name, value in values.items()
                if name in before and before[name] != value
            ]
    return found
