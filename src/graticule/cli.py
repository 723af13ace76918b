"""The command `graticule`."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
import textwrap
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

USAGE = """\
usage: graticule COMMAND ...

Choose a position embedding and how it reaches each layer, train a vision backbone, and see what came of it.

  models         list the backbones, encodings, joinings and recipes
  train          train a recipe, or go on with a run
  evaluate       accuracy of runs at several image sizes
  correlations   draw what every layer of a run knows of position
  translation    how far every layer of runs is from translation equivariance
  attention      draw the attention maps of runs, with and without position
  mixing         draw what gated MLPs mix: weights around a token, bias maps, non-locality
  compare        several choices with several seeds, one table
  demo           the whole chain on embedded digits, in minutes

graticule COMMAND --help says more. To begin: graticule train digits_quick
An error is one line; GRATICULE_DEBUG=1 shows where it came from.
"""

TRAIN_USAGE = """\
usage: graticule train RECIPE [--output FOLDER] [--quick] [overrides of the recipe]
       graticule train --resume RUN

A recipe is a name, a Python file of yours with a function recipe(), or a run folder, to repeat it. The names:
"""


@dataclass
class Models:
    """List the backbones with their sizes, and what a recipe's options can be."""

    pattern: tyro.conf.Positional[str] = "*"
    """names to list, as in a shell: deit_*"""


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


@dataclass
class Correlations:
    """Draw the position correlations of every layer (LaPE, Eq. 12), with numbers beside the pictures."""

    run: tyro.conf.Positional[Path]
    """run folder"""
    img_size: str | None = None
    """side in pixels, or HEIGHTxWIDTH (default: the training size)"""
    checkpoint: str = "best"
    """best or last"""
    output: Path | None = None
    """folder for the picture and the arrays (default: the run's)"""


@dataclass
class Translation:
    """Shift test images by whole patches: how far is each layer from shifting its features alike (0), and the logits
    from not changing? One table a run, and a plot of all."""

    runs: tyro.conf.Positional[list[Path]]
    """run folders"""
    images: int | None = None
    """how many test images, at even distances through all (default: 128, or all if there are fewer)"""
    shifts: list[str] = dataclasses.field(default_factory=lambda: ["1x0", "0x1", "1x1"])
    """DOWNxRIGHT, in patches of the coarsest grid"""
    border: int = 1
    """tokens less than so many patches from an edge are told apart"""
    img_size: str | None = None
    """side in pixels, or HEIGHTxWIDTH (default: the training size)"""
    checkpoint: str = "best"
    """best or last"""
    device: str = "auto"
    """cpu, cuda, ... (default: a GPU if there is one)"""
    output: Path | None = None
    """folder for the numbers and the plot (default: the first run's)"""


@dataclass
class Attention:
    """Draw the attention maps of chosen layers and heads on one test image, a column a run."""

    runs: tyro.conf.Positional[list[Path]]
    """run folders, with as many layers"""
    layers: list[int] = dataclasses.field(default_factory=lambda: [2])
    """layers, the first being 1"""
    heads: list[int] = dataclasses.field(default_factory=list)
    """heads, the first being 1 (default: all)"""
    image: int = 0
    """which test image"""
    without_position: bool = False
    """beside each run, the same weights with position taken away"""
    img_size: str | None = None
    """side in pixels, or HEIGHTxWIDTH (default: the training size)"""
    checkpoint: str = "best"
    """best or last"""
    output: Path | None = None
    """folder for the sheet and the arrays (default: the first run's)"""


@dataclass
class Mixing:
    """Draw what the layers of gated MLPs mix: the weights around a token, the bias maps, and their non-locality."""

    runs: tyro.conf.Positional[list[Path]]
    """run folders"""
    layers: list[int] = dataclasses.field(default_factory=list)
    """layers, the first being 1 (default: all, six of them drawn)"""
    groups: list[int] = dataclasses.field(default_factory=list)
    """groups of channels, the first being 1 (default: eight at even distances)"""
    query: str | None = None
    """ROWxCOLUMN of the token within its grid or window, from 0x0 on (default: the centre)"""
    values: Literal["weights", "logits"] = "weights"
    """weights, or the logits that their softmax is of"""
    img_size: str | None = None
    """side in pixels, or HEIGHTxWIDTH (default: the training size)"""
    checkpoint: str = "best"
    """best or last"""
    output: Path | None = None
    """folder for the pictures and the arrays (default: the first run's)"""


@dataclass
class Compare:
    """Train several choices with several seeds: one table with mean, standard deviation and a paired test.

    A choice is overrides of the recipe, as on the command line of train, with commas between:
    graticule compare digits_quick --choices joining=default joining=lape encoding=sinusoidal_2d,joining=lape
    Several values of one option have spaces between: "encoding=peg,peg.places=0 1 2"
    An argument of the backbone: model_kwargs=windows=[8,4]
    """

    recipe: tyro.conf.Positional[str]
    """name of a recipe, or a Python file"""
    choices: list[str]
    """the choices; the first is what the others are held against"""
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0, 1, 2])
    """seeds, the same for every choice"""
    output: Path | None = None
    """folder of the runs (default: runs/compare-RECIPE)"""
    sizes: list[str] = dataclasses.field(default_factory=list)
    """evaluate every run at these sides too, in pixels, or HEIGHTxWIDTH: a second table and a plot"""
    quick: bool = False
    """a few steps only, to see that everything works"""


@dataclass
class Demo:
    """Train a small ViT on embedded digits with the default joining and with LaPE, and write report.html."""

    output: Path = Path("runs/demo")
    """folder of the runs and the report"""
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0, 1, 2])
    """seeds, the same for both"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 for a mistake that is named, 2 for a bad option, 130 if stopped."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {
        "models": _models,
        "train": _train,
        "evaluate": _evaluate,
        "correlations": _correlations,
        "translation": _translation,
        "attention": _attention,
        "mixing": _mixing,
        "compare": _compare,
        "demo": _demo,
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(version("graticule"))
        return 0
    _quiet()
    try:
        from graticule.factory import known_name

        command = commands[known_name("COMMAND", arguments[0], commands)]
        return command(arguments[1:])
    except KeyboardInterrupt:
        print("\ngraticule: stopped.", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get("GRATICULE_DEBUG") or not isinstance(error, _named_mistakes()):
            raise
        print(f"graticule: error: {error}", file=sys.stderr)
        return 1


def _named_mistakes() -> tuple[type[Exception], ...]:
    """What is the user's to mend, and is said without a traceback (GRATICULE_DEBUG=1 shows it)."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    return ValueError, OSError, ImportError, FloatingPointError, MisconfigurationException


def _quiet() -> None:
    """Keep what Lightning tells its developers from the user's screen."""
    import logging

    import lightning.pytorch  # noqa: F401 (sets its own level when it is imported)

    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    warnings.filterwarnings("ignore", module=r"torch\..*", category=FutureWarning)


def _parse(kind: Any, name: str, arguments: list[str], **kwargs: Any) -> Any:
    """Parse typed options; an unknown one is an error that lists the known ones."""
    parsed, unknown = tyro.cli(kind, prog=f"graticule {name}", args=arguments, return_unknown_args=True, **kwargs)
    if unknown:
        options = _options(kind)
        close = difflib.get_close_matches(unknown[0].replace("_", "-").partition("=")[0], options, n=2)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        known = textwrap.fill(" ".join(options), 100, subsequent_indent="  ", break_on_hyphens=False)
        raise ValueError(f"unknown option {unknown[0]!r}; {hint}The options are:\n  {known}")
    return parsed


def _options(kind: Any, prefix: str = "--") -> list[str]:
    found = []
    for field in dataclasses.fields(kind):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        name = prefix + ("" if field.name == "recipe" and kind is not Compare else field.name.replace("_", "-"))
        if dataclasses.is_dataclass(default):
            found += _options(type(default), name if name == prefix else name + ".")
        elif "Positional" not in str(field.type):
            found.append(name)
            if default is True:
                found.append(f"{prefix}no-{field.name.replace('_', '-')}")
    return found


def _sizes(given: Sequence[str], name: str = "sizes") -> list[tuple[int, int]]:
    sizes = []
    for text in given:
        sides = text.lower().split("x")
        if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
            raise ValueError(f"`{name}` must be sides in pixels or HEIGHTxWIDTH, as 224 or 320x224, got {text!r}.")
        sizes.append((int(sides[0]), int(sides[-1])))
    return sizes


def _checkpoint(given: str) -> Any:
    if given not in ("best", "last"):
        raise ValueError(f"`checkpoint` must be best or last, got {given!r}.")
    return given


def _device(given: str) -> str:
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if given == "auto" else given


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, ["-" * width for width in widths], *rows]:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _models(arguments: list[str]) -> int:
    options = _parse(Models, "models", arguments)
    import torch

    import graticule
    from graticule.data import list_datasets
    from graticule.recipes import list_recipes

    names = graticule.list_models(options.pattern)
    if not names:
        raise ValueError(
            f"no model is named like {options.pattern!r}; the models are {', '.join(graticule.list_models())}."
        )
    rows = []
    for name in names:
        with torch.device("meta"):
            model = graticule.create_model(name)
        count = sum(p.numel() for p in model.parameters())
        dims = getattr(model, "embed_dims", (getattr(model, "embed_dim", 0),))
        depths = getattr(model, "depths", None) or (len(model.blocks),)
        image, grid = ("x".join(map(str, sides)) for sides in (model.img_size, model.grid.shape))
        shape = ("-".join(map(str, dims)), "-".join(map(str, depths)))
        rows.append([name, f"{count / 1e6:.2f} M", *shape, image, grid])
    _print_table(("model", "parameters", "dim", "layers", "image", "patches"), rows)
    print(f"\nencodings       {', '.join(graticule.list_encodings())} (several: learnable+peg)")
    print(f"joinings        {', '.join(graticule.list_joinings())}")
    print(f"decompositions  {', '.join(graticule.list_decompositions())} (of LaPE's norm)")
    print(f"data sets       {', '.join(list_datasets())}")
    print("recipes")
    for name, about in list_recipes().items():
        print(f"  {name:20s} {about}")
    return 0


def _train(arguments: list[str]) -> int:
    from graticule.recipes import list_recipes, load_recipe
    from graticule.tasks import Interrupted, Recipe, Run, train

    if not arguments or arguments[0] in ("-h", "--help"):
        print(TRAIN_USAGE)
        for name, about in list_recipes().items():
            print(f"  {name:20s} {about}")
        print("\ngraticule train RECIPE --help lists every option with its value in that recipe.")
        return 0 if arguments else 2
    if arguments[0] == "--resume" or arguments[0].startswith("--resume="):
        folders = [*arguments[0].partition("=")[2:], *arguments[1:]]
        folders = [folder for folder in folders if folder]
        if len(folders) != 1:
            raise ValueError(f"`--resume` must be followed by one run folder and nothing else, got {folders}.")
        run = Run.open(folders[0])
        recipe, resume = run.recipe(), True
    else:
        quick = "--quick" in arguments  # first, so that what is said beside it has the last word
        loaded = load_recipe(arguments[0]).quick() if quick else load_recipe(arguments[0])

        @dataclass
        class Train:
            __doc__ = f"Train {arguments[0]}; every value of the recipe can be overridden."

            recipe: Annotated[Recipe, tyro.conf.arg(name="")] = dataclasses.field(default_factory=lambda: loaded)
            output: Path | None = None
            """run folder (default: runs/RECIPE-DATE-TIME)"""
            quick: bool = False
            """a few steps only, to see that everything works"""

        Train.__annotations__["recipe"] = Annotated[Recipe, tyro.conf.arg(name="")]
        Train.__annotations__["output"] = Path | None
        Train.__annotations__["quick"] = bool
        options = _parse(Train, f"train {arguments[0]}", arguments[1:])
        recipe, resume = options.recipe, False
        name = f"{Path(arguments[0]).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        run = Run(options.output or Path("runs") / name)
    already = run.finished
    try:
        run = train(recipe, run.folder, resume=resume)
    except Interrupted:
        print(f"stopped; go on with: graticule train --resume {run.folder}", file=sys.stderr)
        return 130
    result = run.result()
    if already:
        print("this run was finished already.")
    print(f"top-1 {result['last_top1']:.2f} % after the last epoch, {result['best_top1']:.2f} % in the best ", end="")
    print(f"(epoch {result['best_epoch']} of {result['epochs']}), {result['seconds']:.0f} s")
    if skipped := result["skipped_images"]:
        print(f"{len(skipped)} broken images were left out: {', '.join(skipped[:5])}{', ...' if skipped[5:] else ''}")
    print(f"wrote {run.folder}: recipe.json, metrics.csv, weights.safetensors, checkpoints/, tensorboard/")
    return 0


def _evaluate(arguments: list[str]) -> int:
    options = _parse(Evaluate, "evaluate", arguments)
    from graticule.analysis import resolution_plot, save_figure
    from graticule.files import write_json
    from graticule.tasks import check_sizes, evaluate, set_windows

    runs = _open_runs(options.runs, "evaluate")
    wanted = _sizes(options.sizes)
    models = []
    for run in runs:  # every mistake is found before the first image is read
        data = run.data()
        model = run.model(data, _checkpoint(options.checkpoint))
        sizes = wanted or [run.recipe().img_size]
        check_sizes(model, sizes)
        if options.windows:
            set_windows(model, options.windows)
        models.append((run, data, model, sizes))
    rows: list[list[str]] = []
    records: list[dict[str, Any]] = []
    curves = {}
    for label, (run, data, model, sizes) in zip(_labels(runs), models, strict=True):
        scores = evaluate(model, data, sizes, device=_device(options.device))
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
    _print_table(("run", "size", "top-1 (%)", "drop", "top-5 (%)", "loss", "images", "images/s", "MB/image"), rows)
    print("* the size that the run was trained at; speed and peak memory are those of the forward pass alone")
    if options.windows:
        print(f"with windows of {', '.join(map(str, options.windows))}; drop: against the windows of the training")
    folder = options.output or runs[0].folder
    table = write_json(folder / "evaluation.json", records)
    figure = resolution_plot(curves, trained_at=runs[0].recipe().img_size)
    print(f"wrote {table} and {save_figure(figure, folder / 'evaluation.png')}")
    return 0


def _correlations(arguments: list[str]) -> int:
    options = _parse(Correlations, "correlations", arguments)
    from graticule.analysis import correlation_sheet, position_correlations, save_figure
    from graticule.tasks import Run

    run = Run.open(options.run)
    recipe = run.recipe()
    model = run.model(checkpoint=_checkpoint(options.checkpoint))
    size = _sizes([options.img_size], "img_size")[0] if options.img_size else None
    title = f"{recipe.model}, {recipe.encoding or 'its own encoding'}, joining {recipe.joining}"
    folder = options.output or run.folder
    stages = len(getattr(model, "depths", (1,)))
    every = [position_correlations(model, size, stage) for stage in range(stages)]  # before anything is written
    written: list[Path] = []
    for stage, found in enumerate(every):
        name = "correlations" if stages == 1 else f"correlations-stage{stage + 1}"
        if stages > 1:
            print(f"stage {stage + 1}, {found.grid.height} x {found.grid.width} tokens")
        columns, *rows = found.summary()
        _print_table([str(c) for c in columns], [[str(cell) for cell in row] for row in rows])
        print(f"rank correlation of locality with depth: {found.hierarchy:+.2f}")
        of = "" if stages == 1 else f", stage {stage + 1}"
        written.append(save_figure(correlation_sheet(found, title + of), folder / f"{name}.png"))
        written.append(found.save(folder / f"{name}.npz"))
    print(f"wrote {' and '.join(map(str, written))}")
    return 0


def _open_runs(folders: Sequence[Path], command: str) -> list[Any]:
    from graticule.tasks import Run

    if not folders:
        raise ValueError(f"`runs` must be one run folder or more, got none; see graticule {command} --help.")
    if len(set(folders)) < len(folders):
        raise ValueError(f"`runs` must differ, got {', '.join(map(str, folders))}.")
    return [Run.open(folder) for folder in folders]


def _labels(runs: Sequence[Any]) -> list[str]:
    """Name runs by what tells their folders apart."""
    folders = [run.folder.resolve() for run in runs]
    if len(folders) == 1:
        return [folders[0].name]
    common = Path(os.path.commonpath(folders))
    names = [folder.relative_to(common).parts for folder in folders]
    while len({parts[-1:] for parts in names}) == 1 and all(len(parts) > 1 for parts in names):
        names = [parts[:-1] for parts in names]
    return ["/".join(parts) or common.name for parts in names]


def _translation(arguments: list[str]) -> int:
    options = _parse(Translation, "translation", arguments)
    from graticule.analysis import save_figure, translation_error, translation_plot
    from graticule.tasks import check_sizes

    runs = _open_runs(options.runs, "translation")
    shifts = [_shift(text) for text in options.shifts]
    if options.images is not None and options.images < 2:
        raise ValueError(f"`images` must be at least 2, got {options.images}.")
    models = []
    for run in runs:
        data = run.data()
        size = _sizes([options.img_size], "img_size")[0] if options.img_size else run.recipe().img_size
        model = run.model(data, _checkpoint(options.checkpoint))
        check_sizes(model, [size])
        models.append((run, data, model, size))
    device = _device(options.device)
    found = {}
    folder = options.output or runs[0].folder
    written: list[Path] = []
    for label, (run, data, model, size) in zip(_labels(runs), models, strict=True):
        images = data.spread_test_images(size, options.images or min(128, data.num_test))[0].to(device)
        one = translation_error(model.to(device), images, shifts, options.border)
        found[label] = one
        columns, *rows = one.summary()
        print(f"{run.folder}: {one.images} images of {size[0]}x{size[1]}, shifts {', '.join(options.shifts)}")
        _print_table(columns, rows)
        print(f"{one.verdict()}\n")
        name = "translation.npz" if len(runs) == 1 else f"translation-{len(written) + 1}.npz"
        written.append(one.save(folder / name))
    print("0: the layer is equivariant; 1: the shift makes as much difference as another image; - : no such token")
    figure = translation_plot(found, "Distance from translation equivariance")
    print(f"wrote {', '.join(map(str, written))} and {save_figure(figure, folder / 'translation.png')}")
    return 0


def _shift(text: str) -> tuple[int, int]:
    try:
        down, right = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise ValueError(f"`shifts` must be DOWNxRIGHT in patches, as 1x0 or -1x2, got {text!r}.") from None
    return down, right


def _attention(arguments: list[str]) -> int:
    options = _parse(Attention, "attention", arguments)
    from graticule.analysis import attention_maps, attention_sheet, save_attention, save_figure
    from graticule.tasks import check_sizes

    runs = _open_runs(options.runs, "attention")
    if not options.layers or min(options.layers) < 1 or min(options.heads, default=1) < 1:
        raise ValueError(f"`layers` and `heads` must count from 1, got {options.layers} and {options.heads}.")
    layers = [layer - 1 for layer in options.layers]
    heads = [head - 1 for head in options.heads] or None
    maps = {}
    folder = options.output or runs[0].folder
    for run, label in zip(runs, _labels(runs), strict=True):
        data = run.data()
        size = _sizes([options.img_size], "img_size")[0] if options.img_size else run.recipe().img_size
        model = run.model(data, _checkpoint(options.checkpoint))
        check_sizes(model, [size])
        depth = len(model.position(model.grid))
        if max(options.layers) > depth:
            raise ValueError(f"`layers` must be from 1 to {depth}, got {max(options.layers)}.")
        images = data.test_images(size, [options.image])[0]
        maps[label] = attention_maps(model, images, layers)
        if options.without_position:
            maps[f"{label}\nwithout position"] = attention_maps(model, images, layers, without_position=True)
    title = f"Attention weights, test image {options.image}"
    figure = attention_sheet(maps, heads, title=title)  # before anything is written
    written: list[Path] = []
    for number, (label, found) in enumerate(maps.items(), start=1):
        rows = [
            (str(one.layer + 1), *[f"{one.distance(head):.2f}" for head in heads or range(one.num_heads)])
            for one in found
        ]
        print(label.replace("\n", ", "))
        _print_table(("layer", *[f"head {head + 1}" for head in heads or range(found[0].num_heads)]), rows)
        written.append(
            save_attention(found, folder / (f"attention-{number}.npz" if len(maps) > 1 else "attention.npz"))
        )
    print("mean attention distance, in patches")
    print(f"wrote {', '.join(map(str, written))} and {save_figure(figure, folder / 'attention.png')}")
    return 0


def _mixing(arguments: list[str]) -> int:
    options = _parse(Mixing, "mixing", arguments)
    from graticule.analysis import (
        bias_sheet,
        mixing_maps,
        mixing_sheet,
        non_locality_plot,
        save_figure,
        save_mixing,
        sheet_layers,
    )
    from graticule.tasks import check_sizes

    runs = _open_runs(options.runs, "mixing")
    if min([*options.layers, *options.groups], default=1) < 1:
        raise ValueError(f"`layers` and `groups` must count from 1, got {options.layers} and {options.groups}.")
    layers, groups = ([index - 1 for index in given] or None for given in (options.layers, options.groups))
    query = _query(options.query) if options.query else None
    size = _sizes([options.img_size], "img_size")[0] if options.img_size else None
    maps = {}
    figures: dict[str, Any] = {}
    for number, (run, label) in enumerate(zip(runs, _labels(runs), strict=True), start=1):
        model = run.model(checkpoint=_checkpoint(options.checkpoint))
        if size:
            check_sizes(model, [size])
        depth = sum(model.depths) if hasattr(model, "depths") else 0
        if depth and max(options.layers, default=1) > depth:
            raise ValueError(f"`layers` must be from 1 to {depth} in {run.folder}, got {max(options.layers)}.")
        found = maps[label] = mixing_maps(model, size, query, layers)
        most = max(one.groups for one in found)
        if max(options.groups, default=1) > most:
            raise ValueError(f"`groups` must be from 1 to {most} in {run.folder}, got {max(options.groups)}.")
        drawn = found if layers else [found[index] for index in sheet_layers(len(found))]
        mark = f"-{number}" if len(runs) > 1 else ""
        recipe = run.recipe()
        title = f"{recipe.model}, {recipe.encoding or 'its own encoding'}"
        sheet = mixing_sheet(drawn, groups, options.values, f"Mixing {options.values}, {title}")
        figures[f"mixing{mark}.png"] = sheet
        if any(one.bias is not None for one in maps[label]):
            figures[f"mixing-bias{mark}.png"] = bias_sheet(maps[label], f"Bias, {title}")
    figures["mixing-locality.png"] = non_locality_plot(maps)
    folder = options.output or runs[0].folder
    written: list[Path] = []
    for number, (label, found) in enumerate(maps.items(), start=1):
        print(label)
        rows = []
        for one in found:
            g, kept = one.non_locality()
            shown = "-" if not kept else f"{g:.3f}"
            counted = "-" if one.matrices is None else f"{kept} of {one.groups}"
            grid = f"{one.grid.height}x{one.grid.width}"
            rows.append((str(one.layer + 1), grid, str(one.groups), f"{one.distance():.2f}", shown, counted))
        _print_table(("layer", "tokens", "groups", "distance", "g", "groups in g"), rows)
        written.append(save_mixing(found, folder / (f"mixing-{number}.npz" if len(maps) > 1 else "mixing.npz")))
    token = "the centre token" if query is None else f"token {options.query}"
    print(f"distance: of the weights of {token}, in patches; g: non-locality (PosMLP, Eq. 16), smaller is less local")
    written += [save_figure(figure, folder / name) for name, figure in figures.items()]
    print(f"wrote {', '.join(map(str, written))}")
    return 0


def _query(text: str) -> tuple[int, int]:
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isdecimal() for side in sides):
        raise ValueError(f"`query` must be ROWxCOLUMN, as 0x3, got {text!r}.")
    return int(sides[0]), int(sides[1])


def _compare(arguments: list[str]) -> int:
    options = _parse(Compare, "compare", arguments)
    from graticule.recipes import load_recipe
    from graticule.studies import compare, resolutions
    from graticule.studies.compare import COLUMNS
    from graticule.tasks import Interrupted, Recipe, build_model, check_sizes

    sizes = _sizes(options.sizes)
    base = load_recipe(options.recipe)
    base = base.quick() if options.quick else base
    choices = {}
    for choice in options.choices:
        pairs = [pair.partition("=") for pair in re.split(r",(?![^\[]*\])", choice)]  # not those inside [ ]
        if not all(key and equals for key, equals, _ in pairs):
            raise ValueError(f"`choices` must be like joining=lape,joined_layers=3, got {choice!r}.")
        flags = [text for key, _, value in pairs for text in _flag(key, value)]
        if choice in choices:
            raise ValueError(f"`choices` must differ, got {choice!r} twice.")
        choices[choice] = _parse(Recipe, "compare --choices", flags, default=base)
    for recipe in choices.values() if sizes else ():  # before any training
        check_sizes(build_model(recipe, 10, 1), sizes)
    folder = options.output or Path("runs") / f"compare-{Path(options.recipe).stem}"
    try:
        comparison = compare(choices, options.seeds, folder)
    except Interrupted:
        print("stopped; the same command goes on where it stood.", file=sys.stderr)
        return 130
    _print_table(COLUMNS, comparison.rows())
    print(*comparison.verdict(), sep="\n")
    print(f"wrote {folder / 'comparison.md'} and {folder / 'comparison.json'}")
    if sizes:
        found = resolutions(comparison, sizes)
        columns, *rows = found.rows()
        print("\ntop-1 (%) at other sizes, mean and standard deviation")
        _print_table(columns, rows)
        print(f"wrote {' and '.join(map(str, found.write(folder)))}")
    return 0


def _flag(key: str, value: str) -> list[str]:
    """Turn one override of a choice into options as tyro has them: a truth value is --option or --no-option."""
    *group, name = key.replace("_", "-").split(".")
    truth = value.lower()
    if truth in ("true", "false"):
        return ["--" + ".".join([*group, name if truth == "true" else f"no-{name}"])]
    return [f"--{'.'.join([*group, name])}", *value.split()]


def _demo(arguments: list[str]) -> int:
    options = _parse(Demo, "demo", arguments)
    from graticule.studies.demo import demo

    report = demo(options.output, options.seeds)
    print(f"wrote {report}; open it in a browser. The runs are beside it, in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
