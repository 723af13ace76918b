"""Tables for the docs, made from the registries and by building models.

`python -m graticule.lab.studies.matrix` writes docs/matrix.md, the combinations of families, encodings and
joinings; the table of docs/encodings.md; and README's table of choices.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from graticule.backbones.language import list_language_models
from graticule.backbones.registry import FAMILIES, create_model, list_models, list_small_models
from graticule.encodings.build import build_position, list_encodings, list_joinings
from graticule.encodings.forms.absolute import AbsoluteEncoding
from graticule.encodings.forms.bias import BiasEncoding
from graticule.encodings.forms.mixing import TokenMixing
from graticule.encodings.forms.rotary import RotaryEncoding
from graticule.hub.config import take_position
from graticule.position.grid import Grid
from graticule.position.position import ENCODINGS, Encoding


def build(family: str, encoding: str | None = None, joining: str = "default", **kwargs: Any) -> Any:
    """Build the small model of `family`, with the family's own encoding if none is given.

    Raises:
        ValueError: if the family does not take the encoding, or the encoding does not take the joining.
    """
    name, sizes = FAMILIES[family]
    chosen: dict[str, Any] = {} if encoding is None else {"encoding": encoding}
    return create_model(name, joining=joining, num_classes=5, **{**sizes, **chosen, **kwargs})


def families() -> dict[str, Any]:
    """Build the small model of each family, and a model of each class of a plugin."""
    return {family: create_model(name, **sizes) for family, (name, sizes) in list_small_models().items()}


def combinations(
    models: Mapping[str, Any] | None = None, encodings: Sequence[str] | None = None
) -> dict[tuple[str, str, str], str]:
    """Build the position of all combinations: (family, encoding, joining) -> '' or the reason why it is refused.

    Args:
        models: models by name, whose positions are replaced; by default `families()`.
        encodings: names with options; by default every name.
    """
    found = {}
    models = families() if models is None else models
    for encoding, joining in product(_ordered() if encodings is None else encodings, list_joinings()):
        alone = _refusal(build_position, Grid(2, 2), dim=24, depth=2, num_heads=2, encoding=encoding, joining=joining)
        for family, model in models.items():
            chosen = take_position({"encoding": encoding, "joining": joining}, defaults=model.encoding_options)
            found[family, encoding, joining] = alone or _refusal(model.replace_position, chosen)
    return found


def _refusal(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the reason why a function refuses its arguments; '' if it accepts them."""
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return ""


def table(found: dict[tuple[str, str, str], str]) -> str:
    """Write `combinations()` as Markdown: one row per encoding, one column per family, the joinings in each cell."""
    short, named = initials(), dict.fromkeys(case[0] for case in found)
    legend = ", ".join(f"{letters} = {name}" for name, letters in short.items())
    lines = [
        "# Compatibility",
        "",
        f"Every family with every encoding alone and every joining: {legend}.",
        "A dash marks what is refused, with a reason. Several encodings together (`learnable+relative_bias+peg`) are",
        "allowed where each is, with at most one absolute, one rotary and one mixing encoding. Written by",
        "`python -m graticule.lab.studies.matrix`; `tests/lab/studies/test_matrix.py` compares.",
        "",
        f"| encoding | {' | '.join(named)} |",
        f"| --- |{' --- |' * len(named)}",
    ]
    lines += [f"| `{encoding}` | {' | '.join(cells)} |" for encoding, *cells in rows(found)]
    return "\n".join(lines) + "\n"


def rows(found: Mapping[tuple[str, str, str], str]) -> list[list[str]]:
    """Return one row per encoding: its name, and the initials of the joinings that it can have in each family."""
    short = initials()
    named, encodings = (list(dict.fromkeys(case[at] for case in found)) for at in (0, 1))
    return [
        [
            encoding,
            *(
                " ".join(letters for joining, letters in short.items() if not found[family, encoding, joining]) or "-"
                for family in named
            ),
        ]
        for encoding in encodings
    ]


#: Name of each group of encodings in the tables, their base class, and a description.
GROUPS: tuple[tuple[str, type, str], ...] = (
    ("absolute", AbsoluteEncoding, "one vector per token, which a joining brings to the layers"),
    ("bias", BiasEncoding, "a number per pair of tokens, added to the logits of attention"),
    ("rotary", RotaryEncoding, "rotates queries and keys by their positions"),
    ("token mixing", TokenMixing, "the weights by which a gated MLP or a mixer mixes tokens"),
    ("other", Encoding, "convolutions of the tokens, a scale of the queries, or nothing"),
)


def encodings_table() -> str:
    """Return the table of encodings: name and options, first line of the docstring, reference, file."""
    lines = ["| encoding | what it does | reference | file |", "| --- | --- | --- | --- |"]
    for name in _ordered():
        kind = ENCODINGS[name]
        options = ", ".join(f"{option}={each.default!r}" for option, each in kind.option_types().items())
        file = f"{kind.__module__.removeprefix('graticule.').replace('.', '/')}.py"
        shown = f"`{name}({options})`" if options else f"`{name}`"
        lines.append(f"| {shown} | {summary(kind)} | {reference(kind)} | [{file}](../src/graticule/{file}) |")
    return "\n".join(lines) + "\n"


def choices_table() -> str:
    """Return README's table of choices: the names of encodings by group, of joinings, and of families."""
    lines = ["| choice | what it is | names |", "| --- | --- | --- |"]
    for group, _, about in GROUPS:
        names = [name for name in _ordered() if group_of(name) == group]
        lines.append(f"| `encoding`: {group} | {about} | {_code(names)} |")
    lines.append(f"| `joining` | how an absolute encoding reaches each layer | {_code(list_joinings())} |")
    families = ", ".join(dict.fromkeys(family.partition(", ")[0] for family in list_small_models()))
    about = f"{len(list_models())} models in these families, and {len(list_language_models())} language models"
    lines.append(f"| `model` | {about} | {families} |")
    return "\n".join(lines) + "\n"


def group_of(name: str) -> str:
    """Return the name of the group of an encoding, a key of `GROUPS`."""
    return next(group for group, base, _ in GROUPS if issubclass(ENCODINGS[name], base))


def summary(kind: type) -> str:
    """Return the first line of the docstring of a class."""
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _ordered() -> list[str]:
    """List the encodings by group, then by name; `none` is the last."""
    groups = [group for group, _, _ in GROUPS]
    return sorted(list_encodings(), key=lambda name: (name == "none", groups.index(group_of(name)), name))


def initials() -> dict[str, str]:
    """Abbreviate the joinings for the matrix: lape_sharing -> ls; a second one with the same letters gets a number."""
    found: dict[str, str] = {}
    for name in list_joinings():
        letters = "".join(word[0] for word in name.split("_") if word)
        same = sum(re.fullmatch(rf"{letters}\d*", other) is not None for other in found.values())
        found[name] = f"{letters}{same + 1}" if same else letters
    return found


def reference(kind: type) -> str:
    """Return the first reference in the docstring of a class or of its base classes."""
    for each in kind.__mro__:
        text = " ".join((each.__doc__ or "").split())
        if found := re.search(r"Reference: (.*?\(.*?\d{4}\))", text):
            return found[1]
    return ""


def write_tables(root: Path) -> None:
    """Write all tables into the checkout of the repository at `root`."""
    (root / "docs" / "matrix.md").write_text(table(combinations()), encoding="utf-8")
    _replace_table(root / "docs" / "encodings.md", "## All encodings", encodings_table())
    _replace_table(root / "README.md", "## What can be chosen", choices_table())


def _replace_table(path: Path, heading: str, written: str) -> None:
    """Replace the first table after a heading of a page."""
    before, found, after = path.read_text(encoding="utf-8").partition(f"{heading}\n")
    if not found:
        raise ValueError(f"`path` must be a page with the heading {heading!r}, got {str(path)!r}.")
    path.write_text(
        before + found + re.sub(r"(^\|.*\n)+", lambda _: written, after, count=1, flags=re.M), encoding="utf-8"
    )


if __name__ == "__main__":
    write_tables(Path(__file__).parents[4])
