"""What the models of the studies are as built: docs/data/built.csv, a fact per row, and their texts on the pages."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from pandas import DataFrame
from torch import nn

from graticule.backbones.registry import MODELS
from graticule.hub.config import argument_defaults, tuples
from graticule.lab.studies.plan import check_choices, plan
from graticule.lab.training.recipe import TrainingRecipe
from graticule.position.joining import JOININGS
from graticule.position.places import by
from graticule.position.position import ENCODINGS
from graticule.registry.specs import Spec, parse_sum
from graticule.system.files import write_text

if TYPE_CHECKING:
    from evidence.studies import Study

#: Facts that are a name with options, or several.
REGISTRIES = {"encoding": ENCODINGS, "joining": JOININGS}
#: Types of the arguments of a model that are facts.
PLAIN = (bool, int, float, str, tuple)
#: Arguments that follow from the data or the pooling, or are other facts.
_OF_DATA = ("num_classes", "in_chans", "img_size", "depth", "depths", "class_token", "windows", *REGISTRIES)
#: Facts that no page prints.
_UNPRINTED = ("std", "values", "parameters")
Facts = dict[str, Any]


def facts_of(recipe: TrainingRecipe, model: nn.Module, images: int) -> Facts:
    """Return the facts of an untrained model, in the order of the pages.

    encoding, joining: with their options; `model`, its name, and each argument of the backbone that is a plain value.
    grid: of the first stage, in patches, and windows, within which tokens meet.
    layers: their number.
    std: standard deviation of the learned values for the grid (a table, bias or matrix, of all layers) of the first
        encoding that has some, and values, their number.
    images, epochs: per epoch, and in all; parameters: of the model.
    """
    backbone: Any = model.backbone if hasattr(model, "backbone") else model
    arguments = {**_defaults(backbone.created["name"]), **backbone.created["arguments"]}
    words = {"encoding": recipe.encoding or "learnable", "joining": recipe.joining, **backbone.created["arguments"]}
    grids = backbone.layer_grids(backbone.grid) if hasattr(backbone, "layer_grids") else []
    holders = [module for module in backbone.position.modules() if getattr(module, "resampled", False)]
    tables = [(type(module), table) for module in holders for table in module.parameters(False) if table.requires_grad]
    values = torch.cat([torch.zeros(0), *(table.flatten() for kind, table in tables if kind is tables[0][0])]).double()
    return {
        **{name: words[name] for name in REGISTRIES},
        "model": backbone.created["name"],
        **{key: tuples(value) for key, value in arguments.items() if isinstance(value, PLAIN) and key not in _OF_DATA},
        "grid": by(backbone.grid.shape),
        "windows": ", ".join(dict.fromkeys(by(at.within.shape) for at in grids if at.windows)),
        "layers": sum(getattr(backbone, "depths", ())) or len(backbone.blocks),
        "std": f"{values.std(correction=0).item():.4g}" if tables else "",
        "images": images,
        "epochs": recipe.epochs + recipe.cooldown_epochs,
        "values": len(values),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def differences(facts: Facts, expected: Mapping[str, Any]) -> list[str]:
    r"""Describe the facts that are not as expected; an option that `expected` does not name may have any value.

    A standard deviation of n values may be off by four standard errors of a normal's, :math:`4 \sigma / \sqrt{2n}`.
    """
    wrong = []
    for name, value in expected.items():
        built = facts.get(name, "")
        if name in REGISTRIES:
            wanted, parts = parse_sum(value), _specs(name, built)
            alike = [spec.name for spec in wanted] == [part.name for part in parts] and all(
                tuples(part.options.get(key)) == tuples(option)
                for spec, part in zip(wanted, parts, strict=True)
                for key, option in spec.options.items()
            )
        elif name == "std" and "" not in (built, value):
            alike = abs(float(built) - value) <= 4 * value / math.sqrt(2 * int(facts["values"]))
        else:
            alike = str(built) == str(value)
        if not alike:
            wrong.append(f"{name} {value}, got {built or 'none'}")
    return wrong


def _defaults(model: str) -> Mapping[str, Any]:
    """Return the arguments of a model by name, and their defaults."""
    size = MODELS.get(model)
    return {} if size is None else {**argument_defaults(size.kind), **size.arguments}


def _specs(name: str, text: str) -> list[Spec]:
    """Read an encoding or a joining; returns its parts with all their options."""
    options = REGISTRIES[name].options
    return [
        Spec(spec.name, {key: option.default for key, option in options(spec.name).items()} | dict(spec.options))
        for spec in parse_sum(text)
    ]


def _shown(facts: Facts) -> Facts:
    """Return facts without options and arguments that have their defaults."""
    usual, shown = _defaults(facts["model"]), dict(facts)
    for name, registry in REGISTRIES.items():
        parts = []
        for spec in _specs(name, facts[name]):
            known = registry.options(spec.name)
            parts.append(Spec(spec.name, {k: v for k, v in spec.options.items() if tuples(v) != known[k].default}))
        shown[name] = " + ".join(map(str, parts))
    return {name: value for name, value in shown.items() if name not in usual or value != tuples(usual[name])}


def read_built(folder: Path, study: str) -> dict[tuple[str, str], Facts]:
    """Return (choice, variant) -> its stored facts, as text."""
    rows = pd.read_csv(folder / "built.csv", dtype=str, keep_default_na=False)
    cells = rows[rows.study == study].groupby(["choice", "variant"], sort=False)
    return {cell: dict(zip(of.fact, of.value, strict=True)) for cell, of in cells}


def built_text(built: Mapping[tuple[str, str], Facts]) -> tuple[str, dict[str, str]]:
    """Return the facts that all choices share, or more than half of them, and choice -> the others.

    A fact that differs between variants has its values in their order.
    """
    names = [name for name in dict.fromkeys(key for facts in built.values() for key in facts) if name not in _UNPRINTED]
    variants = {variant for _, variant in built}
    pairs = {name: {(variant, facts.get(name, "")) for (_, variant), facts in built.items()} for name in names}
    differ = [name for name in names if len(pairs[name]) > len(variants)]

    def text(name: str, choice: str | None = None) -> str:
        values = [facts.get(name, "") for (of, _), facts in built.items() if choice in (None, of)]
        return ", ".join(filter(None, dict.fromkeys(values)))

    choices, texts, usual = list(dict.fromkeys(of for of, _ in built)), {}, {}
    for name in {*differ} - {*REGISTRIES}:
        counts = Counter(text(name, choice) for choice in choices)
        (most, count), *_ = counts.most_common()
        if most and 2 * count > len(choices) and "" not in counts:
            usual[name] = most
    for choice in choices:
        values = {name: text(name, choice) for name in differ}
        shown = {name: value for name, value in values.items() if value not in ("", "default", usual.get(name))}
        texts[choice] = ", ".join(value if name in REGISTRIES else f"{name} {value}" for name, value in shown.items())
    shared = ", ".join(
        f"{name} {text(name)}" for name in names if name not in differ and text(name) not in ("", "default")
    )
    others = ", ".join(f"{name} {usual[name]}" for name in names if name in usual)
    return shared + f"; {others} unless the row says otherwise" * bool(others), texts


def write_built(studies: Mapping[str, Study], data: Path, roots: Mapping[str, Path]) -> Path:
    """Build the models of all studies whose data are here, and store what they are; returns the file.

    Args:
        studies: by name.
        data: folder of the file.
        roots: `folder` of a study -> folder of its data set.
    """
    rows = []
    for name, study in studies.items():
        built, recipes = {}, study.recipes(data_root=roots.get(study.folder))

        def inspect(cell: str, model: nn.Module, images: int, built: Any = built, study: Study = study) -> None:
            built[study.cells[cell]] = _shown(facts_of(study.recipes()[cell], model, images))

        try:
            check_choices(plan(recipes, study.seeds[:1], data / "none"), inspect=inspect)
        except FileNotFoundError as error:
            print(f"{name} stays as it was: {error}", file=sys.stderr)
            built = read_built(data, name)
        rows += [(name, *cell, fact, str(value)) for cell, facts in built.items() for fact, value in facts.items()]
    table = DataFrame(rows, columns=["study", "choice", "variant", "fact", "value"])
    return write_text(data / "built.csv", table.to_csv(index=False, lineterminator="\n"))
