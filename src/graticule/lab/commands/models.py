"""`graticule models`."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graticule.lab.arguments import Positional
from graticule.lab.commands.options import Output, parse
from graticule.lab.tasks.parts.image_evaluation import show_multiply_adds

if TYPE_CHECKING:
    from graticule.lab.studies.catalog import LanguageSize, Size


@dataclass
class Models:
    """List the models with their sizes, and the valid names of a recipe's options.

    graticule models
    graticule models "deit_*"
    """

    pattern: Positional[str] = "*"
    """pattern of names, as in a shell: deit_* or lm_*"""
    json: bool = False
    """print all their properties as JSON, and nothing else, on stdout"""


def run(arguments: list[str]) -> int:
    """List the models with their sizes, and the valid names of options."""
    options = parse(Models, "models", arguments)
    from graticule.lab.recipes.load import list_recipes
    from graticule.lab.studies.catalog import catalog

    known = catalog()
    backbones = fnmatch.filter(known["models"], options.pattern)
    language_models = fnmatch.filter(known["language_models"], options.pattern)
    if not backbones and not language_models:
        names = [*known["models"], *known["language_models"]]
        wanted = options.pattern.strip("*")
        begins = {name[: len(wanted) + 1]: f"{name[: len(wanted) + 1]}*" for name in names}  # names end in sizes
        near = [begins[begin] for begin in difflib.get_close_matches(wanted, begins, n=3)]
        hint = f"did you mean {' or '.join(near)}?" if near else "graticule models lists all."
        raise ValueError(f"`pattern` must match a model, got {options.pattern!r}; {hint}")
    recipes = list_recipes()
    output = Output(options.json)
    output.give(
        {
            **known,
            "models": {name: known["models"][name] for name in backbones},
            "language_models": {name: known["language_models"][name] for name in language_models},
            "recipes": dict(recipes),
        }
    )
    if backbones:
        columns = ("model", "parameters", "multiply-adds", "dim", "layers", "image", "patches")
        output.table(columns, [_backbone(name, known["models"][name]) for name in backbones])
        output.say("")
    if language_models:
        of_language = ("language model", "parameters", "dim", "layers", "tokens", "context")
        output.table(of_language, [_language_model(name, known["language_models"][name]) for name in language_models])
        output.say("")
    output.say(
        f"encodings       {', '.join(known['encodings'])} (several: learnable+peg)",
        f"joinings        {', '.join(known['joinings'])}",
        f"decompositions  {', '.join(known['decompositions'])} (of LaPE's norm)",
        f"resamplers      {', '.join(known['resamplers'])} (of tables for other grids)",
        f"tasks           {', '.join(known['tasks'])}",
        f"necks           {', '.join(known['necks'])} (for detection and segmentation)",
        f"heads           {', '.join(known['heads'])} (for detection)",
        f"decoders        {', '.join(known['decoders'])} (for segmentation)",
        f"data sets       {', '.join(known['datasets'])}",
        f"texts           {', '.join(known['texts'])}",
        f"tokenizers      {', '.join(known['tokenizers'])} (or the file of a saved one)",
        "recipes",
        *(f"  {name:{max(map(len, recipes))}}  {about}" for name, about in recipes.items()),
    )
    return 0


def _backbone(name: str, size: Size) -> list[str]:
    """Return the row of a backbone for images, at its own size."""
    cost = show_multiply_adds(size["multiply_adds"])
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
