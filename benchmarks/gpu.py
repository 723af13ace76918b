"""Measure the library on a GPU, most important parts first, within the minutes that it is given.

    python benchmarks/gpu.py                     # on a GPU, batch 256, bfloat16
    python benchmarks/gpu.py --minutes 6 --output results    # and the rest later, with the same --output
    python benchmarks/gpu.py --quick             # on a CPU: the same code on tiny inputs, to test it

Every ratio is the median over rounds in which ours and the alternative run in turns, in one process. Each part is
written to gpu.json and to gpu.md when it is done (by default in docs/data and docs/results), so an interrupted run
keeps what it measured, and a later one with the same output measures the parts that are missing. A part that fails,
such as for want of memory, is named, and the others run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    Step = Callable[[], None]

DOCS = Path(__file__).parent.parent / "docs"
Record = dict[str, Any]
#: Models of this library and of timm, under the same names.
NAMES = ("deit_tiny_patch16_224", "swin_tiny_patch4_window7_224")
PHASES = ("training", "inference")
#: Part -> what its table shows, and its goal.
GOALS = {
    "models": "The ratio is our time over timm's. The goal is at most 1.00 in training and inference, with at most "
    "timm's memory.",
    "position": "The ratio is to the default of the same model. The goals are at most 1.01 for LaPE (1.005 compiled, "
    "1.00 folded), and 1 / 0.985 for one PEG (CPVT-Ti). LaPE adds to each layer a norm of the table and a sum over all "
    "tokens, and in training sums the gradient of the table over the batch. In eager mode each is a kernel that reads "
    "or writes the whole batch, which likely explains the ratio; `fold` removes the norms, `compile` merges the sums.",
    "biases": "The ratio is to the same attention layer of DeiT-Ti without a bias, forward and backward. The goal is "
    "at most 1.1 for factors at 4,096 tokens.",
    "windows": "The ratio is the inference time of Swin-T over timm's, with our choice of kernels in small windows and "
    "with cuDNN's. `docs/data/gpu.json` has each kernel at each window size.",
    "loop": "The ratio is the time of the training loop to a bare loop, with images on the device. The goal is at most "
    "1.03, and for ViT-Lite at most 0.6 of the eager bare loop if a step is captured as a graph.",
}


class Bench:
    """Settings and measurements of a run.

    Args:
        quick: whether to run all parts on tiny inputs, on the CPU.
        minutes: time after which no further measurement starts.
    """

    def __init__(self, quick: bool, minutes: float) -> None:
        self.quick = quick
        self.device = "cpu" if quick else "cuda"
        self.batch = 1 if quick else 256
        self.rounds = 3 if quick else 12
        self.until = time.monotonic() + 60 * minutes
        self.records: list[Record] = []

    def turns(self, steps: dict[str, Step], warmup: int | None = None) -> dict[str, list[float]]:
        """Time steps in turns; name -> seconds of each round."""
        from turns import in_turns

        warmup = (1 if self.quick else 4) if warmup is None else warmup
        return in_turns(steps, rounds=self.rounds, warmup=warmup, device=self.device)

    def step(self, model: nn.Module, phase: str, *, compiled: bool, batch: int = 0, side: int = 224) -> Step:
        """Build the training step or forward pass of a model."""
        import torch
        from turns import inference_step, training_step

        channels = getattr(model, "in_chans", 3)
        images = torch.randn(batch or self.batch, channels, side, side, device=self.device)
        build = training_step if phase == "training" else inference_step
        return build(model.to(self.device), images, bf16=not self.quick, compile=compiled)

    def add(self, name: str, times: list[float], reference: list[float] | None = None, **more: Any) -> Record:
        """Record the median of a time, and median and quartiles of its ratios to another one; returns the record."""
        record = {"name": name, **more, "ms": 1e3 * statistics.median(times)}
        if reference is not None:
            ratios = sorted(a / b for a, b in zip(times, reference, strict=True))
            low, record["ratio"], high = statistics.quantiles(ratios, n=4, method="inclusive")
            record["quartiles"] = [low, high]
        self.records.append(record)
        print("  " + ", ".join(f"{key} {show(value)}" for key, value in record.items()), flush=True)
        return record

    def free(self) -> None:
        """Free the memory of the previous measurement and reset the peak."""
        import torch

        gc.collect()
        torch.compiler.reset()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self, step: Step) -> int:
        """Return the peak memory of a step on the device, beyond what is allocated before it, in MB; 0 on a CPU."""
        import torch

        if self.device != "cuda":
            return 0
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return round((torch.cuda.max_memory_allocated() - before) / 1e6)


def show(value: Any) -> str:
    """Return a value of a record for a line or a table."""
    if isinstance(value, list):
        return " to ".join(map(show, value))
    return f"{value:,.{'4g' if abs(value) < 1e4 else '0f'}}" if isinstance(value, float) else str(value)


def models(bench: Bench, name: str) -> None:
    """Measure a model over timm's, in training and inference, eager and compiled, with full batches and one image."""
    import timm
    import torch

    import graticule

    builders = {"ours": partial(graticule.create_model, name), "timm": partial(timm.create_model, name)}
    cells = [("training", bench.batch), ("inference", bench.batch), ("inference", 1)]
    for compiled in (False, True):
        for phase, batch in cells[: 1 if bench.quick else 3]:
            if (compiled and bench.quick) or time.monotonic() > bench.until:
                continue
            bench.free()
            steps, peaks = {}, {}
            for key, build in builders.items():
                torch.manual_seed(0)
                steps[key] = bench.step(build(), phase, compiled=compiled, batch=batch)
                peaks[key] = bench.peak(steps[key])
            times = bench.turns(steps)
            speed = batch / statistics.median(times["ours"])
            bench.add(
                name,
                times["ours"],
                times["timm"],
                phase=phase,
                batch=batch,
                compiled=compiled,
                images_per_second=speed,
                peak_mb=peaks["ours"],
                timm_mb=peaks["timm"],
            )


def position(bench: Bench) -> None:
    """Measure LaPE, folded LaPE and PEGs over the default of a DeiT."""
    import graticule

    name = NAMES[0]

    builders: dict[str, Callable[[], nn.Module]] = {
        "default": lambda: graticule.create_model(name),
        "default again": lambda: graticule.create_model(name),
        "lape": lambda: graticule.create_model(name, joining="lape"),
        "one PEG": lambda: graticule.create_model(name.replace("deit", "cpvt")),
        "five PEGs": lambda: graticule.create_model(name, encoding="peg(places=[0, 1, 2, 3, 4]) + learnable"),
        "lape folded": lambda: graticule.fold(graticule.create_model(name, joining="lape").eval()),
    }
    for compiled in (False,) if bench.quick else (False, True):
        for phase in PHASES:
            if time.monotonic() > bench.until:
                return
            bench.free()
            chosen = [key for key in builders if phase == "inference" or key != "lape folded"]
            if compiled:
                chosen = [key for key in chosen if key not in ("default again", "five PEGs")]
            steps = {key: bench.step(builders[key](), phase, compiled=compiled) for key in chosen}
            times = bench.turns(steps)
            for key in chosen[1:]:
                bench.add(key, times[key], times["default"], model=name, phase=phase, compiled=compiled)


def biases(bench: Bench) -> None:
    """Measure an attention layer with a bias as a table, as factors and by flex_attention, forward and backward."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    from graticule.encodings.forms.bias import squared_distance_factors
    from graticule.layers.attention import Attention
    from graticule.position.grid import Grid
    from graticule.position.layer import LayerPosition

    heads, dim = 3, 192
    flex = flex_attention if bench.quick else torch.compile(flex_attention)
    for side in (6,) if bench.quick else (14, 32, 64):
        if time.monotonic() > bench.until:
            return
        bench.free()
        grid = Grid(side, side)
        tokens = grid.tokens
        batch = max(1, 65536 // tokens) if not bench.quick else 1
        layer = Attention(dim, heads).to(bench.device)
        x = torch.randn(batch, tokens, dim, device=bench.device, requires_grad=True)
        slopes = 2.0 ** -torch.arange(1, heads + 1, device=bench.device)
        table = -slopes[:, None, None] * grid.offsets(torch.device(bench.device)).to(slopes.dtype).square().sum(-1)
        arguments = {
            "none": None,
            "factors": squared_distance_factors(grid, -slopes),
            "table": table,
            "learned table": torch.nn.Parameter(table.clone()),
        }

        def run(bias: Any, layer: Attention = layer, x: torch.Tensor = x) -> None:
            with torch.autocast(bench.device, torch.bfloat16, enabled=not bench.quick):
                y = layer(x, LayerPosition(bias=bias))
            y.sum().backward()

        times = bench.turns({key: partial(run, bias) for key, bias in arguments.items()})
        for key in list(arguments)[1:]:
            bench.add(key, times[key], times["none"], tokens=tokens, batch=batch)

        dtype = torch.float32 if bench.quick else torch.bfloat16  # on a CPU flex_attention has no backward pass
        q, k, v = (
            torch.randn(batch, heads, tokens, dim // heads, device=bench.device, dtype=dtype).requires_grad_(
                not bench.quick
            )
            for _ in range(3)
        )

        def squared(score: Any, _: Any, head: Any, row: Any, column: Any, side: int = side, of: Any = slopes) -> Any:
            dy, dx = row // side - column // side, row % side - column % side
            return score - of[head] * (dy * dy + dx * dx)

        attend = torch.nn.functional.scaled_dot_product_attention
        in_dtype = table.to(dtype)[None]
        calls = {
            "none": partial(attend, q, k, v),
            "table": partial(attend, q, k, v, attn_mask=in_dtype),
            "flex": partial(flex, q, k, v, score_mod=squared),
        }

        def both(call: Callable[[], torch.Tensor]) -> None:
            y = call()
            if y.requires_grad:
                y.sum().backward()

        times = bench.turns({key: partial(both, call) for key, call in calls.items()})
        for key in ("table", "flex"):
            bench.add(f"without projections: {key}", times[key], times["none"], tokens=tokens, batch=batch)


def windows(bench: Bench) -> None:
    """Measure attention within windows with a bias, without gradients, by the kernels that take one."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    names = ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    kernels = {name.partition("_")[0].lower(): getattr(SDPBackend, name) for name in names[-1 if bench.quick else 0 :]}
    dtype = torch.float32 if bench.quick else torch.bfloat16
    for side in (3,) if bench.quick else (4, 7, 8, 12, 16, 24):
        bench.free()
        tokens = side * side
        batch = 1 if bench.quick else 256 * 3136 // tokens
        q, k, v = (torch.randn(batch, 3, tokens, 32, device=bench.device, dtype=dtype) for _ in range(3))
        bias = torch.randn(1, 3, tokens, tokens, device=bench.device, dtype=dtype)

        def attend(chosen: Any, of: tuple[torch.Tensor, ...] = (q, k, v, bias)) -> None:
            with torch.inference_mode(), sdpa_kernel(chosen) if chosen else contextlib.nullcontext():
                torch.nn.functional.scaled_dot_product_attention(*of)

        choices = {"chosen by PyTorch": None, **kernels}
        times = bench.turns({name: partial(attend, chosen) for name, chosen in choices.items()})
        for name in kernels:
            bench.add(name, times[name], times["chosen by PyTorch"], tokens=tokens, batch=batch)
    small_windows(bench)


def small_windows(bench: Bench) -> None:
    """Measure inference of Swin-T over timm's, with all kernels and without cuDNN's in small windows."""
    import timm

    import graticule
    from graticule.backbones import window_attention

    def call(step: Step, most: int) -> None:
        window_attention.SMALL_WINDOW = most
        step()

    name, usual = NAMES[1], window_attention.SMALL_WINDOW
    for compiled in (False,) if bench.quick else (False, True):
        bench.free()
        steps: dict[str, Step] = {}
        for key, most in (("ours", usual), ("ours with cuDNN's kernel", 0), ("timm", usual)):
            model = (timm if key == "timm" else graticule).create_model(name)
            steps[key] = partial(call, bench.step(model, "inference", compiled=compiled), most)
        times = bench.turns(steps)
        for key in list(steps)[:2]:
            bench.add(f"{name}, {key}, over timm", times[key], times["timm"], batch=bench.batch, compiled=compiled)


def loop(bench: Bench) -> None:
    """Measure graticule's training loop over a bare one: DeiT-Ti with 14 x 14 patches; ViT-Lite, also captured."""
    from loop import measure

    from graticule.lab.recipes.load import load_recipe

    deit = {"model": NAMES[0], "patch_size": 2, "batch_size": 250}
    lite = {"model": "vit_lite_7_4_32", "img_size": (32, 32), "batch_size": 128}
    for compiled in (False,) if bench.quick else (False, True):
        for graph, changes in ((False, deit), (False, lite), (True, lite)):
            if time.monotonic() > bench.until:
                return
            bench.free()
            small = {"model_kwargs": ("depth=1", "embed_dim=48", "num_heads=3")} if bench.quick else {}
            recipe = dataclasses.replace(
                load_recipe("digits_quick"),
                **{**changes, **({"batch_size": 20} if bench.quick else {})},
                epochs=1000,
                precision="32-true" if bench.quick else "bf16-mixed",
                accelerator="cpu" if bench.quick else "gpu",
                compile=compiled,
                cuda_graph=graph,
                **small,
            )
            pairs = measure(recipe, steps=5, rounds=3 if bench.quick else 20)
            ours, bare = zip(*pairs, strict=True)
            rate = 5 * recipe.batch_size / statistics.median(ours)
            bench.add(
                f"{recipe.model} over bare loop", ours, bare, compiled=compiled, graph=graph, images_per_second=rate
            )


#: Name -> function of each part, the most important first.
PARTS: dict[str, Callable[[Bench], None]] = {
    f"models: {NAMES[0]}": partial(models, name=NAMES[0]),
    "position": position,
    "biases": biases,
    "windows": windows,
    "loop": loop,
    f"models: {NAMES[1]}": partial(models, name=NAMES[1]),
}


def cell(row: Record, key: str) -> str:
    """Return a value of a record for the page, a ratio with its quartiles."""
    between = " ({}-{})".format(*map(show, row["quartiles"])) if key == "ratio" and key in row else ""
    return show(row[key]) + between if key in row else ""


def finding(rows: list[Record]) -> str:
    """Return the first paragraph: the cost of LaPE in DeiT-Ti, or nothing if it was not measured."""
    ratios = {(row["phase"], row["compiled"]): f"{row['ratio']:.2f}" for row in rows if row["name"] == "lape"}
    phases = [f"{ratios.get((phase, False))} in {phase} ({ratios.get((phase, True))} compiled)" for phase in PHASES]
    text = f"In a DeiT-Ti, LaPE multiplies the time of the default joining by {' and '.join(phases)}.\n"
    return text if len(ratios) == 4 else ""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results in Markdown."""
    from graticule.system.tables import markdown

    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    lines = [
        "# On a GPU\n",
        finding(record["parts"].get("position", [])),
        f"`{record['command']}` measured these times on an {record['device']} with {versions}. The batch is "
        f"{record['batch']} unless a table says otherwise, in {record['dtype']}. The models of a ratio alternate, and "
        "it is the median over rounds, with quartiles. Times are medians.",
    ]
    for title, goal in GOALS.items():
        records = [row for part, rows in record["parts"].items() for row in rows if part.partition(":")[0] == title]
        records = [row for row in records if title != "windows" or NAMES[1] in row["name"]]
        if not records:
            continue
        dates = sorted({record["dates"][part] for part in record["parts"] if part.partition(":")[0] == title})
        columns = [key for key in dict.fromkeys(key for row in records for key in row) if key != "quartiles"]
        rows = [tuple(cell(row, key) for key in columns) for row in records]
        named = tuple(key.replace("_", " ") for key in columns)
        lines += [f"\n## {title.capitalize()}\n", f"{goal} Measured {' and '.join(dates)}.\n", markdown([named, *rows])]
    lines += ["", *(f"Not run: {name}, {why}." for name, why in record["not_run"].items())]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Measure the parts that are missing, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="all parts on tiny inputs, on the CPU")
    parser.add_argument("--minutes", type=float, default=9.0, help="no measurement starts after this time")
    parser.add_argument("--parts", nargs="+", default=[], help="only these parts, by the start of their names")
    parser.add_argument("--output", type=Path, help="folder of gpu.json and gpu.md (default: docs/data, docs/results)")
    options = parser.parse_args()
    import torch

    import graticule
    from graticule.system.files import read_json, write_json, write_text

    if not options.quick and not torch.cuda.is_available():
        sys.exit("gpu.py: error: no GPU found; --quick runs the same code on tiny inputs, on the CPU.")
    if options.quick and options.output is None:
        options.output = Path(tempfile.mkdtemp(prefix="gpu-quick-"))
    data, pages = (options.output,) * 2 if options.output else (DOCS / "data", DOCS / "results")
    data.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.quick, options.minutes)
    device = "CPU" if options.quick else torch.cuda.get_device_name()
    earlier = read_json(data / "gpu.json") if (data / "gpu.json").exists() else {}
    if earlier and earlier["device"] != device:
        sys.exit(f"gpu.py: error: {data / 'gpu.json'} is of another device, {earlier['device']}; move it away.")
    record: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/gpu.py", *["--quick"] * options.quick]),
        "device": device,
        "date": date.today().isoformat(),
        "batch": bench.batch,
        "dtype": "float32" if options.quick else "bfloat16 by autocast",
        "versions": {
            "graticule": graticule.__version__,
            **{name: version(name) for name in ("torch", "timm", "lightning-fabric")},
        },
        "parts": earlier.get("parts", {}),
        "dates": earlier.get("dates", dict.fromkeys(earlier.get("parts", {}), earlier.get("date"))),
        "not_run": dict(earlier.get("not_run", {})),
    }
    for name, measure in PARTS.items():
        measured = name in record["parts"] and name not in record["not_run"]
        repeated = options.quick and NAMES[1] in name  # `small_windows` takes the same code
        if measured or repeated or (options.parts and not name.startswith(tuple(options.parts))):
            continue
        start, bench.records = time.monotonic(), []
        if start > bench.until:
            record["not_run"].setdefault(name, "no time left")
            continue
        record["not_run"].pop(name, None)
        print(name, flush=True)
        try:
            measure(bench)
        except Exception as error:  # such as for want of memory: the other parts run on
            text = str(error).strip().partition("\n")[0][:200].rstrip(".")
            record["not_run"][name] = f"{type(error).__name__}: {text}"
            print(f"  not run to its end: {record['not_run'][name]}", flush=True)
        if time.monotonic() > bench.until:
            record["not_run"].setdefault(name, "no time left for all of it")
        if bench.records:
            record["parts"][name] = bench.records
            record["dates"][name] = record["date"]
        print(f"  {time.monotonic() - start:.0f} s", flush=True)
        write_json(data / "gpu.json", record)
        write_text(pages / "gpu.md", page(record))
    print(write_json(data / "gpu.json", record))
    print(write_text(pages / "gpu.md", page(record)))


if __name__ == "__main__":
    main()
