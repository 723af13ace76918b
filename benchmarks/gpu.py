"""Run all performance benchmarks on a GPU by one command, in less than ten minutes.

    python benchmarks/gpu.py                # on a GPU: DeiT-Ti, DeiT-S, DeiT-B and Swin-T, batch 256, bfloat16
    python benchmarks/gpu.py --quick        # on a CPU: the same code on small inputs, to test it

It measures these parts, eager and compiled where this applies:
- models: training step and inference of each over timm's, with images per second, peak memory, and the fraction of the
  rate of a product of large matrices in the same dtype on the same device;
- position: LaPE, folded LaPE, and five PEGs over the default, with DeiT-Ti; a model over itself is the noise;
- mixing: PosMLP-T, and the product of a GGQPE unit by its matrix and by displacements at several sizes;
- biases: attention without a bias, with a table, with two factors, and by `flex_attention`;
- loaders: images per second of a folder of photographs, to be compared with those of the models;
- loop: an epoch of graticule's training with 16-mixed, bf16-mixed, torch.compile, and DDP on one device (NCCL).

Parts that do not fit into the time are listed. The results are written to docs/data/gpu.json with the versions and the
device, and plotted in docs/figures/gpu.png (--quick writes them to --output or a temporary folder).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from bias import steps as bias_steps
from data import large, pack, seconds, write_photographs
from matplotlib.figure import Figure
from torch import nn
from turns import Step, in_turns, inference_step, training_step
from windows import product_step

import graticule
from graticule.lab.figures.save import save_figure
from graticule.lab.recipes.load import load_recipe
from graticule.lab.training.loop import train
from graticule.system.files import read_json, write_json

DOCS = Path(__file__).parent.parent / "docs"
CATALOG = Path(graticule.__file__).parent / "studies" / "catalog.json"
#: Models of this library and of timm, under the same names.
NAMES = [
    "deit_tiny_patch16_224",
    "deit_small_patch16_224",
    "deit_base_patch16_224",
    "swin_tiny_patch4_window7_224",
]
Record = dict[str, Any]


class Bench:
    """Settings and measurements of a run.

    Args:
        quick: whether to run all parts on small inputs, on the CPU.
        minutes: time after which no further part starts.
    """

    def __init__(self, quick: bool, minutes: float) -> None:
        self.quick = quick
        self.device = "cpu" if quick else "cuda"
        self.batch = 1 if quick else 256
        self.rounds = 3 if quick else 10
        self.bf16 = not quick
        self.until = time.monotonic() + 60 * minutes
        self.records: list[Record] = []
        self.not_run: list[str] = []

    def turns(self, steps: dict[str, Step], warmup: int | None = None) -> dict[str, list[float]]:
        """Time interleaved steps; name -> seconds of each round."""
        warmup = (1 if self.quick else 3) if warmup is None else warmup
        return in_turns(steps, rounds=self.rounds, warmup=warmup, device=self.device)

    def step(self, model: nn.Module, phase: str, *, compiled: bool, side: int = 224) -> Step:
        """Build the training step or forward pass of a model."""
        images = torch.randn(self.batch, 3, side, side, device=self.device)
        build = training_step if phase == "training" else inference_step
        return build(model.to(self.device), images, bf16=self.bf16, compile=compiled)

    def add(self, part: str, name: str, times: list[float], reference: list[float] | None = None, **more: Any) -> None:
        """Record the median of a time, and the median and quartiles of its ratios to another one."""
        record = {"part": part, "name": name, "ms": 1e3 * statistics.median(times), **more}
        if reference is not None:
            ratios = sorted(a / b for a, b in zip(times, reference, strict=True))
            record["ratio"] = statistics.median(ratios)
            record["quartiles"] = statistics.quantiles(ratios, n=4, method="inclusive")[::2]
        self.records.append(record)
        shown = (
            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in record.items()
        )
        print(", ".join(shown), flush=True)

    def free(self) -> None:
        """Free the memory of the previous measurement and reset the peak."""
        gc.collect()
        torch.compiler.reset()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_memory(self) -> int | None:
        """Return the peak memory of the device in MB since `free`; None on a CPU."""
        return round(torch.cuda.max_memory_allocated() / 1e6) if self.device == "cuda" else None

    def product_rate(self) -> float:
        """Return the operations per second of a product of large matrices, in the dtype of the models."""
        side = 512 if self.quick else 8192
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        a, b = (torch.randn(side, side, device=self.device, dtype=dtype) for _ in range(2))
        times = self.turns({"product": lambda: torch.mm(a, b)})["product"]
        return 2 * side**3 / statistics.median(times)


def models(bench: Bench, name: str) -> None:
    """Measure a model relative to timm's, in training and inference, eager and compiled."""
    work = 2 * read_json(CATALOG)["models"][name]["multiply_adds"]
    rate = bench.product_rate()
    for phase, factor in (("training", 3), ("inference", 1)):
        for compiled in (False,) if bench.quick else (False, True):
            bench.free()
            torch.manual_seed(0)
            steps = {"ours": bench.step(graticule.create_model(name), phase, compiled=compiled)}
            ours = steps["ours"]
            ours()
            memory = bench.peak_memory()
            steps["timm"] = bench.step(timm.create_model(name), phase, compiled=compiled)
            times = bench.turns(steps)
            speed = bench.batch / statistics.median(times["ours"])
            bench.add(
                "models",
                name,
                times["ours"],
                times["timm"],
                over="timm",
                phase=phase,
                compiled=compiled,
                images_per_second=speed,
                peak_mb=memory,
                share_of_product=speed * factor * work / rate,
            )


def position(bench: Bench) -> None:
    """Measure LaPE and PEGs relative to the default."""
    name, five = "deit_tiny_patch16_224", "peg(places=[0, 1, 2, 3, 4])"
    builders: dict[str, Callable[[], nn.Module]] = {
        "default": lambda: graticule.create_model(name),
        "default again": lambda: graticule.create_model(name),
        "lape": lambda: graticule.create_model(name, joining="lape"),
        "lape folded": lambda: graticule.fold(graticule.create_model(name, joining="lape")),
        "five PEGs": lambda: graticule.create_model(name, encoding=f"{five} + learnable"),
    }
    for phase in ("training", "inference"):
        for compiled in (False,) if bench.quick else (False, True):
            bench.free()
            chosen = {k: build for k, build in builders.items() if phase == "inference" or k != "lape folded"}
            steps = {k: bench.step(build(), phase, compiled=compiled) for k, build in chosen.items()}
            times = bench.turns(steps)
            for key in list(steps)[1:]:
                bench.add("position", key, times[key], times["default"], over="default", phase=phase, compiled=compiled)


def mixing(bench: Bench) -> None:
    """Measure PosMLP-T, and the product of a unit, both by its matrix and by displacements."""
    for phase in ("training", "inference"):
        bench.free()
        step = bench.step(graticule.create_model("posmlp_tiny_224"), phase, compiled=False)
        times = bench.turns({"posmlp": step})["posmlp"]
        speed = bench.batch / statistics.median(times)
        bench.add("mixing", "posmlp_tiny_224", times, phase=phase, images_per_second=speed)
    for side in (8, 16) if bench.quick else (14, 28, 56, 96):
        bench.free()
        steps = {path: product_step(path, side, True, bench.device) for path in ("matrix", "displacement")}
        times = bench.turns(steps)
        bench.add("mixing", "displacement", times["displacement"], times["matrix"], over="matrix", tokens=side * side)


def biases(bench: Bench) -> None:
    """Measure a layer with a bias in several forms, and attention by `flex_attention`, forward and backward."""
    settings = argparse.Namespace(device=bench.device, bf16=bench.bf16, only=None)
    for tokens in (196,) if bench.quick else (196, 1024, 4096):
        bench.free()
        times = bench.turns(bias_steps(tokens, settings, True))
        for kind in ("factors (4), given", "table, given", "table, learned"):
            bench.add("biases", kind, times[kind], times["none"], over="no bias", tokens=tokens)
        times = bench.turns(bare_steps(tokens, bench))
        for kind in ("table", "flex_attention"):
            bench.add("biases", f"bare: {kind}", times[kind], times["none"], over="no bias", tokens=tokens)


def bare_steps(tokens: int, bench: Bench) -> dict[str, Step]:
    """Build attention without projections: without a bias, with a table, and with the same bias by `flex_attention`."""
    from torch.nn.attention.flex_attention import flex_attention

    side, heads, channels = round(tokens**0.5), 3, 64
    dtype = torch.bfloat16 if bench.bf16 else torch.float32
    # on a CPU flex_attention has no backward pass
    q, k, v = (
        torch.randn(1, heads, tokens, channels, device=bench.device, dtype=dtype, requires_grad=not bench.quick)
        for _ in range(3)
    )
    slopes = 2.0 ** -torch.arange(1, heads + 1, device=bench.device)
    index = torch.arange(tokens, device=bench.device)
    rows, columns = index[:, None], index[None]
    distance = (rows // side - columns // side) ** 2 + (rows % side - columns % side) ** 2
    table = (-slopes[:, None, None] * distance).to(dtype)

    def squared(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
        dy, dx = row // side - column // side, row % side - column % side
        return score - slopes[head] * (dy * dy + dx * dx)

    flex = flex_attention if bench.quick else torch.compile(flex_attention)
    calls = {
        "none": lambda: F.scaled_dot_product_attention(q, k, v),
        "table": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=table),
        "flex_attention": lambda: flex(q, k, v, score_mod=squared),
    }
    torch.testing.assert_close(calls["flex_attention"](), calls["table"](), rtol=0.05, atol=0.05)

    def step(call: Callable[[], Any]) -> None:
        out = call()
        if out.requires_grad:
            out.sum().backward()

    return {name: partial(step, call) for name, call in calls.items()}


def loaders(bench: Bench) -> None:
    """Measure photographs per second from a folder and from packed files, with DeiT's augmentation."""
    workers = 0 if bench.quick else min(16, torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_photographs(root / "folder", 64 if bench.quick else 8192)
        pack(root / "folder", root / "packed")
        for name, loader in large(root, workers).items():
            took, images = seconds(loader())
            bench.add("loaders", name, [took], images_per_second=images / took, workers=workers)


def loop(bench: Bench) -> None:
    """Measure an epoch of graticule's training, in the configurations that need a GPU."""
    forms: dict[str, dict[str, Any]] = {"float32": {}, "bf16-mixed": {"precision": "bf16-mixed"}}
    if not bench.quick:
        forms |= {"16-mixed": {"precision": "16-mixed"}, "compile": {"compile": True}}
    small = {"limit_train": 100, "limit_test": 20, "epochs": 1, "warmup_epochs": 0} if bench.quick else {"epochs": 3}
    for name, changes in forms.items():
        bench.free()
        recipe = dataclasses.replace(load_recipe("digits_quick"), **small, **changes)
        recipe = dataclasses.replace(recipe, accelerator="cpu" if bench.quick else "gpu")
        with tempfile.TemporaryDirectory() as folder:
            run = train(recipe, Path(folder) / "run", progress=False)
            result = run.result()
        bench.add("loop", name, [result["seconds"] / recipe.epochs], top1=result["last_top1"], epochs=recipe.epochs)


def parts(bench: Bench) -> Iterator[tuple[str, Callable[[Bench], None]]]:
    """Yield name and function of each part, the most important first."""
    names = NAMES[:1] if bench.quick else NAMES
    yield f"models: {names[0]}", partial(models, name=names[0])
    yield "position", position
    yield "biases", biases
    yield "loop", loop
    for name in names[1:]:
        yield f"models: {name}", partial(models, name=name)
    yield "mixing", mixing
    yield "loaders", loaders


def picture(records: list[Record], title: str) -> Figure:
    """Plot all ratios with their quartiles."""
    rows = [record for record in records if "ratio" in record]
    figure = Figure(figsize=(8.5, 1.2 + 0.26 * len(rows)), layout="constrained")
    ax = figure.subplots()
    for index, record in enumerate(rows):
        low, high = record["quartiles"]
        ax.plot([low, high], [index, index], color="#1f5fa8", linewidth=3, alpha=0.4)
        ax.plot(record["ratio"], index, "o", color="#1f5fa8")
    ax.axvline(1, color="#666666", linewidth=1)
    ax.set_yticks(range(len(rows)), [label(record) for record in rows], fontsize=8)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set(xlabel="ratio of the times, median and quartiles", title=title, xscale="log")
    ax.grid(axis="x", color="#dddddd", linewidth=0.6)
    return figure


def label(record: Record) -> str:
    """Return the label of a row of the figure."""
    compiled = "compiled" if record.get("compiled") else ""
    tokens = f"N {record['tokens']}" if "tokens" in record else ""
    named = filter(None, [record["name"], record.get("phase", ""), compiled, tokens])
    return f"{', '.join(named)} / {record['over']}"


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="all parts on small inputs, on the CPU")
    parser.add_argument("--minutes", type=float, default=9.0, help="no part starts after this time")
    parser.add_argument("--output", type=Path, help="folder of gpu.json and gpu.png (default: docs/data, docs/figures)")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        sys.exit("gpu.py: error: no GPU found; --quick runs the same code on small inputs, on the CPU.")
    if options.quick and options.output is None:
        options.output = Path(tempfile.mkdtemp(prefix="gpu-quick-"))
    bench = Bench(options.quick, options.minutes)
    device = "CPU" if options.quick else torch.cuda.get_device_name()
    for name, measure in parts(bench):
        if time.monotonic() > bench.until:
            bench.not_run.append(f"{name}: no time left")
            continue
        start = time.monotonic()
        try:
            measure(bench)
        except RuntimeError as error:  # out of memory, or unsupported by the compiler: continue with the other parts
            bench.not_run.append(f"{name}: {str(error).strip().splitlines()[0][:200]}")
        print(f"  ({name}: {time.monotonic() - start:.0f} s)", flush=True)
    settings = {"batch": bench.batch, "dtype": "bfloat16" if bench.bf16 else "float32", "quick": options.quick}
    versions = {name: version(name) for name in ("graticule", "torch", "timm", "lightning")}
    found = {
        "command": " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "device": device,
        "date": date.today().isoformat(),
        **settings,
        "versions": versions,
        "records": bench.records,
        "not_run": bench.not_run,
    }
    print(write_json((options.output or DOCS / "data") / "gpu.json", found))
    title = f"{device}, batch {bench.batch}, {settings['dtype']}"
    print(save_figure(picture(bench.records, title), (options.output or DOCS / "figures") / "gpu.png"))
    for line in bench.not_run:
        print(f"not run: {line}")


if __name__ == "__main__":
    main()
