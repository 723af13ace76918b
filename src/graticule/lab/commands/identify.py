"""`graticule identify`."""

from __future__ import annotations

import dataclasses
from types import FunctionType

from graticule.lab.commands.declared import IdentifyCommand
from graticule.lab.training.opening import create_named, open_module, source_kind
from graticule.system.tables import format_table
from graticule.testing.identify import identify
from graticule.testing.tables import PositionCode


def run(options: IdentifyCommand) -> int:
    """Name the encoding that equals position code, or the nearest one."""
    named = source_kind(options.target) == "name"
    code = create_named(options.target) if named else open_module(options.target, PositionCode, FunctionType)
    identity = identify(code, options.channels)
    options.say(format_table(identity.summary(), identity.left))
    options.finish({"target": options.target, **dataclasses.asdict(identity)})
    return int(identity.encoding is None)
