"""Interleaved timing of several steps in one process, and the median ratio of two of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

Step = Callable[[], None]
#: Returns seconds: `time.perf_counter`, or `time.process_time` on a machine with other load.
Clock = Callable[[], float]


def training_step(model: torch.nn.Module, images: torch.Tensor, *, bf16: bool, compile: bool) -> Step:
    """Build a training step of a classifier, including the optimizer step."""
    model.train()
    labels = torch.randint(0, 1000, (len(images),), device=images.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    call = torch.compile(model, fullgraph=True) if compile else model

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(call(images), labels)
        loss.backward()
        optimizer.step()

    return step


def inference_step(model: torch.nn.Module, images: torch.Tensor, *, bf16: bool, compile: bool) -> Step:
    """Build a forward pass."""
    model.eval()
    call = torch.compile(model, fullgraph=True) if compile else model

    @torch.inference_mode()
    def step() -> None:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
            call(images)

    return step


def timed(step: Step, device: str, clock: Clock = time.perf_counter) -> float:
    """Time one step, in seconds, including the synchronization of the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def in_turns(
    steps: Mapping[str, Step], *, rounds: int, warmup: int, device: str, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Time each step once per round, in an order that rotates; returns name -> seconds of each round."""
    if rounds < 2:
        raise ValueError(f"`rounds` must be at least 2, for the quartiles, got {rounds}.")
    for step in steps.values():
        for _ in range(warmup):
            step()
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.disable()
    for round_ in range(rounds):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(timed(steps[name], device, clock))
    gc.enable()
    return times


def print_ratios(title: str, times: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str, str]]) -> None:
    """Print the medians, and for every pair the median and quartiles of first / second per round."""
    print(f"\n{title}: median ms " + ", ".join(f"{n} {1e3 * statistics.median(t):.1f}" for n, t in times.items()))
    for first, second in pairs:
        if first in times and second in times:
            ratios = [a / b for a, b in zip(times[first], times[second], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"  {first + ' / ' + second:34s} {middle:.4f}   (quartiles {low:.4f} to {high:.4f})")
