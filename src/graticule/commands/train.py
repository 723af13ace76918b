"""`graticule train`."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from graticule.checks import printable
from graticule.commands.options import output_folder, parse

USAGE = """\
usage: graticule train RECIPE [--output FOLDER] [--auto-resume] [--quick] [overrides of the recipe]
       graticule train --resume RUN [overrides of what does not decide the result, as --devices 4]

On SIGTERM or SIGUSR1, as clusters send them, a run saves a checkpoint and exits with 75 (or what the environment
variable GRATICULE_REQUEUE_CODE says), for the scheduler to queue it again; with --output and --auto-resume the same
command then goes on where it stood. Several devices: --devices 4; several machines: --nodes 2 --devices 4, the same
command on each, by torchrun or SLURM.

A recipe is a name, a Python file of yours with a function recipe(), or the path of a run, as ./RUN, to repeat it. The
names:
"""

#: What a scheduler takes for "try again": EX_TEMPFAIL of sysexits.h.
REQUEUE = 75


def run(arguments: list[str]) -> int:
    """Train a recipe, or go on with a run."""
    from graticule.recipes import list_recipes, load_recipe

    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        recipes = list_recipes()
        for name, about in recipes.items():
            print(f"  {name:{max(map(len, recipes))}}  {about}")
        print("\ngraticule train RECIPE --help lists every option with its value in that recipe.")
        return 0 if arguments else 2
    loaded = None
    if not arguments[0].startswith("-"):
        loaded = load_recipe(arguments[0])  # first, so that an unknown name costs no import of PyTorch

    from lightning.fabric.utilities.rank_zero import rank_zero_only

    from graticule.tasks import Interrupted, Preempted, Run, TextRecipe, train

    requeue = _requeue_code()
    if arguments[0] == "--resume" or arguments[0].startswith("--resume="):
        given = [part for part in [*arguments[0].partition("=")[2:], *arguments[1:]] if part]
        if not given or given[0].startswith("-"):
            raise ValueError(f"`--resume` must be followed by a run folder, got {given}.")
        run = Run.open(given[0])
        recipe, resume = run.recipe(), True
        if given[1:]:
            options = _overridden(recipe, given[1:], f"train --resume {given[0]}")
            if options.output is not None or options.auto_resume or options.quick:
                raise ValueError(
                    "`--resume` must come without --output, --auto-resume and --quick: a run goes on in its folder."
                )
            recipe = options.recipe
    else:
        if loaded is None:
            raise ValueError(f"`RECIPE` must come first: graticule train RECIPE --option ..., got {arguments[0]!r}.")
        if "--quick" in arguments:  # before the overrides, which take precedence
            loaded = loaded.quick()
        options = _overridden(loaded, arguments[1:], f"train {arguments[0]}")
        recipe, resume = options.recipe, options.auto_resume
        if resume and options.output is None:
            raise ValueError("`--auto-resume` must have --output, the folder to go on in, got none.")
        repeats = arguments[0] not in list_recipes() and Run(Path(arguments[0])).recipe_file.is_file()
        if repeats and (changed := Run.open(arguments[0]).changed_surroundings()):
            what = printable(f"those of {arguments[0]}: {', '.join(changed)}")
            print(f"graticule: warning: the weights may differ from {what}.", file=sys.stderr)
        name = f"{Path(arguments[0]).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        run = Run(output_folder(options.output, Path()) if options.output else _shared(Path("runs") / name))
    already = run.finished
    try:
        run = train(recipe, run.folder, resume=resume)
    except Interrupted as reason:
        rank = getattr(rank_zero_only, "rank", 0)
        again = printable(f"graticule train --resume {run.folder}")
        if isinstance(reason, Preempted):
            if not rank:
                print(f"saved and stopped on a signal; go on with: {again}", file=sys.stderr)
            # where Lightning started a process, one that fails would let it kill the first before that one has ended
            return 0 if int(os.environ.get("LOCAL_RANK", 0)) else requeue
        if not rank:
            print(f"stopped; go on with: {again}", file=sys.stderr)
        return 130
    if getattr(rank_zero_only, "rank", 0):  # the first process says what came of it
        return 0
    result, folder = run.result(), printable(str(run.folder))
    if already:
        print("this run was finished already.")
    metric = recipe.metric
    last, best = (metric.show(result[f"{which}_{metric.key}"]) for which in ("last", "best"))
    print(f"{metric.label} {last} after the last epoch, {best} in the best ", end="")
    print(f"(epoch {result['best_epoch']} of {result['epochs']}), {result['seconds']:.0f} s")
    if skipped := result["skipped_images"]:
        named = printable(", ".join(skipped[:5])) + (", ..." if skipped[5:] else "")
        print(f"{len(skipped)} broken images were left out: {named}")
    if steps := result.get("skipped_steps"):
        print(f"{steps} steps were left out, for their loss was not finite: see {folder}/nonfinite-*.json")
    tokenizer = ", tokenizer.json" if run.tokenizer_file.exists() else ""
    files = f"recipe.json{tokenizer}, metrics.csv, log.txt, weights.safetensors, checkpoints/, tensorboard/"
    print(f"wrote {folder}: {files}")
    if isinstance(recipe, TextRecipe):
        print(f'to see what it writes: graticule generate {folder} --prompt "..."')
    return 0


def _overridden(loaded: Any, arguments: list[str], command: str) -> Any:
    """Parse options with the values of a recipe as defaults."""
    kind = type(loaded)

    @dataclass
    class Train:
        __doc__ = f"{command}: every value of the recipe can be overridden."

        recipe: Annotated[Any, tyro.conf.arg(name="")] = dataclasses.field(default_factory=lambda: loaded)
        output: Path | None = None
        """run folder (default: runs/RECIPE-DATE-TIME)"""
        auto_resume: bool = False
        """go on with the run in the output folder if there is one, else start it"""
        quick: bool = False
        """a few steps only, to see that everything works"""

    Train.__annotations__ |= {
        "recipe": Annotated[kind, tyro.conf.arg(name="")],
        "output": Path | None,
        "auto_resume": bool,
        "quick": bool,
    }
    return parse(Train, command, arguments)


def _shared(folder: Path) -> Path:
    """Return the folder of the first process in those that it starts for further devices."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        os.environ["GRATICULE_RUN"] = str(folder)
        return folder
    if "GRATICULE_RUN" in os.environ:
        return Path(os.environ["GRATICULE_RUN"])
    raise ValueError("`--output` must be given where several processes were started from outside, got none.")


def _requeue_code() -> int:
    given = os.environ.get("GRATICULE_REQUEUE_CODE", str(REQUEUE))
    if not given.isdecimal() or int(given) > 255:
        raise ValueError(f"`GRATICULE_REQUEUE_CODE` must be an exit code from 0 to 255, got {given!r}.")
    return int(given)
