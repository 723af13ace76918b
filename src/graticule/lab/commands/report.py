"""`graticule report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.options import JsonOutput, Output, output_file, parse
from graticule.lab.commands.targets import find_run_folders, open_runs, run_labels
from graticule.registry.checks import Range


@dataclass
class ReportOptions(JsonOutput):
    """Write a page about runs, finished or not: results, tests, learning curves, recipes, and position in their layers.

        graticule report runs/a
        graticule report runs/compare-digits_quick --output comparison.html

    Runs whose recipes differ only in the seed are one choice; choices with the same seeds are tested against the first.
    """

    runs: Positional[list[Path]]
    """run folders, or folders of runs at any depth"""
    position: bool = True
    """draw the position information in the layers of the first run of each choice"""
    untrained: Rare[Annotated[int, Range(0)]] = 39
    """number of untrained models of the same shape against which the range over layers is tested; 0 for none"""
    output: Path | None = None
    """folder for report.html, or file NAME.html (default: the first folder)"""


def run(arguments: list[str]) -> int:
    """Write a page about runs."""
    options = parse(ReportOptions, "report", arguments)
    page = output_file(options.output, options.runs[0] / "report.html")
    output = Output(options.json)
    runs = open_runs(find_run_folders(options.runs, output))
    from graticule.lab.pages.run_report import run_report

    named = dict(zip(run_labels(runs), runs, strict=True))
    report = run_report(named, untrained=options.untrained, position=options.position)
    page = report.write(page)
    output.give({"report": page})
    output.wrote(page)
    return 0
