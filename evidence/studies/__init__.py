"""Our studies: a question and the runs that answer it, each in a file `NAME.py` with a function `study()`.

`python -m evidence.studies` lists them with what they cost. `python -m evidence.studies NAME` trains and measures the
runs that docs/data/study_NAME.csv lacks, and writes it after each; the tests are rows of evidence/contrasts.csv, and
`python -m evidence.results` writes the pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from pandas import DataFrame
from torchvision.datasets import CIFAR10

from evidence.built import differences, facts_of
from graticule.lab.recipes.load import load_recipe
from graticule.lab.studies.comparison import recipe_hash, run_hash, run_rows
from graticule.lab.studies.execution import train_runs
from graticule.lab.studies.plan import PlannedRun, check_choices, plan
from graticule.lab.training.run import Run
from graticule.lab.training.run_folder import lock_folder
from graticule.lab.training.task import build_data
from graticule.registry.checks import known_name
from graticule.system.files import make_folder, write_text

#: A further score of a run: its metric, its condition (such as 'canvas 40'), and its value.
Measured = tuple[str, str, float]
#: Columns of a table of scores, and their types.
COLUMNS: dict[str, type] = {
    **{"choice": str, "variant": str, "seed": int, "metric": str, "at": str, "value": float, "parameters": int},
    **{"seconds": float, "recipe": str, "date": str, "graticule": str, "torch": str, "timm": str, "machine": str},
    "threads": int,
}
#: A table whose rows have the standard deviation 1, as after a norm: a normal of 1.37, truncated at 2.
EXACT = "learnable(std=1.37)"
#: What identifies a run.
CELL = ["choice", "variant", "seed"]
#: Seconds that another process may take to add its rows to a table.
_PATIENCE = 60.0


@dataclass(frozen=True)
class Study:
    """A question, and the runs that answer it: every choice in every variant with every seed.

    question: one sentence.
    recipe: the name of a recipe.
    choices: label -> changed fields of the recipe; the choices are compared.
    seconds: estimated wall time of a run on one core.
    variants: label -> further changed fields; settings in which the choices are compared, such as epochs.
    variant_first: train all seeds of a variant before the next variant, instead of all variants of a seed.
    without: (choice, variant) pairs that are left out, such as an encoding that a model cannot take.
    base: fields of the recipe that are changed for all choices.
    seeds: the same for every choice and variant.
    sizes: further (height, width) of images that the last weights are tested at.
    modes: how images are changed to those sizes.
    decimals: of its means in the tables.
    controls: a sentence that names the controls and their purpose.
    follows: the paper and table that it repeats on a small scale.
    limits: a sentence on the limits of the result.
    folder: name of its data folder; empty if none is needed.
    measure: function that returns further scores of a finished run.
    expects: facts of the models that are built (`evidence.built`), of all or of a choice or a variant: {"grid": "8 x
        8", "once, std 0.02": {"std": 0.02}}; nothing is trained where another is built.
    """

    question: str
    recipe: str
    choices: Mapping[str, Mapping[str, Any]]
    seconds: float
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    variant_first: bool = False
    without: tuple[tuple[str, str], ...] = ()
    base: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    sizes: tuple[tuple[int, int], ...] = ()
    modes: tuple[Literal["zoom", "canvas"], ...] = ("zoom",)
    decimals: int = 2
    controls: str = ""
    follows: str = ""
    limits: str = ""
    folder: str = ""
    measure: Callable[[Run], Iterable[Measured]] | None = None
    expects: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cells(self) -> dict[str, tuple[str, str]]:
        """Map the name of each choice in each of its variants to (choice, variant)."""
        return {
            f"{choice}, {variant}" if variant else choice: (choice, variant)
            for variant in self.variants
            for choice in self.choices
            if (choice, variant) not in self.without
        }

    def recipes(self, *, quick: bool = False, data_root: Path | None = None) -> dict[str, Any]:
        """Return the recipes of `cells`, with the seed of the recipe; quick ones of a few steps each."""
        start, recipes = load_recipe(self.recipe), {}
        for name, (choice, variant) in self.cells.items():
            changes = {**self.base, **self.variants[variant], **self.choices[choice]}
            if data_root is not None:
                changes["data_root"] = data_root
            recipe = dataclasses.replace(start, **changes)
            recipes[name] = recipe.quick() if quick else recipe
        return recipes

    def expected(self, choice: str, variant: str) -> dict[str, Any]:
        """Return the expected facts of a choice in a variant; the facts of the choice replace common ones."""
        of_all = {name: value for name, value in self.expects.items() if not isinstance(value, Mapping)}
        return {**of_all, **self.expects.get(variant, {}), **self.expects.get(choice, {})}


def names() -> list[str]:
    """List the studies."""
    return sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))


def load(name: str) -> Study:
    """Return a study."""
    return import_module(f"evidence.studies.{known_name('study', name, names())}").study()


def accept_copies() -> None:
    """Let CIFAR-10 be read from files that are not the published ones, such as JPEG copies, in this process."""
    for name in ("train_list", "test_list"):
        setattr(CIFAR10, name, [[file, None] for file, _ in getattr(CIFAR10, name)])
    CIFAR10.meta = {**CIFAR10.meta, "md5": None}  # torchvision checks no hash without one


def read_table(table: Path) -> DataFrame:
    """Read the rows of a table; an absent file has none."""
    if not table.is_file():
        return DataFrame(columns=[*COLUMNS])
    floats = {name: float for name, kind in COLUMNS.items() if kind is float}  # pandas 2 rounds what it reads itself
    others = {name: kind for name, kind in COLUMNS.items() if kind is not float}
    rows = pd.read_csv(table, dtype=others, converters=floats, keep_default_na=False)
    if [*rows.columns] != [*COLUMNS]:
        raise ValueError(f"{table} must have the columns {', '.join(COLUMNS)}, got {', '.join(rows.columns)}.")
    return rows


def write_table(table: Path, rows: DataFrame) -> Path:
    """Write rows, completely or not at all; returns `table`."""
    return write_text(table, rows[[*COLUMNS]].to_csv(index=False, lineterminator="\n", na_rep="nan"))


def missing_runs(study: Study, rows: DataFrame, folder: Path, recipes: Mapping[str, Any]) -> list[PlannedRun]:
    """List the runs that a table lacks, seed by seed, or variant by variant if the study says so.

    Raises:
        ValueError: if the table has scores of another recipe or of other data.
    """
    for name, recipe in recipes.items():
        cell = study.cells[name]
        for known in rows[(rows.choice == cell[0]) & (rows.variant == cell[1])].recipe.unique():
            of_data = "-" in known
            now = run_hash(recipe, build_data(recipe).fingerprint()) if of_data else recipe_hash(recipe)
            if now != known:
                raise ValueError(
                    f"`study` must have the recipes and data of its table, got others for {name!r}: {now}, not {known} "
                    "(recipe-data); restore them, move the table away, or remove these rows."
                )
    measured = {*zip(*(rows[name] for name in CELL), strict=True)}
    runs = plan(recipes, study.seeds, folder)
    if study.variant_first:
        runs.sort(key=lambda run: [*study.variants].index(study.cells[run.choice][1]))
    return [run for run in runs if (*study.cells[run.choice], run.recipe.seed) not in measured]


def run_study(
    study: Study,
    folder: Path,
    table: Path,
    *,
    quick: bool = False,
    data_root: Path | None = None,
    executor: Executor | None = None,
    progress: bool = True,
) -> None:
    """Train and measure the runs that `table` lacks, and write it after every run.

    Finished runs in `folder` are measured and not trained again, so an interrupted study resumes where it stopped.

    Args:
        study: the study.
        folder: of the runs.
        table: the CSV file of the scores.
        quick: only a few steps per run.
        data_root: folder of the data set.
        executor: trains the runs, as in `graticule.compare`.
        progress: whether progress is printed.

    Raises:
        ValueError: if a choice cannot be built, or not as the study expects, or the table has scores of another recipe,
            of other data, or of another model; before any work.
    """
    rows, recipes = read_table(table), study.recipes(quick=quick, data_root=data_root)
    missing = missing_runs(study, rows, folder, recipes)

    def inspect(name: str, model: Any, images: int) -> None:
        choice, variant = study.cells[name]
        expected = study.expected(choice, variant)
        for number in rows[(rows.choice == choice) & (rows.variant == variant)].parameters.unique():
            expected["parameters"] = number
        if quick:
            expected = {name: value for name, value in expected.items() if name not in ("images", "epochs")}
        if wrong := differences(facts_of(recipes[name], model, images), expected):
            raise ValueError(f"`expects` must be what is built: {name!r} must have {'; '.join(wrong)}.")

    parameters = check_choices(missing, sizes=study.sizes, inspect=inspect)

    def measure(run: PlannedRun) -> None:
        choice, variant = study.cells[run.choice]
        scores = run_rows(run, parameters[run.choice], study.sizes, study.modes)
        further = study.measure(Run(run.folder)) if study.measure else ()
        scores += [{**scores[0], "metric": metric, "at": at, "value": value} for metric, at, value in further]
        _add_rows(table, DataFrame(scores).assign(choice=choice, variant=variant), folder)

    for run in missing:  # trained earlier, and not measured
        if run.run.finished:
            measure(run)
    train_runs(missing, executor, progress=progress, ended=measure)


def _add_rows(table: Path, rows: DataFrame, folder: Path) -> None:
    """Add the rows of a run unless `table` has it; other processes may have added it since it was read.

    Raises:
        OSError: if another process holds the lock of `folder`.
    """
    make_folder(folder)
    with lock_folder(folder, wait=_PATIENCE) as free:
        if not free:
            raise OSError(f"{folder} is in use by another process; end it and start again. Finished runs are kept.")
        before = read_table(table)
        if not (before[CELL] == rows[CELL].iloc[0]).all(axis=1).any():
            write_table(table, pd.concat([before, rows]) if len(before) else rows)
