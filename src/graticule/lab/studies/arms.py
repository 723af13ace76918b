"""Arms of a study: what each choice is in each variant, measured on the model that is built before training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
from pydantic import BeforeValidator
from torch import nn

from graticule.backbones.registry import MODELS
from graticule.hub.config import argument_defaults, tuples
from graticule.lab.studies.tables import Rows, csv_of_records, read_records
from graticule.lab.training.recipe import TrainingRecipe
from graticule.position.joining import JOININGS
from graticule.position.places import by
from graticule.position.position import ENCODINGS
from graticule.registry.checks import known_name
from graticule.registry.fields import check_value
from graticule.registry.specs import Spec, parse_sum
from graticule.system.files import write_text

#: Facts that are a name with options, or several.
NAMED = ("model", "encoding", "joining")
#: Arguments of a model that follow from its data or its pooling, or are measured.
_OF_DATA = ("num_classes", "in_chans", "img_size", "depth", "depths", "class_token")


@dataclass(frozen=True)
class Arm:
    """A choice in a variant as it is built.

    model: its name, with those arguments of the backbone that are plain values.
    encoding, joining: names with all options; one that is not given has the default of the family, or its own.
    grid: of the first stage, in patches.
    windows: within which tokens meet; empty if there are none.
    depth: number of layers.
    std: standard deviation, before training, of the learned values for the grid (a table, bias or matrix, of all
        layers) of the first encoding that has some; None if there are none.
    values: their number.
    images: training examples per epoch.
    """

    choice: str
    variant: str
    model: str
    encoding: str
    joining: str
    grid: str
    windows: str
    depth: int
    std: Annotated[float | None, BeforeValidator(lambda value: None if value == "" else value)]
    values: int
    parameters: int
    images: int
    epochs: int

    def differences(self, facts: Mapping[str, Any]) -> list[str]:
        r"""Describe the facts of the arm that are not `facts`; an option that these do not name may have any value.

        A standard deviation of n values may be off by four standard errors of a normal's, :math:`4 \sigma / \sqrt{2n}`.
        """
        wrong = []
        for name, value in facts.items():
            if not _alike(name, built := getattr(self, name), value, self.values):
                text = _name_options(built, value) if name in NAMED else _text(built)
                wrong.append(f"{name} {_text(value) or 'none'}, got {text or 'none'}")
        return wrong


#: Names of the facts of an arm.
FACTS = tuple(field.name for field in dataclasses.fields(Arm))[2:]
#: Those that a quick run changes.
OF_LENGTH = ("images", "epochs")


def check_facts(facts: Mapping[str, Any]) -> None:
    """Check names and types of expected facts."""
    kinds = get_type_hints(Arm, include_extras=True)
    for name, value in facts.items():
        known_name("expects", name, FACTS)
        text = by(value) if isinstance(value, tuple) and name not in NAMED else value
        check_value(kinds[name], text, f"`expects` {name}")
        if name in NAMED:
            _specs(value)


def _alike(name: str, built: Any, value: Any, count: int) -> bool:
    if name in NAMED:
        return _options(value).items() <= _options(built).items()
    if name == "std" and built is not None and value is not None:
        return bool(abs(built - float(value)) <= 4 * float(value) / math.sqrt(2 * count))
    return _text(built) == _text(value)


def _specs(text: str) -> tuple[Spec, ...]:
    """Read the specs of a fact; it is empty for a model without position."""
    return parse_sum(text, "expects") if text else ()


def _options(text: str) -> dict[Any, Any]:
    """Return the names and options of specs by their places, and their number."""
    specs = _specs(text)
    options = {(n, key): tuples(value) for n, spec in enumerate(specs) for key, value in spec.options.items()}
    return {None: len(specs), **{n: spec.name for n, spec in enumerate(specs)}, **options}


def _name_options(text: str, other: str) -> str:
    """Return specs with those options alone that others name; with all if one of these is missing."""
    names = {name for spec in _specs(other) for name in spec.options}
    options = [
        {name: value for name, value in spec.options.items() if name in names or not names <= spec.options.keys()}
        for spec in _specs(text)
    ]
    return " + ".join(str(Spec(spec.name, chosen)) for spec, chosen in zip(_specs(text), options, strict=True))


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return by(value)
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def measure_arm(cell: tuple[str, str], recipe: TrainingRecipe, model: Any, images: int) -> Arm:
    """Return the facts of the untrained model of a choice and a variant, `cell`.

    Args:
        cell: choice and variant.
        recipe: of the runs.
        model: built for it.
        images: training examples per epoch.
    """
    backbone = getattr(model, "backbone", model)
    created = getattr(backbone, "created", None) or {"name": recipe.model, "arguments": {}}
    usual = (recipe.encoding or "learnable", recipe.joining) if hasattr(backbone, "position") else ("", "")
    words = {**dict(zip(NAMED[1:], usual, strict=True)), **created["arguments"]}
    sizes = {"num_classes": model, "in_chans": backbone, "img_size": backbone}
    sizes = {name: getattr(owner, name) for name, owner in sizes.items() if hasattr(owner, name)}
    arguments = {**_defaults("model", created["name"]), **words, **sizes}
    plain = {
        name: value
        for name, value in arguments.items()
        if name not in NAMED and isinstance(value, bool | int | float | str | tuple)
    }
    grid = getattr(backbone, "grid", None)
    grids = backbone.layer_grids(grid) if hasattr(backbone, "layer_grids") else []
    tables = _tables(getattr(backbone, "position", backbone))
    values = torch.cat([table.detach().flatten().double() for table in [*tables, torch.zeros(0)]])
    return Arm(
        *cell,
        model=str(Spec(created["name"], plain)),
        encoding=_resolve("encoding", words["encoding"]),
        joining=_resolve("joining", words["joining"]),
        grid="" if grid is None else by(grid.shape),
        windows=", ".join(dict.fromkeys(by(at.within.shape) for at in grids if at.windows)),
        depth=sum(getattr(backbone, "depths", ())) or len(getattr(backbone, "blocks", ())),
        std=float(values.std(correction=0)) if tables else None,
        values=len(values),
        parameters=sum(p.numel() for p in model.parameters()),
        images=images,
        epochs=recipe.epochs + recipe.cooldown_epochs,
    )


def _tables(position: nn.Module) -> list[nn.Parameter]:
    """Return the learned parameters with values for the grid, of the first kind of module that has some."""
    holders = [module for module in position.modules() if getattr(module, "resampled", False)]
    tables = [(type(module), table) for module in holders for table in module.parameters(False) if table.requires_grad]
    return [table for kind, table in tables if kind is tables[0][0]]


def _defaults(kind: str, name: str) -> dict[str, Any]:
    """Return the default options of an encoding or a joining, or the arguments of a model by name."""
    if kind == "model":
        size = MODELS.get(name)
        return {} if size is None else {**argument_defaults(size.kind), **size.arguments}
    return {
        key: option.default for key, option in (ENCODINGS if kind == "encoding" else JOININGS).options(name).items()
    }


def _resolve(kind: str, text: str) -> str:
    """Return specs with all their options."""
    return " + ".join(str(Spec(spec.name, {**_defaults(kind, spec.name), **spec.options})) for spec in _specs(text))


def _short(kind: str, text: str) -> Iterator[Spec]:
    """Yield specs without the options that have their defaults, and without those of `_OF_DATA`."""
    for spec in _specs(text):
        usual = {**_defaults(kind, spec.name), **{name: spec.options.get(name) for name in _OF_DATA}}
        options = {name: value for name, value in spec.options.items() if tuples(usual.get(name)) != tuples(value)}
        yield Spec(spec.name, options)


def _columns(arm: Arm) -> dict[str, str]:
    """Return the facts of an arm as columns of a table, with one for each argument of its model."""
    texts = {name: " + ".join(map(str, _short(name, getattr(arm, name)))) for name in ("encoding", "joining")}
    for model in _short("model", arm.model):
        texts |= {"model": model.name, **{name: str(value) for name, value in model.options.items()}}
    numbers = {"grid": arm.grid, "windows": arm.windows, "layers": arm.depth, "std": arm.std}
    numbers |= {"images": arm.images, "epochs": arm.epochs}
    return texts | {name: "" if value is None else _text(value) for name, value in numbers.items()}


def arms_table(arms: Iterable[Arm]) -> tuple[str, Rows]:
    """Return a sentence with the facts that all choices share, and a table with the others, one row per choice.

    A fact that differs between variants has its values in their order. Options and arguments that have their defaults
    are left out, defaults of a family are not.
    """
    built = [(arm, _columns(arm)) for arm in arms]
    names = list(dict.fromkeys(name for _, texts in built for name in texts))
    values = {name: [(arm.choice, arm.variant, texts.get(name, "")) for arm, texts in built] for name in names}
    differ = [
        name for name in names if len({cell[1:] for cell in values[name]}) > len({arm.variant for arm, _ in built})
    ]

    def text(name: str, choice: str | None = None) -> str:
        return ", ".join(dict.fromkeys(value for of, _, value in values[name] if value and choice in (None, of)))

    rows = [
        (choice, *(text(name, choice) for name in differ)) for choice in dict.fromkeys(arm.choice for arm, _ in built)
    ]
    shared = ", ".join(f"{name} {text(name)}" for name in names if name not in differ and text(name))
    return shared, [("choice", *differ), *rows]


def read_arms(table: Path) -> list[Arm]:
    """Read the arms of a table of scores, from the file beside it; an absent file has none."""
    return read_records(_file(table), Arm)


def write_arms(table: Path, arms: Iterable[Arm]) -> Path:
    """Write the arms of a table of scores, completely or not at all; returns the file."""
    return write_text(_file(table), csv_of_records(Arm, arms))


def _file(table: Path) -> Path:
    return table.with_name(f"{table.stem}_arms.csv")
