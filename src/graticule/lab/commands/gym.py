"""`graticule gym`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from graticule.lab.arguments import Rare
from graticule.lab.commands.options import JsonOutput, Output, command_line, output_folder, parse
from graticule.lab.gym.recipe import GymRecipe
from graticule.lab.studies.execution import executor_of, parse_on


@dataclass
class Gym(JsonOutput):
    """Train tiny models on pictures whose answer needs one kind of position information, and print their profiles.

        graticule gym --choices encoding=learnable encoding=rope --seeds 0
        graticule gym --choices encoding=peg joining=lape --tasks place border
        graticule gym --list

    A score is linear in the accuracy, 0 at chance level and 1 if perfect. A choice is a list of values of the options
    below, separated by commas, as in compare. The same command resumes an interrupted gym.
    """

    choices: list[str] = dataclasses.field(default_factory=list)
    """the choices (default: every encoding, absolute ones with LaPE, too)"""
    tasks: list[str] = dataclasses.field(default_factory=list)
    """tasks, such as place(density=0.2) (default: all of the surface)"""
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0, 1, 2])
    """seeds of weights and pictures, the same for every choice"""
    sizes: list[int] = dataclasses.field(default_factory=list)
    """also test on pictures with this number of cells per side"""
    output: Path | None = None
    """folder of tables and picture (default: runs/gym)"""
    on: Rare[str] = "here"
    """where the models are trained, as in graticule compare: here, or local:N"""
    list_: bool = False
    """list the tasks, their requirements and chance levels; train nothing"""
    quick: bool = False
    """only a few steps and one seed, as a check"""
    recipe: GymRecipe = dataclasses.field(default_factory=GymRecipe)


def run(arguments: list[str]) -> int:
    """Train choices on tasks, and print their profiles."""
    options = parse(Gym, "gym", arguments)
    output = Output(options.json)
    if options.list_:
        from graticule.lab.gym.base import task_rows

        columns, *rows = task_rows()
        for name, question, knows, frame, surfaces, chance in rows:
            output.say(f"{name}: {question}\n    {knows} ({frame}), on {surfaces}, chance {chance}")
        output.give([dict(zip(columns, row, strict=True)) for row in rows])
        return 0
    parse_on(options.on)
    from graticule.lab.commands.choices import parse_choices

    base = options.recipe.quick() if options.quick else options.recipe
    given = options.choices or _single(base)
    choices = parse_choices(base, given, "gym")  # before PyTorch is imported
    from graticule.lab.gym.run import gym, standard_choices

    choices = choices or parse_choices(base, standard_choices(), "gym")
    folder = output_folder(options.output, Path(f"runs/gym{'-quick' * options.quick}"))
    with executor_of(options.on) as executor:
        profile = gym(
            choices,
            folder,
            tasks=options.tasks,
            seeds=options.seeds[:1] if options.quick else options.seeds,
            sides=options.sizes,
            command=command_line("gym", arguments),
            executor=executor,
        )
    for side in profile.sides:
        output.say(f"\n{profile.title(side)}")
        columns, *rows = profile.table(side)
        output.table(columns, rows)
    output.wrote(*(folder / f"gym.{kind}" for kind in ("csv", "md", "png", "pdf", "svg", "json")))
    output.give([dataclasses.asdict(row) for row in profile.rows])
    return 0


def _single(base: GymRecipe) -> list[str]:
    """Return the one choice that is given by options instead of --choices."""
    named = {name: getattr(base, name) for name in ("model", "encoding", "joining")}
    changed = [f"{name}={value}" for name, value in named.items() if value != getattr(GymRecipe, name)]
    return [",".join(changed)] if changed else []
