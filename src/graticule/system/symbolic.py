"""Code that depends on how a model is run: exported as a program for images of any size, or under autocast."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

_compiler: Any = torch.compiler


def is_statically_true(condition: bool) -> bool:
    """Return a condition on sizes; while `torch.export` traces a model, return whether it holds for all sizes.

    An exported program has no branches: if a size is dynamic, the path that is correct for every size must be traced.
    So a shortcut for some sizes is taken `if is_statically_true(...)`, and the general path must give the same result
    at these sizes.
    """
    if _compiler.is_exporting():
        return statically_known_true(condition)
    return bool(condition)


def ceiling(size: int, step: int) -> int:
    """Return size / step, rounded up; the exact quotient if a dynamic size is a multiple of `step`."""
    return size // step if is_statically_true(size % step == 0) else -(-size // step)


def as_tensor(sizes: Sequence[float] | Tensor, like: Tensor) -> Tensor:
    """Return sizes as a tensor, (n,), of the dtype and on the device of `like`; `new_tensor` would make constants."""
    if isinstance(sizes, Tensor):
        return sizes.to(like)
    return torch.stack([like.new_full((), size) for size in sizes])


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which autocast reduces no precision on the device of x; the meta device has no autocast."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
