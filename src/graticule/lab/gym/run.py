"""Run of a gym: every choice is trained on every task with every seed; finished trainings are not repeated."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from tqdm.auto import tqdm

from graticule.encodings.forms.mixing import TokenMixing
from graticule.lab.figures.save import save_figures
from graticule.lab.gym.base import LEAST, TASKS, GymTask, build_task
from graticule.lab.gym.picture import profile_picture
from graticule.lab.gym.profile import Profile, Row, merged, percent, read_profile, write_profile
from graticule.lab.gym.recipe import GymRecipe
from graticule.lab.gym.training import build_model, evaluate, train
from graticule.lab.locks import locked
from graticule.lab.studies.execution import ATTEMPTS, Submits, Submitted, collect
from graticule.lab.terminal import Lines
from graticule.lab.terminal import bar as progress_bar
from graticule.lab.training.surroundings import surroundings
from graticule.position.position import ENCODINGS
from graticule.registry.plugins import load_plugin, loaded_plugins
from graticule.system.files import write_json, write_text

#: A gated MLP about as small as the default model, for the encodings that mix tokens.
_GATED = "model=gmlp_nano_patch4_28,model_kwargs=embed_dim=32 num_blocks=2"


class Cell(NamedTuple):
    """One training: a choice, a task and a seed."""

    choice: str
    task: str
    seed: int


def gym(
    choices: Mapping[str, GymRecipe],
    folder: str | Path,
    *,
    tasks: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    sides: Sequence[int] = (),
    progress: bool = True,
    command: str = "",
    executor: Submits | None = None,
) -> Profile:
    """Train every choice on every task with every seed, and write the profile to `folder`.

    `gym.csv` is written after every training, so an interrupted gym resumes where it stopped; seeds are trained one
    after the other, so an interruption leaves complete tables. `gym.md`, `gym.png` (.pdf, .svg) and `gym.json` are
    written at the end.

    Args:
        choices: text -> recipe.
        folder: of the files.
        tasks: names with options; by default all tasks that are defined on the surface of the choices.
        seeds: of weights and pictures, the same for all choices.
        sides: cells per side of further grids that the models are tested on.
        progress: whether to show a bar on a terminal, or else print a line for each training.
        command: recorded in `gym.json`.
        executor: runs the trainings, as in `graticule.lab.studies.compare`; this process by default.

    Raises:
        ValueError: before any training, if a choice or a task cannot be built, or `folder` has scores of other recipes.
    """
    folder = Path(folder)
    tasks = list(tasks) or standard_tasks(choices)
    check_gym(choices, tasks, seeds, sides)
    file = folder / "gym.csv"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder) as free:
        if not free:
            raise ValueError(f"`folder` must not be in use by another process, got {str(folder)!r}, which is.")
        profile = read_profile(file)
        _check_recipes(profile, choices, folder)
        cells = [Cell(choice, task, seed) for seed in seeds for task in tasks for choice in choices]
        order: dict[tuple[str, str, int], int] = {cell: number for number, cell in enumerate(cells)}
        left = [cell for cell in cells if _missing(profile, cell, choices[cell.choice], sides)]
        total = sum(choices[cell.choice].steps for cell in left)
        with progress_bar(total=total, unit="step", wanted=progress, dynamic_ncols=True) as bar:
            for number, (cell, new) in enumerate(_trained(left, choices, sides, bar, executor), 1):
                kept = Profile(tuple(row for row in profile.rows if (row.choice, row.task, row.seed) != cell))
                profile = merged(kept, new, order)
                write_profile(file, profile)
                if progress and isinstance(bar, Lines):  # no terminal: print a line for each training
                    said = f"{cell.task}, {cell.choice}, seed {cell.seed}: {percent(new[0].normalized)} %"
                    print(f"{number} of {len(left)}: {said}, {new[0].seconds:.0f} s", file=sys.stderr)
        shown = profile.chosen(list(choices), tasks)
        _write(shown, choices, folder, command)
    return shown


def standard_choices() -> list[str]:
    """Return the texts of the choices, as on the command line.

    They are every registered encoding by itself, absolute ones also joined by LaPE, and, as a control, a learnable
    table that starts with the amplitude that LaPE's norm gives it.
    """
    alone = [name for name, kind in ENCODINGS.items() if not issubclass(kind, TokenMixing)]
    mixing = [name for name, kind in ENCODINGS.items() if issubclass(kind, TokenMixing)]
    absolute = [name for name in alone if ENCODINGS[name].joined == "table"]
    ordered = ["none", *absolute, *(name for name in alone if name != "none" and name not in absolute)]
    found = []
    for name in ordered:
        found.append(f"encoding={name}")
        if name == "learnable":
            found.append("encoding=learnable(std=1)")
        if name in absolute:
            found.append(f"encoding={name},joining=lape")
    return [*found, *(f"encoding={name},{_GATED}" for name in mixing)]


def standard_tasks(choices: Mapping[str, GymRecipe]) -> list[str]:
    """Return the names of the tasks that are defined on the surfaces of all choices."""
    surfaces = {recipe.surface for recipe in choices.values()}
    return [name for name, kind in TASKS.items() if surfaces <= set(kind.surfaces)]


def check_gym(
    choices: Mapping[str, GymRecipe], tasks: Sequence[str], seeds: Sequence[int], sides: Sequence[int]
) -> None:
    """Build every task at every size, and every choice for every kind of answer.

    Raises:
        ValueError: if something cannot be built, or choices differ in surface or side.
    """
    for name, given in (("choices", list(choices)), ("tasks", tasks), ("seeds", seeds)):
        if not given or len(set(given)) < len(given):
            raise ValueError(f"`{name}` must not be empty or have duplicates, got {list(given)}.")
    for field in ("surface", "side"):
        if len(values := {getattr(recipe, field) for recipe in choices.values()}) > 1:
            raise ValueError(f"`{field}` must be the same for all choices, got {', '.join(map(str, sorted(values)))}.")
    first = next(iter(choices.values()))
    for side in (first.side, *sides):
        if side < LEAST:
            raise ValueError(f"`{'side' if side == first.side else 'sizes'}` must be at least {LEAST}, got {side}.")
    kinds: dict[tuple[bool, int], GymTask] = {}
    for task in tasks:
        for side in (first.side, *sides):
            built = build_task(task, (side, side), first.surface)
        kinds.setdefault((built.answer.per_token, built.answer.outputs), built)
    for choice, recipe in choices.items():
        for built in kinds.values():
            try:
                build_model(recipe, built, 0)
            except ValueError as error:
                raise ValueError(f"`choices` must be models that can be built, got {choice!r}: {error}") from None


def _check_recipes(profile: Profile, choices: Mapping[str, GymRecipe], folder: Path) -> None:
    """Check that existing scores of a choice are of the same recipe."""
    for row in profile.rows:
        if row.choice in choices and row.recipe != choices[row.choice].hash:
            raise ValueError(
                f"`folder` must have no scores of another recipe, got {str(folder)!r}, where {row.choice!r} was "
                "trained with other values or another version of its plugin; choose another folder."
            )


def _missing(profile: Profile, cell: Cell, recipe: GymRecipe, sides: Sequence[int]) -> bool:
    """Return whether scores of a training are missing."""
    known = {row.side for row in profile.rows if (row.choice, row.task, row.seed) == cell}
    return not {recipe.side, *sides} <= known


def _trained(
    cells: Sequence[Cell],
    choices: Mapping[str, GymRecipe],
    sides: Sequence[int],
    bar: tqdm[None],
    executor: Submits | None,
) -> Iterator[tuple[Cell, list[Row]]]:
    """Train in this process or by an executor, and yield the scores of each training as it ends."""
    if executor is None:
        for cell in cells:
            bar.set_description(f"{cell.task}, {cell.choice}, seed {cell.seed}", refresh=False)
            before = bar.n
            rows = train_cell(cell, choices[cell.choice], tuple(sides), [], bar.update)
            bar.update(before + choices[cell.choice].steps - bar.n)  # steps that a solved task did not need
            yield cell, rows
        return
    plugins = loaded_plugins()
    deaths = Counter[Cell]()

    def submit(cell: Cell) -> Submitted:
        return executor.submit(train_cell, cell, choices[cell.choice], tuple(sides), plugins)

    def give_up(cell: Cell) -> bool:
        deaths[cell] += 1
        return deaths[cell] > ATTEMPTS

    for ended in collect(cells, submit, give_up):
        for cell, found in ended:
            if isinstance(found, Exception):
                raise found
            bar.update(choices[cell.choice].steps)
            yield cell, found


def train_cell(
    cell: Cell,
    recipe: GymRecipe,
    sides: Sequence[int],
    plugins: Sequence[str],
    step_done: Callable[[], object] = lambda: None,
) -> list[Row]:
    """Train once, and return the scores at every size.

    Args:
        cell: the training.
        recipe: of the choice.
        sides: cells per side of further grids.
        plugins: imported first, for another process.
        step_done: called after every step.
    """
    for plugin in plugins:
        load_plugin(plugin)
    start = time.perf_counter()
    task = build_task(cell.task, (recipe.side, recipe.side), recipe.surface)
    model, losses = train(recipe, task, cell.seed, step_done)
    found = []
    for side in dict.fromkeys([recipe.side, *sides]):
        there = build_task(cell.task, (side, side), recipe.surface)
        found.append((side, there.answer, evaluate(model, there, recipe.test, cell.seed)))
    seconds = round(time.perf_counter() - start, 2)
    parameters = sum(p.numel() for p in model.parameters())
    return [
        Row(
            choice=cell.choice,
            task=cell.task,
            surface=recipe.surface,
            seed=cell.seed,
            trained=recipe.side,
            side=side,
            score=round(score, 6),
            chance=round(answer.chance, 6),
            normalized=round(answer.normalized(score), 6),
            steps=len(losses),
            seconds=seconds,
            parameters=parameters,
            recipe=recipe.hash,
        )
        for side, answer, score in found
    ]


def _write(profile: Profile, choices: Mapping[str, GymRecipe], folder: Path, command: str) -> None:
    """Write the table, the picture, and the values needed to repeat them."""
    write_text(folder / "gym.md", profile.markdown() + "\n")
    save_figures(profile_picture(profile), folder / "gym")
    record = {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **surroundings(),
        "tasks": profile.tasks,
        "seeds": profile.seeds,
        "sides": profile.sides,
        "recipes": {choice: recipe.to_dict() for choice, recipe in choices.items()},
        "scores": [
            {"choice": choice, "task": task, "side": side, "normalized": profile.scores(choice, task, side)}
            for choice in profile.choices
            for task in profile.tasks
            for side in profile.sides
        ],
    }
    write_json(folder / "gym.json", record)
