"""`graticule train`."""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graticule.lab import pages, training
from graticule.lab.commands.options import Options, command_line, output_folder, parse
from graticule.lab.recipes.load import describe_recipe, list_recipes, load_recipe
from graticule.lab.training.run_folder import STOPPED, Interrupted, Preempted, RunFolder, requeue_code
from graticule.registry.checks import printable

USAGE = """\
usage: graticule train RECIPE [options, and values of the recipe]
       graticule train --resume RUN [values that do not change the result]

  graticule train digits_quick
  graticule train digits_quick --encoding "peg(kernel=5)" --joining lape
  graticule train RECIPE --output RUN --auto-resume --devices 4 --nodes 2
  graticule train my_recipe --plugin my_recipe.py my_encoding.py
  graticule train --resume RUN --devices 1
  graticule train ./RUN --seed 1      # repeats a run

graticule train RECIPE --help lists the options with their values in that
recipe. A recipe is a name, the path of a run, such as ./RUN, or a Python file
of yours with a function recipe(). --plugin FILE ... loads your Python files,
which register encodings, recipes, ...

On SIGTERM or SIGUSR1, as clusters send them, a run saves a checkpoint and exits
with 75, for the scheduler to queue it again; with --output and --auto-resume
the same command then resumes it. Several machines: the same command on each, by
torchrun or SLURM.
"""


@dataclass(kw_only=True)
class TrainOptions(Options):
    """Train a recipe; every value of it can be overridden."""

    recipe: Any = field(default_factory=lambda: load_recipe("digits_quick"))
    output: Path | None = None
    """run folder (default: runs/RECIPE-DATE-TIME)"""
    auto_resume: bool = False
    """resume the run in the output folder, or start it"""
    quick: bool = False
    """only a few steps, to check that everything works"""


def read(arguments: list[str]) -> TrainOptions:
    """Read the options of a run to start, or to resume."""
    if not arguments or arguments[0] in ("-h", "--help", "--help-all"):
        recipes = list_recipes()
        print(USAGE)
        if arguments[:1] == ["--help-all"]:
            print("\n".join(f"  {name:{max(map(len, recipes))}}  {about}" for name, about in recipes.items()))
        else:
            names = textwrap.fill(", ".join(recipes), 78, initial_indent="  ", subsequent_indent="  ")
            print(f"recipes (--help-all describes them):\n{names}")
        raise SystemExit(0 if arguments else 2)
    return (_resume if arguments[0].partition("=")[0] == "--resume" else _start)(arguments)


def run(options: TrainOptions) -> int:
    """Train a recipe in a folder, and print the results; returns the exit code."""
    requeue = requeue_code()

    from lightning_fabric.utilities.rank_zero import rank_zero_only

    recipe, folder = options.recipe, options.output or Path()
    run_page = pages.run_page  # imported before the training
    already = RunFolder(folder).finished
    try:
        run = training.train(recipe, folder, resume=options.auto_resume)
    except Interrupted as reason:
        preempted = isinstance(reason, Preempted)
        if not getattr(rank_zero_only, "rank", 0):
            again = printable(command_line("train", ["--resume", str(folder)]))
            event = "saved and stopped on a signal" if preempted else "stopped"
            print(f"{event}; resume with: {again}", file=sys.stderr)
        return requeue if preempted else STOPPED
    if getattr(rank_zero_only, "rank", 0):  # the first process prints the results
        return 0
    result, place = run.result(), printable(str(run.folder))
    if already:
        print("this run is already finished.")
    metric = recipe.metric
    last, best = (metric.show(result[f"{which}_{metric.key}"]) for which in ("last", "best"))
    epochs = f"(epoch {result['best_epoch']} of {result['epochs']}), {result['seconds']:.0f} s"
    print(f"{metric.label} {last} after the last epoch, {best} in the best {epochs}")
    if skipped := result["skipped_images"]:
        named = printable(", ".join(skipped[:5])) + (", ..." if skipped[5:] else "")
        print(f"{len(skipped)} broken images were left out: {named}")
    task = run.task()
    run_page({run.folder.name: [run]}).write(run.folder / "report.html")
    names = "recipe.json, metrics.csv, log.txt, report.html, weights.safetensors, checkpoints/, tensorboard/"
    print(f"wrote {place}: {names}")
    if next_step := task.next_step(shlex.quote(place)):
        print(next_step)
    return 0


def _resume(arguments: list[str]) -> TrainOptions:
    """Return the recipe and the folder of the run to resume."""
    words = [part for part in [*arguments[0].partition("=")[2:], *arguments[1:]] if part]
    if not words or words[0].startswith("-"):
        raise ValueError(f"`--resume` must be followed by a run folder, got {' '.join(words) or 'none'}.")
    folder = RunFolder.open(words[0])  # before PyTorch is imported

    options = TrainOptions(recipe=training.Run(folder.folder).recipe())
    if words[1:]:
        options = parse(TrainOptions, f"train --resume {words[0]}", words[1:], options.recipe)
    if options.output is not None or options.auto_resume or options.quick:
        raise ValueError(
            "`--resume` must be given without --output, --auto-resume and --quick: a run is resumed in its folder."
        )
    return TrainOptions(recipe=options.recipe, output=folder.folder, auto_resume=True)


def _start(arguments: list[str]) -> TrainOptions:
    """Return the recipe and the folder of a run to start."""
    if any(argument.partition("=")[0] == "--resume" for argument in arguments):
        raise ValueError("`--resume` must come first, without a recipe; call graticule train --resume RUN --option ...")
    if arguments[0].startswith("-"):
        raise ValueError(f"`RECIPE` must come first: graticule train RECIPE --option ..., got {arguments[0]!r}.")
    name, loaded = arguments[0], load_recipe(arguments[0])
    about = {"__doc__": describe_recipe(name) or TrainOptions.__doc__}  # for the help
    options: TrainOptions = parse(type("TrainOptions", (TrainOptions,), about), f"train {name}", arguments[1:], loaded)
    return with_folder(options, Path(name).stem)


def with_folder(options: TrainOptions, name: str) -> TrainOptions:
    """Return the options with the folder of a new run: the one that is given, or a new one of this name and time."""
    if options.auto_resume and not options.output:
        raise ValueError("`--auto-resume` must be given with --output, the folder of the run, got none.")
    if not options.output and int(os.environ.get("WORLD_SIZE", 1)) == 1:
        # for further devices, the processes that it starts have its folder
        os.environ["GRATICULE_RUN"] = str(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if not options.output and "GRATICULE_RUN" not in os.environ:
        raise ValueError("`--output` must be given if several processes were started externally, got none.")
    options.output = output_folder(options.output, Path(os.environ.get("GRATICULE_RUN", "")))
    return options
