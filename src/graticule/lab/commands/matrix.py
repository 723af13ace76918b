"""`graticule matrix`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from graticule.lab.arguments import Positional
from graticule.lab.commands.options import Output, parse
from graticule.registry.checks import known_name


@dataclass
class Matrix:
    """Print the supported combinations of models, encodings and joinings.

        graticule matrix
        graticule matrix swin_tiny_patch4_window7_224 vit_tiny_patch16_224
        graticule matrix pvt_tiny --encodings rope "shaw(clip=4)" --reasons

    A cell lists the joinings, abbreviated; a dash marks an encoding that is refused with all of them. Methods and
    models that --plugin FILE.py registers are included.
    """

    models: Positional[list[str]] = dataclasses.field(default_factory=list)
    """models (default: a small one of each family, and those of plugins)"""
    encodings: list[str] = dataclasses.field(default_factory=list)
    """encodings, with options (default: every one)"""
    reasons: bool = False
    """also print the reason why a combination is refused"""
    json: bool = False
    """print the combinations, with the reason for each refusal, as JSON, and nothing else, on stdout"""


def run(arguments: list[str]) -> int:
    """Print the supported combinations of models, encodings and joinings."""
    options = parse(Matrix, "matrix", arguments)
    if len(set(options.models)) < len(options.models):
        raise ValueError(f"`models` must differ, got {' '.join(options.models)}.")
    from graticule.backbones.registry import create_model, list_models
    from graticule.lab.studies.matrix import combinations, families, initials, rows
    from graticule.position.position import ENCODINGS

    for encoding in options.encodings:
        ENCODINGS.specs(encoding)
    for name in options.models:
        known_name("models", name, list_models())
    models = {name: create_model(name) for name in options.models} or families()
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
