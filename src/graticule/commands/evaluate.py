"""`graticule evaluate`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from graticule.commands.kinds import check_kind
from graticule.commands.options import (
    choose_device,
    open_runs,
    output_folder,
    parse,
    parse_checkpoint,
    parse_sizes,
    print_table,
    print_written,
    run_labels,
)


@dataclass
class Evaluate:
    """Accuracy of runs at several image sizes, or bits per byte of runs on text at several lengths.

    One table, and a plot with what is lost against the size or length of the training.
    """

    runs: tyro.conf.Positional[list[Path]]
    """run folders, all on images or all on text"""
    sizes: list[str] = dataclasses.field(default_factory=list)
    """of images: sides in pixels, or HEIGHTxWIDTH; multiples of the patch (default: the training size)"""
    windows: list[int] = dataclasses.field(default_factory=list)
    """of images: side of the windows of every stage of a PosMLP, in patches (default: those of the run)"""
    lengths: list[int] = dataclasses.field(default_factory=list)
    """of text: tokens that the held-out text is cut into (default: the training length)"""
    checkpoint: str = "best"
    """best or last"""
    device: str = "auto"
    """cpu, cuda, ...; auto is a GPU if there is one"""
    output: Path | None = None
    """folder for the table and the plot (default: the first run's)"""


def run(arguments: list[str]) -> int:
    """Score runs at several image sizes, or at several lengths of text."""
    options = parse(Evaluate, "evaluate", arguments)
    runs = open_runs(options.runs, "evaluate")
    from graticule.tasks import TextRecipe

    texts = [run for run in runs if isinstance(run.recipe(), TextRecipe)]
    if texts and len(texts) < len(runs):
        image = next(run for run in runs if run not in texts)
        raise ValueError(
            f"`runs` must be all on images or all on text, got {image.folder}, which is on images, and "
            f"{texts[0].folder}, which is on text: evaluate them apart, with --sizes and with --lengths."
        )
    check_kind(bool(texts), lengths=options.lengths, sizes=options.sizes, windows=options.windows)
    options.device = choose_device(options.device)
    evaluate = _evaluate_texts if texts else _evaluate_images
    table, picture = evaluate(options, runs, output_folder(options.output, runs[0].folder))
    print_written(table, picture)
    return 0


def _evaluate_images(options: Evaluate, runs: list[Any], folder: Path) -> tuple[Path, Path]:
    from graticule.analysis import resolution_plot, save_figure
    from graticule.files import write_json
    from graticule.tasks import check_sizes, evaluate, set_windows

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
        scores = evaluate(model, data, sizes, device=options.device)
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
    table = write_json(folder / "evaluation.json", records)
    figure = resolution_plot(curves, trained_at=runs[0].recipe().img_size)
    return table, save_figure(figure, folder / "evaluation.png")


def _evaluate_texts(options: Evaluate, runs: list[Any], folder: Path) -> tuple[Path, Path]:
    from graticule.analysis import length_plot, save_figure
    from graticule.files import write_json
    from graticule.tasks import check_lengths, evaluate_text

    models = []
    for run in runs:  # every mistake is found before the first token is read
        data = run.data()
        model = run.model(data, parse_checkpoint(options.checkpoint))
        lengths = options.lengths or [run.recipe().context]
        check_lengths(model, lengths, data)
        models.append((run, data, model, lengths))
    rows: list[list[str]] = []
    records: list[dict[str, Any]] = []
    curves, places = {}, {}
    for label, (run, data, model, lengths) in zip(run_labels(runs), models, strict=True):
        scores = evaluate_text(model, data, lengths, device=options.device)
        trained = run.recipe().context
        reference = next((score.bits_per_byte for score in scores if score.length == trained), None)
        if reference is None and run.finished:  # measured in training, on the same text
            reference = run.result()[f"{options.checkpoint}_bpb"]
        for score in scores:
            mark = " *" if score.length == trained else " ~" if score.resampled else ""
            rows.append(
                [
                    label,
                    f"{score.length}{mark}",
                    f"{score.bits_per_byte:.3f}",
                    "-" if reference is None else f"{score.bits_per_byte - reference:+.3f}",
                    f"{score.loss:.3f}",
                    f"{score.tokens:,}",
                    f"{score.tokens_per_second:,.0f}",
                    f"{score.memory / 1e3:.1f}",
                ]
            )
            records.append({"run": str(run.folder), **dataclasses.asdict(score)})
        curves[label] = {score.length: [score.bits_per_byte] for score in scores}
        longest = max(scores, key=lambda score: score.length)
        places[label] = {last: [bits] for _, last, bits in longest.by_place}
    print_table(("run", "length", "bits/byte", "against *", "nats/token", "tokens", "tokens/s", "kB/token"), rows)
    print("* the length that the run was trained at; speed and peak memory are those of the forward pass alone")
    if any(record["resampled"] for record in records):
        print("~ longer than the table of positions that the run has learned, which was resampled to the length")
    table = write_json(folder / "evaluation.json", records)
    figure = length_plot(curves, places, [run.recipe().context for run in runs])
    return table, save_figure(figure, folder / "evaluation.png")
