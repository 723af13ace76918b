"""`graticule models`."""

from __future__ import annotations

import difflib
import fnmatch
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import graticule
from graticule import dense
from graticule.lab import data, studies, tasks, training
from graticule.lab.arguments import Positional
from graticule.lab.commands.options import JsonOutput
from graticule.lab.recipes.load import list_recipes
from graticule.lab.tasks.options import TextRecipe
from graticule.registry.checks import search_names


@dataclass
class ModelsOptions(JsonOutput):
    """List all names that options accept, the sizes of models, or which models take which encodings.

        graticule models
        graticule models "deit_*"
        graticule models lape
        graticule models --matrix
        graticule models pvt_tiny --matrix

    Multiply-adds count matrix products and convolutions for one image. PosMLP's paper counts the logits of GGQPE
    for each pair of patches as well, 0.12 G in T, S and B; here they are computed per displacement.
    A cell of the matrix lists the joinings, abbreviated; a dash marks an encoding that is refused with all of them,
    and --json has the reasons.
    Methods and models that --plugin FILE.py registers are included.
    """

    patterns: Positional[list[str]] = field(default_factory=list)
    """words or patterns, as in a shell, such as lape or "deit_*": names that match, with the sizes of models (default:
    the names of all; for a matrix, one of each family)"""
    matrix: bool = False
    """print the supported combinations of models, encodings and joinings"""


def run(options: ModelsOptions) -> int:
    """List the names that options accept, or print the sizes of models, or the matrix."""
    if options.matrix:
        return _print_matrix(options)
    if options.patterns:
        return _print_matches(options)
    names = list_names()
    options.finish(names)
    _print_names(options, names)
    return 0


def _print_names(options: ModelsOptions, names: Mapping[str, Any]) -> None:
    for title, group in names.items():
        lines = [f"  {name}  {about}" for name, about in group.items()] if isinstance(group, Mapping) else []
        options.say(
            f"{title}:", *(lines or textwrap.wrap(", ".join(group), 78, initial_indent="  ", subsequent_indent="  "))
        )


def list_names() -> dict[str, Any]:
    """Return title -> the names that options accept; the recipes with a line about each."""
    from graticule.encodings.build import list_decompositions, list_encodings, list_joinings
    from graticule.lab.data.sets.texts import TEXTS
    from graticule.position.resampling import RESAMPLERS

    return {
        "models": graticule.list_models(),
        "language models": graticule.list_language_models(),
        "encodings": list_encodings(),
        "defaults of families": studies.family_defaults(),
        "joinings": list_joinings(),
        "decompositions of LaPE's norm": list(list_decompositions()),
        "resamplers": list(RESAMPLERS),
        "tasks": sorted(training.list_tasks()),
        "necks": list(dense.NECKS),
        "heads of detectors": list(dense.HEADS),
        "decoders of segmentation": list(dense.DECODERS),
        "data sets": list(data.list_datasets()),
        "texts": list(TEXTS),
        "recipes": dict(list_recipes()),
    }


def _print_matches(options: ModelsOptions) -> int:
    """Print the sizes of matching models, which are built without memory for their weights, and all other matches."""
    listed = list_names().items()
    groups = {title: group if isinstance(group, Mapping) else dict.fromkeys(group, "") for title, group in listed}
    for pattern in options.patterns:
        if not any(_find(pattern, group) for group in groups.values()):
            match_names([pattern], [*groups["models"], *groups["language models"]])  # it raises an error with a hint
    matches = {title: _find_all(options.patterns, group) for title, group in groups.items()}
    backbones, language_models = (matches.pop(title) for title in ("models", "language models"))
    records: dict[str, Any] = {}
    for measure, kind in ((measure_backbone, backbones), (measure_language_model, language_models)):
        if sizes := {name: measure(name) for name in kind}:
            cells = [[name, *(_format_size(key, value) for key, value in size.items())] for name, size in sizes.items()]
            columns = [key.replace("_", "-") for key in next(iter(sizes.values()))]
            options.print_table(["model", *columns], *cells)
            records |= sizes
    matches = {title: names for title, names in matches.items() if names}
    _print_names(options, matches)
    return options.finish(records | matches)


def _find_all(patterns: Sequence[str], names: Mapping[str, str]) -> Mapping[str, str] | list[str]:
    """Return the names that match one of the patterns, with their descriptions if they have some."""
    matching = {name: names[name] for pattern in patterns for name in _find(pattern, names)}
    return matching if any(matching.values()) else list(matching)


def _find(pattern: str, names: Mapping[str, str]) -> list[str]:
    """Return the names that match a pattern, or the name of a model; for a word, those that have it, as in a search."""
    is_word = not any(wildcard in pattern for wildcard in "*?[") and pattern not in graticule.list_models()
    return search_names(pattern, names) if is_word else fnmatch.filter(names, pattern)


def _format_size(key: str, value: Any) -> str:
    if key == "parameters":
        return f"{value / 1e6:.2f} M"
    if key == "multiply_adds":
        return tasks.show_multiply_adds(value)
    cross = "x" if key in ("image", "patches") else "-"
    return cross.join(map(str, value)) if isinstance(value, list) else str(value)


def match_names(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that match one of the patterns at least; each pattern must match one."""
    matches: list[str] = []
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            text = pattern.strip("*")
            begins = {name[: len(text) + 1]: f"{name[: len(text) + 1]}*" for name in names}  # names end in sizes
            near = [begins[begin] for begin in difflib.get_close_matches(text, begins, n=3)]
            hint = f"did you mean {' or '.join(near)}?" if near else "graticule models lists all."
            raise ValueError(f"`patterns` must match a name, got {pattern!r}; {hint}")
        matches += matching
    return list(dict.fromkeys(matches))


def measure_backbone(name: str) -> dict[str, Any]:
    """Measure a backbone for images of its own size, on the meta device."""
    import torch

    with torch.device("meta"):
        model = graticule.create_model(name).eval()
        image = torch.empty(1, model.pretrained_cfg["input_size"][0], *model.img_size)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "multiply_adds": training.count_multiply_adds(model, image),
        "dim": list(model.embed_dims),
        "layers": list(model.depths),
        "image": list(model.img_size),
        "patches": list(model.grid.shape),
    }


def measure_language_model(name: str) -> dict[str, Any]:
    """Measure a language model with bytes as tokens and the context of the default recipe, on the meta device."""
    import torch

    tokens = data.ByteTokenizer().vocab_size
    with torch.device("meta"):
        model = graticule.create_language_model(name, tokens, context=TextRecipe.context)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "dim": model.embed_dim,
        "layers": len(model.blocks),
        "tokens": tokens,
        "context": TextRecipe.context,
    }


def _print_matrix(options: ModelsOptions) -> int:
    names = match_names(options.patterns, graticule.list_models())
    models = {name: graticule.create_model(name) for name in names} or studies.families()
    reasons = studies.combinations(models)
    options.print_table(("encoding", *models), *studies.rows(reasons))
    options.say("", ", ".join(f"{letters} = {joining}" for joining, letters in studies.initials().items()))
    return options.finish(
        [
            {"model": model, "encoding": encoding, "joining": joining, "refused": reason or None}
            for (model, encoding, joining), reason in reasons.items()
        ]
    )
