"""`graticule evaluate`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from graticule.commands.options import (
    choose_device,
    open_runs,
    parse,
    parse_checkpoint,
    parse_sizes,
    print_table,
    run_labels,
)


@dataclass
class Evaluate:
    """Accuracy of runs at several image sizes: one table, and a plot with the drop against the training size."""

    runs: tyro.conf.Positional[list[Path]]
    """run folders"""
    sizes: list[str] = dataclasses.field(default_factory=list)
    """sides in pixels, or HEIGHTxWIDTH; multiples of the patch (default: the training size)"""
    windows: list[int] = dataclasses.field(default_factory=list)
    """side of the windows of every stage of a PosMLP, in patches (default: those of the run)"""
    checkpoint: str = "best"
    """best or last"""
    device: str = "auto"
    """cpu, cuda, ... (default: a GPU if there is one)"""
    output: Path | None = None
    """folder for the table and the plot (default: the first run's)"""


def run(arguments: list[str]) -> int:
    """Score runs at several image sizes."""
    options = parse(Evaluate, "evaluate", arguments)
    from graticule.analysis import resolution_plot, save_figure
    from graticule.files import write_json
    from graticule.tasks import check_sizes, evaluate, set_windows

    runs = open_runs(options.runs, "evaluate")
    wanted = parse_sizes(options.sizes)
    models = []
    for run in runs:  # every mistake is found before the first image is read
        data = run.data()
        model = run.model(data, parse_checkpoint(options.checkpoint))
        sizes = wanted or [run.recipe().img_size]
        check_sizes(model, sizes)
        if options.windows:
            set_windows(model, options.windows)
        models.append((run, data, model, sizes))
    rows: list[list[str]] = []
    records: list[dict[str, Any]] = []
    curves = {}
    for label, (run, data, model, sizes) in zip(run_labels(runs), models, strict=True):
        scores = evaluate(model, data, sizes, device=choose_device(options.device))
        trained = run.recipe().img_size
        same = (score.top1 for score in scores if score.size == trained and not options.windows)
        reference = next(same, None)
        if reference is None and run.finished:  # measured in training, on the same images
            reference = run.result()[f"{options.checkpoint}_top1"]
        for score in scores:
            drop = "-" if reference is None else f"{score.top1 - reference:+.2f}"
            top5 = "-" if score.top5 is None else f"{score.top5:.2f}"
            shown = f"{score.size[0]}x{score.size[1]}" + (" *" if score.size == trained else "")
            rows.append(
                [
                    label,
                    shown,
                    f"{score.top1:.2f}",
                    drop,
                    top5,
                    f"{score.loss:.3f}",
                    f"{score.images:,}",
                    f"{score.images_per_second:,.0f}",
                    f"{score.memory / 1e6:.2f}",
                ]
            )
            windows = {"windows": options.windows} if options.windows else {}
            records.append({"run": str(run.folder), **windows, **dataclasses.asdict(score)})
        curves[label] = {score.size: [score.top1] for score in scores}
    print_table(("run", "size", "top-1 (%)", "drop", "top-5 (%)", "loss", "images", "images/s", "MB/image"), rows)
    print("* the size that the run was trained at; speed and peak memory are those of the forward pass alone")
    if options.windows:
        print(f"with windows of {', '.join(map(str, options.windows))}; drop: against the windows of the training")
    folder = options.output or runs[0].folder
    table = write_json(folder / "evaluation.json", records)
    figure = resolution_plot(curves, trained_at=runs[0].recipe().img_size)
    print(f"wrote {table} and {save_figure(figure, folder / 'evaluation.png')}")
    return 0
