"""`graticule identify`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import FunctionType

from graticule import testing
from graticule.lab import training
from graticule.lab.arguments import Positional
from graticule.lab.commands.options import JsonOutput
from graticule.system.tables import format_table


@dataclass
class IdentifyOptions(JsonOutput):
    """Name the position encoding that equals code for a rotation, a table or a bias of attention.

        graticule identify my_model.py:rotate
        graticule identify timm:vit_small_patch16_dinov3

    FILE.py:NAME is a function `NAME(queries, grid)` that rotates queries (B, heads, N, channels) on a grid (height,
    width), or a function of a grid; or position code as for graticule check, a module of timm, transformers or
    diffusers, or a function that builds one of them. A name is certified in float64 on several grids, else the nearest
    encoding is shown with its difference, and the exit code is 1.
    """

    target: Positional[str]
    """FILE.py:NAME, a name of timm, or hf:OWNER/NAME"""
    channels: int = 64
    """channels of a head, for a function that rotates queries"""


def run(options: IdentifyOptions) -> int:
    """Name the encoding that equals position code, or the nearest one."""
    code = training.open_module(options.target, testing.PositionCode, FunctionType)
    identity = testing.identify(code, options.channels)
    options.say(format_table(identity.summary(), identity.left))
    options.finish({"target": options.target, **dataclasses.asdict(identity)})
    return int(identity.encoding is None)
