"""`graticule identify`."""

from __future__ import annotations

import dataclasses
from types import FunctionType

from graticule.lab.commands.declared import IdentifyCommand
from graticule.lab.training.opening import create_named, open_module, source_kind
from graticule.position.places import by
from graticule.testing.identify import identify
from graticule.testing.tables import PositionCode


def run(options: IdentifyCommand) -> int:
    """Name the encoding that equals position code, or the nearest one."""
    named = source_kind(options.target) == "name"
    code = create_named(options.target) if named else open_module(options.target, PositionCode, FunctionType)
    identity = identify(code, options.channels)
    grids = ", ".join(map(by, identity.grids))
    if identity.encoding is not None:
        options.say(f"{identity.encoding} on {identity.grid}")
        options.say(*(f"{preset}, a preset, has the same values" for preset in identity.presets))
        options.say(f"largest difference in float64: {identity.difference:.1e}, on {grids} patches")
    else:
        options.say("no encoding has the same values")
        if identity.nearest is not None:
            options.say(
                f"nearest: {identity.nearest} on {identity.grid}, {identity.difference:.2g} off on {grids} patches"
            )
    options.say(*(f"note: {note}" for note in identity.notes))
    options.finish({"target": options.target, **dataclasses.asdict(identity)})
    return int(identity.encoding is None)
