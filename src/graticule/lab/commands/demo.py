"""`graticule demo`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from graticule.lab.commands.options import output_folder, parse
from graticule.registry.checks import printable


@dataclass
class Demo:
    """Train a small ViT on embedded digits with a table, LaPE, LaPE's amplitude alone and a PEG; write report.html.

    graticule demo
    graticule demo --quick --seeds 0
    """

    output: Path = Path("runs/demo")
    """folder of the runs and the report"""
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0, 1, 2, 3])
    """seeds, the same for all choices"""
    quick: bool = False
    """train a few steps on a few images, to check that everything works"""


def run(arguments: list[str]) -> int:
    """Train, evaluate and analyze on embedded digits."""
    options = parse(Demo, "demo", arguments)
    from graticule.lab.pages.demo import demo

    report = demo(output_folder(options.output, Demo.output), options.seeds, quick=options.quick)
    print(printable(f"wrote {report}; open it in a browser. The runs are beside it, in {options.output}"))
    return 0
