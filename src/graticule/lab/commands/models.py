"""`graticule models`."""

from __future__ import annotations

import difflib
import fnmatch
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graticule.lab.arguments import Positional
from graticule.lab.commands.options import JsonOutput, Output, parse


@dataclass
class Models(JsonOutput):
    """List all names that options accept, the sizes of models, or which models take which encodings.

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
    """names or patterns of names, as in a shell, whose sizes are printed: "deit_*" or "lm_*" (default: only the names
    of all; for a matrix, one of each family)"""
    matrix: bool = False
    """print the supported combinations of models, encodings and joinings"""
    encodings: list[str] = field(default_factory=list)
    """for a matrix: encodings, with options (default: every one)"""
    reasons: bool = False
    """for a matrix: also print the reason why a combination is refused"""


def run(arguments: list[str]) -> int:
    """List the names that options accept, or print the sizes of models, or the matrix."""
    options = parse(Models, "models", arguments)
    output = Output(options.json)
    if options.matrix:
        return _print_matrix(options, output)
    if options.encodings or options.reasons:
        raise ValueError("`encodings` and `reasons` must be left out without --matrix, got one of them.")
    if options.patterns:
        return _print_sizes(options.patterns, output)
    names = list_names()
    output.give(names)
    for title, group in names.items():
        lines = [f"  {name}  {about}" for name, about in group.items()] if isinstance(group, Mapping) else []
        output.say(
            f"{title}:", *(lines or textwrap.wrap(", ".join(group), 78, initial_indent="  ", subsequent_indent="  "))
        )
    return 0


def list_names() -> dict[str, Any]:
    """Return title -> the names that options accept; the recipes with a line about each."""
    from graticule.backbones.language import list_language_models
    from graticule.backbones.registry import list_models
    from graticule.dense.detector import HEADS
    from graticule.dense.features import NECKS
    from graticule.dense.segmentation import DECODERS
    from graticule.encodings.build import list_decompositions, list_encodings, list_joinings
    from graticule.lab.data.registry import list_datasets, list_texts
    from graticule.lab.recipes.load import list_recipes
    from graticule.lab.training.task import list_tasks
    from graticule.position.resampling import RESAMPLERS

    return {
        "models": list_models(),
        "language models": list_language_models(),
        "encodings": list_encodings(),
        "joinings": list_joinings(),
        "decompositions of LaPE's norm": list(list_decompositions()),
        "resamplers": list(RESAMPLERS),
        "tasks": list(list_tasks()),
        "necks": list(NECKS),
        "heads of detectors": list(HEADS),
        "decoders of segmentation": list(DECODERS),
        "data sets": list(list_datasets()),
        "texts": list(list_texts()),
        "recipes": dict(list_recipes()),
    }


def _print_sizes(patterns: Sequence[str], output: Output) -> int:
    """Print the sizes of the models of these names, which are built without memory for their weights."""
    from graticule.backbones.language import list_language_models
    from graticule.backbones.registry import list_models

    backbones, language_models = list_models(), list_language_models()
    names = match_names(patterns, [*backbones, *language_models])
    records: dict[str, Any] = {}
    for measure, kind in ((measure_backbone, backbones), (measure_language_model, language_models)):
        if sizes := {name: measure(name) for name in names if name in kind}:
            rows = [[name, *(_format_size(key, value) for key, value in size.items())] for name, size in sizes.items()]
            columns = [key.replace("_", "-") for key in next(iter(sizes.values()))]
            output.table(["model", *columns], rows)
            records |= sizes
    output.give(records)
    return 0


def _format_size(key: str, value: Any) -> str:
    """Format a measure of a model for the table."""
    from graticule.lab.tasks.parts.image_scores import show_multiply_adds

    if key == "parameters":
        return f"{value / 1e6:.2f} M"
    if key == "multiply_adds":
        return show_multiply_adds(value)
    return (
        ("x" if key in ("image", "patches") else "-").join(map(str, value)) if isinstance(value, list) else str(value)
    )


def match_names(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that match one of the patterns at least; each pattern must match one."""
    matches: list[str] = []
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            wanted = pattern.strip("*")
            begins = {name[: len(wanted) + 1]: f"{name[: len(wanted) + 1]}*" for name in names}  # names end in sizes
            near = [begins[begin] for begin in difflib.get_close_matches(wanted, begins, n=3)]
            hint = f"did you mean {' or '.join(near)}?" if near else "graticule models lists all."
            raise ValueError(f"`patterns` must match a model, got {pattern!r}; {hint}")
        matches += matching
    return list(dict.fromkeys(matches))


def measure_backbone(name: str) -> dict[str, Any]:
    """Measure a backbone for images of its own size, on the meta device."""
    import torch

    from graticule.backbones.registry import create_model
    from graticule.lab.training.cost import count_multiply_adds

    with torch.device("meta"):
        model = create_model(name).eval()
        image = torch.empty(1, model.pretrained_cfg["input_size"][0], *model.img_size)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "multiply_adds": count_multiply_adds(model, image),
        "dim": list(model.embed_dims),
        "layers": list(model.depths),
        "image": list(model.img_size),
        "patches": list(model.grid.shape),
    }


def measure_language_model(name: str) -> dict[str, Any]:
    """Measure a language model with bytes as tokens and the context of the default recipe, on the meta device."""
    import torch

    from graticule.backbones.language import create_language_model
    from graticule.lab.data.text_module import ByteTokenizer
    from graticule.lab.tasks.language import TextRecipe

    tokens = ByteTokenizer().vocab_size
    with torch.device("meta"):
        model = create_language_model(name, tokens, context=TextRecipe.context)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "dim": model.embed_dim,
        "layers": len(model.blocks),
        "tokens": tokens,
        "context": TextRecipe.context,
    }


def _print_matrix(options: Models, output: Output) -> int:
    """Print the supported combinations of models, encodings and joinings."""
    from graticule.backbones.registry import create_model, list_models
    from graticule.lab.studies.matrix import combinations, families, initials, rows
    from graticule.position.position import ENCODINGS

    for encoding in options.encodings:
        ENCODINGS.specs(encoding)
    models = {name: create_model(name) for name in match_names(options.patterns, list_models())} or families()
    reasons = combinations(models, options.encodings or None)
    output.table(("encoding", *models), rows(reasons))
    output.say("", ", ".join(f"{letters} = {joining}" for joining, letters in initials().items()))
    if options.reasons:
        output.say("", *(f"{', '.join(case)}: {reason}" for case, reason in reasons.items() if reason))
    output.give(
        [
            {"model": model, "encoding": encoding, "joining": joining, "refused": reason or None}
            for (model, encoding, joining), reason in reasons.items()
        ]
    )
    return 0
