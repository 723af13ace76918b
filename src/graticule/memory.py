"""How much memory the machine has, and whether a model fits into it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from graticule.symbolic import holds

Model = TypeVar("Model", bound=nn.Module)

#: Bytes up to which a model is built without a second look.
_SMALL = 2**30
#: Functions that make a tensor of a given size.
_MAKERS = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)


def machine_memory() -> int | None:
    """Return the bytes that the machine, or the container that the process runs in, has; None if it does not say."""
    found = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    if text.isdecimal():
        found.append(int(text))
    return min(found, default=None)


#: Found once: it is asked about where a compiler looks on.
_MEMORY = machine_memory()


def check_memory(argument: str, what: str, size: float) -> None:
    """Check that `size` bytes fit into the machine's memory.

    Raises:
        ValueError: if they do not; it names `argument`, which decides the size.
    """
    if _MEMORY is not None and holds(size > _MEMORY):
        raise ValueError(
            f"`{argument}` must be such that {what} fits into memory, {_MEMORY / 2**30:,.1f} GiB, got one of "
            f"{size / 2**30:,.1f} GiB."
        )


def build_within_memory(build: Callable[[], Model]) -> Model:
    """Build a model, if it fits into the machine's memory.

    A large one is first built without memory, on the meta device, to see how large it is.

    Raises:
        ValueError: if it does not fit.
    """
    if torch.get_default_device().type != "cpu":
        return build()
    before = torch.get_rng_state()
    try:
        with _Limit():
            return build()
    except _TooLarge:
        torch.set_rng_state(before)
    with torch.device("meta"):
        model = build()
    tensors = [*model.parameters(), *model.buffers()]
    check_memory("model", "it", sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    return build()


class _TooLarge(Exception):
    """The tensors so far are more than a small model's."""


class _Limit(TorchFunctionMode):
    """Stops before tensors are made that are together larger than a small model's."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _MAKERS:
            given = args[0] if args and not isinstance(args[0], int) else args or kwargs.get("size", ())
            self.size += 4 * math.prod(given) if isinstance(given, list | tuple) else 4
            if self.size > _SMALL:
                raise _TooLarge
        return function(*args, **kwargs)
