"""Combinations of families, encodings and joinings, each built, for `graticule matrix`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from graticule.backbones.registry import MODELS, create_model, list_small_models
from graticule.encodings.build import build_position, list_encodings, list_joinings
from graticule.encodings.forms.absolute import AbsoluteEncoding
from graticule.encodings.forms.bias import BiasEncoding
from graticule.encodings.forms.mixing import TokenMixing
from graticule.encodings.forms.rotary import RotaryEncoding
from graticule.hub.config import take_position
from graticule.position.grid import Grid
from graticule.position.position import ENCODINGS, Encoding
from graticule.registry.specs import Spec


def families() -> dict[str, Any]:
    """Build the small model of each family, and a model of each class of a plugin."""
    return {family: create_model(name, **sizes) for family, (name, sizes) in list_small_models().items()}


def family_defaults() -> dict[str, str]:
    """Return an encoding with the options whose defaults families change -> these families."""
    changed: dict[str, list[str]] = {}
    for family, (name, _) in list_small_models().items():
        for encoding, options in MODELS[name].kind.encoding_options.items():
            changed.setdefault(str(Spec(encoding, options)), []).append(family)
    return {text: ", ".join(names) for text, names in changed.items()}


def combinations(
    models: Mapping[str, Any] | None = None, encodings: Sequence[str] | None = None
) -> dict[tuple[str, str, str], str]:
    """Build the position of all combinations: (family, encoding, joining) -> '' or the reason why it is refused.

    Args:
        models: models by name, whose positions are replaced; by default `families()`.
        encodings: names with options; by default every name.
    """
    reasons = {}
    models = families() if models is None else models
    for encoding, joining in product(order_encodings() if encodings is None else encodings, list_joinings()):
        alone = _refusal(build_position, Grid(2, 2), dim=24, depth=2, num_heads=2, encoding=encoding, joining=joining)
        for family, model in models.items():
            chosen = take_position({"encoding": encoding, "joining": joining}, defaults=model.encoding_options)
            reasons[family, encoding, joining] = alone or _refusal(model.replace_position, chosen)
    return reasons


def _refusal(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the reason why a function refuses its arguments; '' if it accepts them."""
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return ""


def rows(reasons: Mapping[tuple[str, str, str], str]) -> list[list[str]]:
    """Return one row per encoding: its name, and the initials of the joinings that it can have in each family."""
    short = initials()
    table: dict[str, dict[str, list[str]]] = {}
    for (family, encoding, joining), reason in reasons.items():
        table.setdefault(encoding, {}).setdefault(family, []).extend([] if reason else [short[joining]])
    return [[encoding, *(" ".join(cell) or "-" for cell in cells.values())] for encoding, cells in table.items()]


#: Name of each group of encodings in the tables, their base class, and a description.
GROUPS: tuple[tuple[str, type, str], ...] = (
    ("absolute", AbsoluteEncoding, "one vector per token, which a joining brings to the layers"),
    ("bias", BiasEncoding, "a number per pair of tokens, added to the logits of attention"),
    ("rotary", RotaryEncoding, "rotates queries and keys by their positions"),
    ("token mixing", TokenMixing, "the weights by which a gated MLP or a mixer mixes tokens"),
    ("other", Encoding, "convolutions of the tokens, a scale of the queries, or nothing"),
)


def group_of(name: str) -> str:
    """Return the name of the group of an encoding, a key of `GROUPS`."""
    return next(group for group, base, _ in GROUPS if issubclass(ENCODINGS[name], base))


def order_encodings() -> list[str]:
    """List the encodings by group, then by name; `none` is the last."""
    groups = [group for group, _, _ in GROUPS]
    return sorted(list_encodings(), key=lambda name: (name == "none", groups.index(group_of(name)), name))


def initials() -> dict[str, str]:
    """Abbreviate the joinings for the matrix: lape_sharing -> ls; a second one with the same letters gets a number."""
    short: dict[str, str] = {}
    for name in list_joinings():
        letters = "".join(word[0] for word in name.split("_") if word)
        same = sum(re.fullmatch(rf"{letters}\d*", other) is not None for other in short.values())
        short[name] = f"{letters}{same + 1}" if same else letters
    return short
