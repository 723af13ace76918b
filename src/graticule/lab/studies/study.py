"""Studies: a question, the runs that answer it, and the tests of the answer, in one short Python file per study.

The results are in a table with a row per score, with the recipe, versions, machine and date of the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from graticule.lab.studies.arms import check_facts
from graticule.lab.studies.tables import csv_of_records, read_records, size_text
from graticule.registry.checks import known_name
from graticule.registry.fields import Positive, Seed, Side, check_fields
from graticule.registry.plugins import call_file
from graticule.system.files import read_json, write_text

#: A score of a run: its metric, its condition (such as 'canvas 40'), and its value.
Measured = tuple[str, str, float]
#: Condition of the score of the last epoch of training.
TRAINED = "trained"
#: Rows that are no scores: of a crop that had the position of a whole image, of a length that a table was resampled to,
#: and the bytes of the held-out text.
UNPLACED = "unplaced"


@dataclass(frozen=True)
class Endpoint:
    """The number of a run that decides a study: a score, or the difference of two scores of the same run.

    metric: of the scores; None for that of the recipe.
    at: condition of the measurement: 'trained', or a mode and a size, such as 'canvas 40'.
    minus: condition of the score that is subtracted; None for none.
    """

    metric: str | None = None
    at: str = TRAINED
    minus: str | None = None


@dataclass(frozen=True)
class Study:
    """A question, and the runs that answer it: every choice in every variant with every seed.

    question: one sentence.
    recipe: the name of a recipe, or a recipe.
    choices: label -> changed fields of the recipe; the choices are compared.
    seconds: estimated wall time of a run on one core, or variant -> that of its runs; None if it is not known.
    variants: label -> further changed fields; settings in which the choices are compared, such as epochs.
    without: (choice, variant) pairs that are left out, such as an encoding that a model cannot take.
    base: fields of the recipe that are changed for all choices.
    seeds: the same for every choice and variant.
    sizes: further (height, width) of images that the last weights are tested at.
    modes: how images are changed to those sizes: zoom, canvas or crop; only sizes up to the training size are crops.
    tests: (choice, the choice it is tested against); all against the first by default.
    interactions: (a, b, c, d): tests of the contrast (a - b) - (c - d), the gain of a over b minus that of c over d.
    endpoint: the number that is tested; to be fixed before the runs, as the tests are.
    margin: the largest difference of the endpoint that would not matter, for which seeds are planned.
    deviation: standard deviation of the differences over seeds that is expected, if the table has no seeds yet.
    decimals: of its means and differences in the tables.
    controls: a sentence that names the controls and their purpose.
    follows: the paper and table that it repeats on a small scale.
    limits: a sentence on the limits of the result.
    folder: name of the data folder in the command; empty if none is needed.
    measure: function that returns further scores of a finished run.
    expects: facts of the models that are built (`Arm`), of all or of a choice or a variant: {"grid": (8, 8), "once, std
        0.02": {"std": 0.02}}; nothing is trained where another is built. Of a name with options, only those that are
        given are compared: {"encoding": "peg(kernel=7)"}.
    """

    question: str
    recipe: Any
    choices: Mapping[str, Mapping[str, Any]]
    seconds: float | Mapping[str, float] | None
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    without: tuple[tuple[str, str], ...] = ()
    base: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[Seed, ...] = (0, 1, 2, 3, 4)
    sizes: tuple[tuple[Side, Side], ...] = ()
    modes: tuple[Literal["zoom", "canvas", "crop"], ...] = ("zoom",)
    tests: tuple[tuple[str, str], ...] = ()
    endpoint: Endpoint = field(default_factory=Endpoint)
    controls: str = ""
    follows: str = ""
    limits: str = ""
    folder: str = ""
    measure: Callable[[Any], Iterable[Measured]] | None = None
    interactions: tuple[tuple[str, str, str, str], ...] = ()
    decimals: int = 2
    margin: Positive = 1.0
    deviation: Positive | None = None
    expects: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.choices or not self.variants or not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(
                "`choices`, `variants` and `seeds` must not be empty, and seeds must differ, got "
                f"{list(self.choices)}, {list(self.variants)}, {list(self.seeds)}."
            )
        for argument, groups in (("tests", self.tests), ("interactions", self.interactions)):
            for name in itertools.chain(*groups):
                known_name(argument, name, self.choices)
        for choice, variant in self.without:
            known_name("without", choice, self.choices)
            known_name("without", variant, self.variants)
        for name, facts in self.expects.items():
            if isinstance(facts, Mapping):
                known_name("expects", name, [*self.choices, *self.variants])
            check_facts(facts if isinstance(facts, Mapping) else {name: facts})
        if any((seconds := self.seconds_of(variant)) is not None and seconds <= 0 for variant in self.variants):
            raise ValueError(f"`seconds` must be the time of a run, more than 0, got {self.seconds}.")
        conditions = [TRAINED, *(place(mode, size) for mode in self.modes for size in self.sizes)]
        for at in (self.endpoint.at, self.endpoint.minus) if self.measure is None else ():
            if at is not None:
                known_name("endpoint", at, conditions)

    def seconds_of(self, variant: str) -> float | None:
        """Return the estimated wall time of a run of a variant, on one core; None if it is not known."""
        return self.seconds[variant] if isinstance(self.seconds, Mapping) else self.seconds

    def expected(self, choice: str, variant: str) -> dict[str, Any]:
        """Return the expected facts of a choice in a variant; those of the choice replace those of all."""
        of_all = {name: value for name, value in self.expects.items() if not isinstance(value, Mapping)}
        return {**of_all, **self.expects.get(variant, {}), **self.expects.get(choice, {})}

    @property
    def tested(self) -> tuple[tuple[str, str], ...]:
        """The pairs of choices that are tested."""
        first, *others = self.choices
        return self.tests or tuple((other, first) for other in others)

    @property
    def cells(self) -> dict[str, tuple[str, str]]:
        """Map the name of each choice in each of its variants to (choice, variant)."""
        return {
            f"{choice}, {variant}" if variant else choice: (choice, variant)
            for variant in self.variants
            for choice in self.choices
            if (choice, variant) not in self.without
        }

    def start(self) -> Any:
        """Return the recipe, which is loaded if it is a name."""
        from graticule.lab.recipes.load import load_recipe

        return load_recipe(self.recipe) if isinstance(self.recipe, str) else self.recipe

    def recipes(self, *, quick: bool = False, data_root: Path | None = None) -> dict[str, Any]:
        """Return the recipes of `cells`, with the seed of the base.

        Args:
            quick: only a few steps each.
            data_root: folder of the data set.

        Raises:
            ValueError: for a field that the recipe does not have, or a value that it does not take.
        """
        base = self.start()
        if self.endpoint.metric is not None and self.measure is None:
            metrics = dict.fromkeys((base.metric.key, *("top1", "loss") * bool(self.sizes)))
            known_name("endpoint", self.endpoint.metric, metrics)
        fields = {entry.name for entry in dataclasses.fields(base)}
        recipes: dict[str, Any] = {}
        for name, (choice, variant) in self.cells.items():
            levels = {"base": self.base, "variants": self.variants[variant], "choices": self.choices[choice]}
            changes: dict[str, Any] = {}
            for argument, values in levels.items():
                for key in values:
                    known_name(argument, key, fields)
                changes |= values
            if data_root is not None:
                changes["data_root"] = data_root
            recipe = dataclasses.replace(base, **changes)
            recipes[name] = recipe.quick() if quick else recipe
        return recipes


def place(mode: str, size: tuple[int, int]) -> str:
    """Return the name of a mode and a size, (height, width): 'canvas 40', 'zoom 32x36'."""
    return f"{mode} {size_text(size)}"


def list_studies(folder: str | Path) -> dict[str, str]:
    """List the studies of a folder, file -> question."""
    return {str(file): load_study(file).question for file in sorted(Path(folder).glob("[!_]*.py"))}


def load_study(file: str | Path) -> Study:
    """Load a study from a Python file with a function `study()`.

    Raises:
        ValueError: for a file that raises or has no such function.
        FileNotFoundError: for a file that does not exist.
    """
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        problem = "which does not exist" if path.suffix == ".py" else "which is not one"
        raise FileNotFoundError(
            f"`study` must be a Python file with a function `study()`, got {str(file)!r}, {problem}."
        )
    study = call_file(path, "study")
    if not isinstance(study, Study):
        raise ValueError(f"{file} must have a function `study()` that returns a graticule.lab.studies.Study.")
    return study


@dataclass(frozen=True)
class StudyRow:
    """A score of a run.

    recipe: the hash of its recipe, and that of its data, `run_hash`; some recorded tables have the first alone.
    date: of the end of the training.
    seconds: wall time of the training; not finite if it was not recorded.
    """

    choice: str
    variant: str
    seed: int
    metric: str
    at: str
    value: float
    parameters: int
    seconds: float
    recipe: str
    date: str
    graticule: str
    torch: str
    timm: str
    machine: str
    threads: int

    @property
    def cell(self) -> tuple[str, str, int]:
        """Choice, variant and seed, which identify a run."""
        return self.choice, self.variant, self.seed


def recipe_hash(recipe: Any) -> str:
    """Return the first 12 digits of the SHA-256 of a recipe: of all fields that differ from their defaults.

    The seed is left out, and so are fields that only describe the machine. A field that a later version adds changes no
    hash as long as it has its default. The plugins that define classes of the recipe are included.
    """
    from graticule.lab.training.recipe import MACHINE
    from graticule.lab.training.task import recipe_plugins

    written = recipe.to_dict()
    relevant: dict[str, Any] = {"task": recipe.task}
    if plugins := recipe_plugins(recipe):
        relevant["plugins"] = plugins
    for entry in dataclasses.fields(recipe):
        default = entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()
        if entry.name not in (*MACHINE, "seed") and getattr(recipe, entry.name) != default:
            relevant[entry.name] = written[entry.name]
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:12]


def run_hash(recipe: Any, data: Mapping[str, Any] | None) -> str:
    """Return the hash of a recipe, and after a hyphen that of its data, if it is known.

    Sizes and times of files are left out, which tables of earlier versions lack, and so it is the same for a copy.
    """
    if not data:
        return recipe_hash(recipe)
    parts = {split: {name: known[name] for name in ("examples", "sha256")} for split, known in data.items()}
    text = json.dumps(parts, sort_keys=True)
    return f"{recipe_hash(recipe)}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def origin(run: Any) -> dict[str, Any]:
    """Return the columns of a finished run that describe its origin: recipe, date, versions, machine."""
    described = read_json(run.recipe_file)
    versions, machine = described.get("versions", {}), described.get("machine", {})
    return {
        "recipe": run_hash(run.recipe(), described.get("data")),
        "date": datetime.fromtimestamp(run.result_file.stat().st_mtime).date().isoformat(),
        **{name: str(versions.get(name, "")) for name in ("graticule", "torch", "timm")},
        "machine": str(machine.get("gpu", machine.get("processor", ""))),
        "threads": int(machine.get("threads", 0)),
    }


def read_table(path: Path) -> list[StudyRow]:
    """Read the rows of a table; an absent file has no rows."""
    return read_records(path, StudyRow)


def write_table(path: Path, rows: Iterable[StudyRow]) -> Path:
    """Write rows, completely or not at all; returns `path`."""
    return write_text(path, csv_of_records(StudyRow, rows))
