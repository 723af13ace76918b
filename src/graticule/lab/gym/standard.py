"""Default choices of a profile: every encoding, and absolute ones also with LaPE."""

from __future__ import annotations

from graticule.encodings.forms.mixing import TokenMixing
from graticule.position.position import ENCODINGS

#: A gated MLP about as small as the default model, for the encodings that mix tokens.
_GATED = "model=gmlp_nano_patch4_28,model_kwargs=embed_dim=32 num_blocks=2"


def standard_choices() -> list[str]:
    """Return the texts of the choices, as on the command line.

    They are every registered encoding by itself, absolute ones also joined by LaPE, and, as a control, a learnable
    table that starts with the amplitude that LaPE's norm gives it.
    """
    alone = [name for name, kind in ENCODINGS.items() if not issubclass(kind, TokenMixing)]
    mixing = [name for name, kind in ENCODINGS.items() if issubclass(kind, TokenMixing)]
    absolute = [name for name in alone if ENCODINGS[name].joined == "table"]
    ordered = ["none", *absolute, *(name for name in alone if name != "none" and name not in absolute)]
    found = []
    for name in ordered:
        found.append(f"encoding={name}")
        if name == "learnable":
            found.append("encoding=learnable(std=1)")
        if name in absolute:
            found.append(f"encoding={name},joining=lape")
    return [*found, *(f"encoding={name},{_GATED}" for name in mixing)]
