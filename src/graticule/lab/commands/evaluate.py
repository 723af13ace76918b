"""`graticule evaluate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from graticule import analysis, external
from graticule.lab import figures, training
from graticule.lab.arguments import Positional, default_of
from graticule.lab.commands.opening import check_labels, choose_device, label_models, open_models, test_data
from graticule.lab.commands.options import Figures, JsonOutput, NamedData, OnDevice, output_folder, parse
from graticule.lab.tasks.options import ImageOptions, Recipe, SegmentationOptions
from graticule.lab.training.results import Evaluated
from graticule.registry.checks import parse_sizes, printable
from graticule.registry.registry import registered
from graticule.system.files import write_json


@dataclass
class EvaluateOptions(SegmentationOptions, ImageOptions, Figures, NamedData, JsonOutput, OnDevice):
    """Score models on held-out data: models on images at several sizes.

        graticule evaluate RUN RUN --sizes 20 28 40 28x56
        graticule evaluate deit_tiny_patch16_224 --images FOLDER --sizes 160 224 288
        graticule evaluate timm:NAME --images FOLDER --probe ridge

    A table and a plot. A probe reads the class of each image from the others.
    """

    models: Positional[list[str]]
    """runs, published folders, files of weights, names, timm:NAME or hf:NAME, of one task"""
    probe: Literal["knn", "ridge"] | None = None
    """read classes from the frozen features of any backbone, by neighbors or a linear map"""
    output: Path | None = None
    """folder for the table and the plot (default: the first run's, or runs/NAME)"""

    needs: ClassVar[Mapping[str, str]] = {**NamedData.needs, "mode": "sizes"}


def read(arguments: list[str]) -> EvaluateOptions:
    """Read the options, also of tasks that a plugin registered."""
    return parse(evaluate_options(), "evaluate", arguments)


def evaluate_options() -> type[EvaluateOptions]:
    """Return the options of evaluate, also of tasks that a plugin registered."""
    kinds = list(dict.fromkeys(task.evaluation for _, task in sorted(registered("task").items())))
    known = {option.name: option for option in dataclasses.fields(EvaluateOptions)}
    for option in [option for kind in kinds for option in dataclasses.fields(kind)]:
        other = known.setdefault(option.name, option)
        if (other.type, default_of(other)) != (option.type, default_of(option)):
            raise ValueError(
                f"`evaluation` must not have the option {option.name}, which is another one of graticule evaluate."
            )
    return dataclass(type("EvaluateOptions", (*reversed(kinds), EvaluateOptions), {"__doc__": EvaluateOptions.__doc__}))


def run(options: EvaluateOptions) -> int:
    """Score runs on the held-out data, by their task."""
    opened = open_models(options.models, options, "evaluate", "*" if options.probe is None else "images")
    if options.probe is not None:
        return _probe(options, opened, options.probe)
    device = choose_device(options.device)
    tasks = [_choose_task(model) for model in opened]
    name = tasks[0].recipe.task
    for source, task in zip(opened, tasks, strict=True):
        if task.recipe.task != name:
            raise ValueError(
                f"`models` must be all of one task, got {opened[0].target}, which is of {name}, and {source.target}, "
                f"which is of {task.recipe.task}: evaluate them separately."
            )
    kind = training.list_tasks()[name].evaluation
    known = {field.name: getattr(options, field.name) for field in dataclasses.fields(kind)}
    for option, (value, users) in _task_options(options).items():
        if option not in known:
            raise ValueError(
                f"`{option}` must be left out with the task {name}, got {value}; it is for {' and '.join(users)}."
            )
    evaluation = kind(**known)
    folder = output_folder(options.output, opened[0].folder)
    datasets = [test_data(source, options) for source in opened]
    for source, task, data in zip(opened, tasks, datasets, strict=True):  # all errors precede the first example
        if source.run is None:
            check_labels(source, data, str(options.images))
        evaluation.check(task, source.model, data)
    evaluated, precisions = [], dict[str, list[str]]()
    for label, source, task, data in zip(label_models(opened), opened, tasks, datasets, strict=True):
        precision = task.recipe.precision
        precisions.setdefault(precision, []).append(source.target)
        scores = evaluation.scores(task, training.with_precision(source.model, precision, device), data, device=device)
        measured = _measured_score(source, task, options.checkpoint)
        evaluated.append(Evaluated(label, source.target, task.recipe, scores, measured))
    table, records = evaluation.table(evaluated), evaluation.records(evaluated)
    options.print_table(table.columns, *table.rows)
    starred = any(cell.endswith(" *") for row in table.rows for cell in row)
    options.say(*[f"* {table.star}"] * starred, *table.notes)
    for precision in precisions.keys() - {"32-true"}:
        options.say(f"computed in {precision}: {', '.join(map(printable, precisions[precision]))}")
        for record in records:
            record |= {"precision": precision} if record["run"] in precisions[precision] else {}
    written = [write_json(folder / "evaluation.json", records)]
    figure, path = evaluation.figure(evaluated), folder / f"evaluation.{options.format}"
    if figure is not None:
        written.append(figures.save_figure(figure, path))
    elif path.is_file():
        path.unlink()  # it is of the scores that the table replaces
    return options.finish(records, *written)


def _probe(options: EvaluateOptions, opened: Sequence[training.LoadedModel], probe: Literal["knn", "ridge"]) -> int:
    import torch

    for name, (value, _) in _task_options(options).items():
        if name != "sizes":
            raise ValueError(f"`{name}` must be left out with `probe`, got {value}.")
    device, folder = choose_device(options.device), output_folder(options.output, opened[0].folder)
    records, rows = [], []
    for label, source in zip(label_models(opened), opened, strict=True):
        data = test_data(source, options)
        classes = data.groups if hasattr(data, "groups") else data.test_labels()
        if classes is None:
            raise ValueError(f"`images` must have a folder for each class, got {str(options.images)!r} with one.")
        labels = torch.as_tensor(classes)
        model = (external.convert_stock(source.model) or source.model).eval().to(device)
        for size in parse_sizes(options.sizes) or [source.size]:
            batches = ((images.to(device), targets) for images, targets in data.eval_dataloader(size))
            features, _ = analysis.pooled_features(model, batches)
            right = analysis.proportion_estimate(analysis.probe_classes(features, labels, probe).numpy())
            value, low, high = (100 * float(part) for part in right)
            cells = f"{value:.1f}", f"{low:.1f} to {high:.1f}", f"{len(labels):,}", str(len(labels.unique()))
            rows.append((label, f"{size[0]}x{size[1]}", *cells))
            about = {"run": source.target, "size": list(size), "probe": probe}
            records.append(about | {"top1": value, "interval": [low, high], "images": len(labels)})
    options.print_table(("run", "size", f"{probe} (%)", "95 % interval", "images", "classes"), *rows)
    return options.finish(records, write_json(folder / "probe.json", records))


def _task_options(options: EvaluateOptions) -> dict[str, tuple[Any, list[str]]]:
    """Return the options that differ from their defaults: their values, and the tasks that have them."""
    changed: dict[str, tuple[Any, list[str]]] = {}
    for name, task in training.list_tasks().items():
        for field in dataclasses.fields(task.evaluation):
            if (value := getattr(options, field.name)) != default_of(field):
                changed.setdefault(field.name, (value, []))[1].append(name)
    return changed


def _choose_task(opened: training.LoadedModel) -> Any:
    """Return the task of a model's run, or classification for a model by name."""
    if opened.run is not None:
        return opened.run.task()
    if not opened.num_classes:
        raise ValueError(f"`models` must have classes to be scored, got {opened.target!r}, which has none.")
    return training.task_of(Recipe(model=opened.target, img_size=opened.size))


def _measured_score(opened: training.LoadedModel, task: Any, checkpoint: str) -> float | None:
    """Return the score of a finished run that was measured in training."""
    if opened.run is None or not opened.run.finished or Path(opened.target) != opened.run.folder:
        return None
    return opened.run.result()[f"{checkpoint}_{task.metric.key}"]
