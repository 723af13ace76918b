"""`graticule gym`."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path

from graticule.lab.arguments import Rare
from graticule.lab.commands.choices import parse_choices
from graticule.lab.commands.options import JsonOutput, command_line, output_folder, parse
from graticule.lab.gym.base import task_rows
from graticule.lab.gym.profile import read_profile
from graticule.lab.gym.recipe import GymRecipe
from graticule.lab.gym.run import gym, standard_choices, standard_tasks
from graticule.lab.studies.execution import executor_of, parse_on
from graticule.position.position import ENCODINGS
from graticule.registry.plugins import load_plugin, source_of
from graticule.system.files import read_json, write_text


@dataclass
class Gym(JsonOutput):
    """Train tiny models on images whose answer needs one kind of position information, and print their profiles.

        graticule gym --choices encoding=learnable encoding=rope --seeds 0
        graticule gym --choices encoding=peg joining=lape --tasks place border
        graticule gym --list
        graticule gym --card my_methods.py --table docs/data/gym.csv

    A score is linear in the accuracy, 0 at chance level and 1 if perfect. A choice is a list of values of the options
    below, separated by commas, as in compare. The same command resumes an interrupted gym.
    """

    choices: list[str] = dataclasses.field(default_factory=list)
    """the choices (default: every encoding, absolute ones with LaPE, too)"""
    tasks: list[str] = dataclasses.field(default_factory=list)
    """tasks, such as place(density=0.2) (default: all of the surface)"""
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0, 1, 2])
    """seeds of weights and images, the same for every choice"""
    sizes: list[int] = dataclasses.field(default_factory=list)
    """also test on images with this number of cells per side"""
    output: Path | None = None
    """folder of tables and figure (default: runs/gym)"""
    on: Rare[str] = "here"
    """where the models are trained, as in graticule compare: here, local:N or dask:ADDRESS"""
    card: Path | None = None
    """a plugin with an encoding (or what --choices names): train it on all tasks with 5 seeds, and write its card"""
    table: Rare[Path | None] = None
    """for --card: gym.csv of other choices, such as docs/data/gym.csv, among which the card gives its ranks"""
    list_: bool = False
    """list the tasks, their requirements and chance levels; train nothing"""
    quick: bool = False
    """only a few steps and one seed, as a check"""
    recipe: GymRecipe = dataclasses.field(default_factory=GymRecipe)


def run(arguments: list[str]) -> int:
    """Train choices on tasks, and print their profiles."""
    options = parse(Gym, "gym", arguments)
    if options.list_:
        columns, *rows = task_rows()
        for name, question, knows, frame, surfaces, chance in rows:
            options.say(f"{name}: {question}\n    {knows} ({frame}), on {surfaces}, chance {chance}")
        return options.finish([dict(zip(columns, row, strict=True)) for row in rows])
    parse_on(options.on)
    if options.card is not None:
        _set_protocol(options, options.card)
    elif options.table is not None:
        raise ValueError(f"`table` must be given with `card`, got {str(options.table)!r} alone.")
    base = options.recipe.quick() if options.quick else options.recipe
    choices = parse_choices(base, options.choices or _single(base), "gym")
    choices = choices or parse_choices(base, standard_choices(), "gym")
    seeds, table = options.seeds[:1] if options.quick else options.seeds, None
    if options.table is not None:
        if not options.table.is_file():
            raise FileNotFoundError(
                f"`table` must be gym.csv of a gym, got {str(options.table)!r}, which does not exist."
            )
        sides = [base.side, *options.sizes]
        table = read_profile(options.table).complete(standard_tasks(choices), seeds, sides)
    kind = "gym" if options.card is None else f"gym-card-{options.card.stem}"
    folder = output_folder(options.output, Path(f"runs/{kind}{'-quick' * options.quick}"))
    with executor_of(options.on) as executor:
        profile = gym(
            choices,
            folder,
            tasks=options.tasks,
            seeds=seeds,
            sides=options.sizes,
            command=command_line("gym", arguments),
            executor=executor,
        )
    for side in profile.sides:
        options.say(f"\n{profile.title(side)}")
        options.print_table(*profile.table(side))
    written = [folder / f"gym.{kind}" for kind in ("csv", "md", "png", "pdf", "svg", "json")]
    if options.card is not None:
        check = ["A check of a few steps with one seed, not a result."] * options.quick
        record, digest = read_json(folder / "gym.json"), hashlib.sha256(options.card.read_bytes()).hexdigest()
        versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("graticule", "torch"))
        origin = f"`{record['command']}`, {record['date'][:10]}, {versions}"
        notes = [f"{origin}; {options.card.name} has the SHA-256 {digest}.", *check]
        written.append(write_text(folder / "card.md", profile.card(table, notes)))
    return options.finish([dataclasses.asdict(row) for row in profile.rows], *written)


def _set_protocol(options: Gym, plugin: Path) -> None:
    """Load the plugin of a card, and set the choice, the seeds and the sizes, which are the same for all cards."""
    fixed = Gym()
    names = ("tasks", "seeds", "sizes", "recipe")
    if others := [name for name in names if getattr(options, name) != getattr(fixed, name)]:
        raise ValueError(
            f"`card` must be given without other values of {', '.join(others)}, which are fixed for cards."
        )
    load_plugin(plugin)
    encodings = [f"encoding={name}" for name, kind in ENCODINGS.items() if source_of(kind) == plugin.resolve()]
    options.choices = options.choices or encodings
    if len(options.choices) != 1:
        raise ValueError(
            f"`card` must be a plugin that registers one encoding, or be given with one of --choices, got "
            f"{str(plugin)!r} with {', '.join(options.choices) or 'none'}."
        )
    options.seeds, options.sizes = list(range(5)), [9]


def _single(base: GymRecipe) -> list[str]:
    """Return the one choice that is given by options instead of --choices."""
    named = {name: getattr(base, name) for name in ("model", "encoding", "joining")}
    changed = [f"{name}={value}" for name, value in named.items() if value != getattr(GymRecipe, name)]
    return [",".join(changed)] if changed else []
