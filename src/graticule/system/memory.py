"""The memory of the machine, and checks that a model fits into it."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from graticule.system.symbolic import is_statically_true

Model = TypeVar("Model", bound=nn.Module)

#: Bytes up to which a model is built without checking its size first.
_SMALL = 2**30


def free_memory(device: torch.device | str | None = None) -> int | None:
    """Return the bytes that this process can still allocate on a device, by default the CPU; None if unknown."""
    if device is not None and torch.device(device).type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    limits = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if available := _numbers("/proc/meminfo").get("MemAvailable:"):
        limits.append(available * 1024)
    group = "/sys/fs/cgroup/memory."
    if limit := _numbers(f"{group}max").get(""):
        files = _numbers(f"{group}stat").get("inactive_file", 0)  # are given back
        limits.append(limit - _numbers(f"{group}current").get("", 0) + files)
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            limits.append(limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize())
    except (ImportError, OSError):  # another system than Linux
        pass
    return min(limits, default=None)


def _numbers(path: str) -> dict[str, int]:
    """Read lines of a name, or none, and a number; none of a file that does not exist."""
    try:
        lines = [line.split() for line in Path(path).read_text().splitlines()]
    except OSError:
        return {}
    pairs = [("", *line) if len(line) == 1 else line for line in lines]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdecimal()}


#: The number of parameters that a model may have.
_PARAMETERS: ContextVar[float] = ContextVar("parameters", default=math.inf)


def check_memory(argument: str, what: str, size: float, device: torch.device | str | None = None) -> None:
    """Check that `size` bytes fit into the free memory of a device; in code that is compiled, nothing is checked."""
    if torch.compiler.is_compiling() or not is_statically_true(size > _SMALL):
        return
    free = free_memory(device)
    if free is not None and size > free:
        raise ValueError(
            f"`{argument}` must be such that {what} fit into the free memory, {free / 2**30:,.1f} GiB, got a size of "
            f"{size / 2**30:,.1f} GiB."
        )


@contextmanager
def sized_as(size: int) -> Iterator[None]:
    """Refuse models with more parameters than the files of their weights have bytes before they are computed.

    Smaller models are built, so that a file that is truncated is named as such when it is read.
    """
    token = _PARAMETERS.set(max(size, 2**24))
    try:
        yield
    finally:
        _PARAMETERS.reset(token)


def build_within_memory(build: Callable[[], Model], argument: str = "model") -> Model:
    """Build a model, if it fits into the machine's memory; `argument` names it in messages.

    A large model is first built on the meta device, without memory, to measure its size.
    """
    if torch.get_default_device().type != "cpu":
        return build()
    before = torch.get_rng_state()
    try:
        with _limited():
            return build()
    except (_TooLarge, RuntimeError):  # a RuntimeError if a single tensor does not fit
        torch.set_rng_state(before)
    with torch.device("meta"):
        model = build()
    tensors = [*model.parameters(), *model.buffers()]
    count, most = sum(parameter.numel() for parameter in model.parameters()), _PARAMETERS.get()
    if count > most:
        raise ValueError(f"`{argument}` must fit its weights, of {most:,} values at most, got {count:,} parameters.")
    check_memory(argument, "its tensors", sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    return build()


class _TooLarge(Exception):
    """The tensors so far are larger than a small model."""


@contextmanager
def _limited() -> Iterator[None]:
    """Raise in this thread at the parameter or buffer that makes a model larger than a small one.

    A module registers its parameters before it fills them.
    """
    size, parameters, thread = 0, 0, threading.get_ident()

    def count(module: nn.Module, name: str, tensor: Any) -> None:
        nonlocal size, parameters
        if isinstance(tensor, Tensor) and threading.get_ident() == thread:
            size += tensor.numel() * tensor.element_size()
            parameters += tensor.numel() * isinstance(tensor, nn.Parameter)
            if size > _SMALL or parameters > _PARAMETERS.get():
                raise _TooLarge

    with register_module_parameter_registration_hook(count), register_module_buffer_registration_hook(count):
        yield
