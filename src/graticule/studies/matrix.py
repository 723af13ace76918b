"""Tables for the docs, made from what is registered and from what can be built.

`python -m graticule.studies.matrix` prints docs/matrix.md: which family takes which encoding with which joining.
`python -m graticule.studies.matrix encodings` prints README's table of encodings.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import torch

from graticule.backbones import create_model
from graticule.encodings import (
    ENCODINGS,
    AbsoluteEncoding,
    BiasEncoding,
    ConvolutionalProjection,
    Peg,
    RotaryEncoding,
    TokenMixing,
)
from graticule.factory import list_encodings, list_joinings

#: A model of every family, as small as it can be and still have what makes the family.
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT, DeiT": ("vit_tiny_patch16_224", {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3}),
    "DeiT, distilled": (
        "deit_tiny_distilled_patch16_224",
        {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3},
    ),
    "CPVT, GAP": ("cpvt_tiny_gap_patch16_224", {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3}),
    "ViT-Lite": ("vit_lite_2_4_32", {"img_size": 8, "embed_dim": 24, "num_heads": 3}),
    "CVT": ("cvt_2_4_32", {"img_size": 8, "embed_dim": 24, "num_heads": 3}),
    "CCT": ("cct_2_3x2_32", {"img_size": 8, "embed_dim": 24, "num_heads": 3}),
    "T2T-ViT": ("t2t_vit_7", {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3, "token_dim": 8}),
    "CeiT": ("ceit_tiny_patch16_224", {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3}),
    "PVT": (
        "pvt_tiny",
        {"img_size": 16, "embed_dims": (8, 16), "depths": (2, 2), "num_heads": (1, 2), "sr_ratios": (2, 1)}
        | {"mlp_ratios": (2, 2)},
    ),
    "Swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "embed_dim": 12, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4},
    ),
    "gMLP": ("gmlp_s16_224", {"img_size": 32, "embed_dim": 16, "num_blocks": 2, "groups": 2}),
    "PosMLP": (
        "posmlp_tiny_224",
        {"img_size": 16, "embed_dim": 8, "depths": (2, 2), "windows": (2, 2), "groups": (2, 2), "mlp_ratios": (2, 2)},
    ),
}


def build(family: str, encoding: str | None = None, joining: str = "default", **kwargs: Any) -> Any:
    """Build the small model of `family`, with the encoding of the family's own if none is given.

    Raises:
        ValueError: if the family does not take the encoding, or the encoding not the joining.
    """
    name, sizes = SMALL[family]
    chosen: dict[str, Any] = {} if encoding is None else {"encoding": encoding}
    return create_model(name, **chosen, joining=joining, num_classes=5, **sizes, **kwargs)


def combinations() -> dict[tuple[str, str, str], str]:
    """Build all of them without memory: (family, encoding, joining) -> '' or the reason why it is refused."""
    found = {}
    for family in SMALL:
        for encoding in list_encodings():
            for joining in list_joinings():
                try:
                    with torch.device("meta"):
                        build(family, encoding, joining)
                    found[family, encoding, joining] = ""
                except ValueError as error:
                    found[family, encoding, joining] = str(error)
    return found


def table(found: dict[tuple[str, str, str], str]) -> str:
    """Write `combinations()` as Markdown: one row per encoding, one column per family, the joinings in each cell."""
    short = {"default": "d", "shared": "s", "unshared": "u", "lape_sharing": "ls", "lape": "l"}
    lines = [
        "# What goes with what",
        "",
        "Every family with every encoding alone and every joining, as they can be built: d default, s shared, u",
        "unshared, ls lape_sharing, l lape; - what is refused with a reason. Made by `python -m",
        "graticule.studies.matrix`; a test builds and runs each of them (`tests/test_matrix.py`). Several encodings at",
        "once (`learnable+relative_bias+peg`) go together where each does, with one absolute, one rotary and one",
        "mixing encoding at most.",
        "",
        f"| encoding | {' | '.join(SMALL)} |",
        f"| --- |{' --- |' * len(SMALL)}",
    ]
    for encoding in list_encodings():
        cells = [
            " ".join(short[joining] for joining in list_joinings() if not found[family, encoding, joining]) or "-"
            for family in SMALL
        ]
        lines.append(f"| `{encoding}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def encodings_table() -> str:
    """Write README's table of encodings: name and options, first line of the docstring, reference, file."""
    lines = ["| encoding | what it does | reference | file |", "| --- | --- | --- | --- |"]
    for name in sorted(list_encodings(), key=_kind):
        kind = ENCODINGS[name]
        options = ", ".join(f"{option}={each.default!r}" for option, each in ENCODINGS.options(name).items())
        about = (inspect.getdoc(kind) or "").partition("\n")[0]
        file = f"encodings/{kind.__module__.rpartition('.')[2]}.py"
        shown = f"`{name}({options})`" if options else f"`{name}`"
        lines.append(f"| {shown} | {about} | {_reference(kind)} | [{file}](src/graticule/{file}) |")
    return "\n".join(lines) + "\n"


def _kind(name: str) -> int:
    """What rows are sorted by: absolute, bias, rotary, from the tokens, token mixing, none."""
    kinds: tuple[Any, ...] = (
        AbsoluteEncoding,
        BiasEncoding,
        RotaryEncoding,
        (Peg, ConvolutionalProjection),
        TokenMixing,
    )
    return next((i for i, kind in enumerate(kinds) if issubclass(ENCODINGS[name], kind)), len(kinds))


def _reference(kind: type) -> str:
    """Return the first reference in the docstring of a class or of those it extends."""
    for each in kind.__mro__:
        text = " ".join((each.__doc__ or "").split())
        if found := re.search(r"Reference: (.*?\(.*?\d{4}\))", text):
            return found[1]
    return ""


if __name__ == "__main__":
    print(encodings_table() if sys.argv[1:] == ["encodings"] else table(combinations()), end="")
