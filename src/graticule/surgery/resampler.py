"""Find and replace the resampler of a model's tables."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from graticule.encodings import Position
from graticule.resampling import RESAMPLERS, Resampler, build_resampler
from graticule.specs import Spec


def resampled_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model whose tables are resampled by an exchangeable resampler.

    Raises:
        ValueError: if there are none.
    """
    found = with_own_resampler(model.modules())
    if not found and not any(isinstance(module, Position) for module in model.modules()):
        raise ValueError(
            f"`model` must have a position of this library to be resampled, got {type(model).__name__} of "
            f"{type(model).__module__}; graticule.convert gives a model of timm one."
        )
    if not found:
        raise ValueError(
            "`model` must have an encoding that is resampled, such as learnable, factorized or relative_bias, got one "
            "with none: its position is computed for every size, or it has no position."
        )
    return found


def with_resampler(model: nn.Module, name: str) -> nn.Module | None:
    """Return a copy of `model` that resamples all suitable tables by `name`; None if there are none.

    Parameters are shared with `model`.
    """
    memo = {id(value): value for value in [*model.parameters(), *model.buffers()]}
    changed = copy.deepcopy(model, memo)
    kind = RESAMPLERS[Spec.parse(name).name]
    able = [module for module in resampled_modules(changed) if table_of(module) in kind.takes]
    for module in able:
        module.resampler = build_resampler(name, table_of(module))
    return changed if able else None


def with_own_resampler(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the modules whose tables are resampled by an exchangeable resampler."""
    return [module for module in modules if isinstance(getattr(module, "resampler", None), Resampler)]


def table_of(module: Any) -> Any:
    """Return the kind of table in a module or module class: one of positions or of displacements."""
    return getattr(module, "holds", "positions")
