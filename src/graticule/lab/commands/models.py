"""`graticule models`."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graticule.lab.arguments import Positional
from graticule.lab.commands.options import JsonOutput, Output, check_names, parse
from graticule.lab.tasks.parts.image_evaluation import show_multiply_adds

if TYPE_CHECKING:
    from graticule.lab.studies.catalog import LanguageSize, Size


@dataclass
class Models(JsonOutput):
    """List the models with their sizes and the names of a recipe's options, or which models take which encodings.

        graticule models
        graticule models "deit_*"
        graticule models --matrix
        graticule models pvt_tiny --matrix --encodings rope "shaw(clip=4)" --reasons

    Multiply-adds are those of matrix products and convolutions for one image. PosMLP's paper counts the logits of GGQPE
    for each pair of patches as well, 0.12 G in T, S and B; here they are computed per displacement.
    A cell of the matrix lists the joinings, abbreviated; a dash marks an encoding that is refused with all of them.
    Methods and models that --plugin FILE.py registers are included.
    """

    patterns: Positional[list[str]] = field(default_factory=list)
    """names or patterns of names, as in a shell: "deit_*" or "lm_*" (default: all; for a matrix, one of each family)"""
    matrix: bool = False
    """print the supported combinations of models, encodings and joinings"""
    encodings: list[str] = field(default_factory=list)
    """for a matrix: encodings, with options (default: every one)"""
    reasons: bool = False
    """for a matrix: also print the reason why a combination is refused"""


def run(arguments: list[str]) -> int:
    """List the models with their sizes, and the valid names of options, or print the matrix."""
    options = parse(Models, "models", arguments)
    if options.matrix:
        return _matrix(options)
    if options.encodings or options.reasons:
        raise ValueError("`encodings` and `reasons` must be left out without --matrix, got one of them.")
    from graticule.lab.recipes.load import list_recipes
    from graticule.lab.studies.catalog import catalog

    known = catalog()
    chosen = _matching(options.patterns or ["*"], [*known["models"], *known["language_models"]])
    backbones = [name for name in known["models"] if name in chosen]
    language_models = [name for name in known["language_models"] if name in chosen]
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
        "recipes",
        *(f"  {name:{max(map(len, recipes))}}  {about}" for name, about in recipes.items()),
    )
    return 0


def _matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that match one of the patterns at least; each pattern must match one."""
    found: list[str] = []
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            wanted = pattern.strip("*")
            begins = {name[: len(wanted) + 1]: f"{name[: len(wanted) + 1]}*" for name in names}  # names end in sizes
            near = [begins[begin] for begin in difflib.get_close_matches(wanted, begins, n=3)]
            hint = f"did you mean {' or '.join(near)}?" if near else "graticule models lists all."
            raise ValueError(f"`patterns` must match a model, got {pattern!r}; {hint}")
        found += matching
    return list(dict.fromkeys(found))


def _matrix(options: Models) -> int:
    """Print the supported combinations of models, encodings and joinings."""
    for encoding in options.encodings:
        check_names(encoding=encoding)
    from graticule.backbones.registry import create_model, list_models
    from graticule.lab.studies.matrix import combinations, families, initials, rows
    from graticule.position.position import ENCODINGS

    for encoding in options.encodings:
        ENCODINGS.specs(encoding)
    models = {name: create_model(name) for name in _matching(options.patterns, list_models())} or families()
    found = combinations(models, options.encodings or None)
    output = Output(options.json)
    output.table(("encoding", *models), rows(found))
    output.say("", ", ".join(f"{letters} = {joining}" for joining, letters in initials().items()))
    if options.reasons:
        refused = {case: reason for case, reason in found.items() if reason}
        output.say("", *(f"{', '.join(case)}: {reason}" for case, reason in refused.items()))
    output.give(
        [
            {"model": model, "encoding": encoding, "joining": joining, "refused": reason or None}
            for (model, encoding, joining), reason in found.items()
        ]
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
