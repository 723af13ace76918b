"""`graticule models`."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tyro

from graticule.commands.options import parse, print_table

if TYPE_CHECKING:
    from graticule.studies.catalog import LanguageSize, Size


@dataclass
class Models:
    """List the models with their sizes, and the names that a recipe's options can have."""

    pattern: tyro.conf.Positional[str] = "*"
    """names to list, as in a shell: deit_* or lm_*"""


def run(arguments: list[str]) -> int:
    """List the models with their sizes, and the names that options can have."""
    options = parse(Models, "models", arguments)
    from graticule.recipes import list_recipes
    from graticule.studies.catalog import catalog

    known = catalog()
    backbones = fnmatch.filter(known["models"], options.pattern)
    language_models = fnmatch.filter(known["language_models"], options.pattern)
    if not backbones and not language_models:
        every = ", ".join([*known["models"], *known["language_models"]])
        raise ValueError(f"no model is named like {options.pattern!r}; the models are {every}.")
    if backbones:
        columns = ("model", "parameters", "multiply-adds", "dim", "layers", "image", "patches")
        print_table(columns, [_backbone(name, known["models"][name]) for name in backbones])
        print()
    if language_models:
        of_language = ("language model", "parameters", "dim", "layers", "tokens", "context")
        print_table(of_language, [_language_model(name, known["language_models"][name]) for name in language_models])
        print()
    print(f"encodings       {', '.join(known['encodings'])} (several: learnable+peg)")
    print(f"joinings        {', '.join(known['joinings'])}")
    print(f"decompositions  {', '.join(known['decompositions'])} (of LaPE's norm)")
    print(f"data sets       {', '.join(known['datasets'])}")
    print(f"texts           {', '.join(known['texts'])}")
    print(f"tokenizers      {', '.join(known['tokenizers'])} (or the file of a saved one)")
    print("recipes")
    recipes = list_recipes()
    for name, about in recipes.items():
        print(f"  {name:{max(map(len, recipes))}}  {about}")
    return 0


def _backbone(name: str, size: Size) -> list[str]:
    """Return the row of a backbone for images, at its own size."""
    count = size["multiply_adds"]
    cost = f"{count / 1e9:.2f} G" if count >= 1e8 else f"{count / 1e6:.2f} M"
    shapes = (_joined(size["dim"], "-"), _joined(size["layers"], "-"), _joined(size["image"]), _joined(size["grid"]))
    return [name, _millions(size["parameters"]), cost, *shapes]


def _language_model(name: str, size: LanguageSize) -> list[str]:
    """Return the row of a language model, with bytes as tokens and the context of the default recipe."""
    numbers = (size["dim"], size["layers"], size["tokens"], size["context"])
    return [name, _millions(size["parameters"]), *map(str, numbers)]


def _joined(numbers: Sequence[int], separator: str = "x") -> str:
    return separator.join(map(str, numbers))


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:.2f} M"
