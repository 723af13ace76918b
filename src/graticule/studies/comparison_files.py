"""Files of a comparison: Markdown, CSV, LaTeX, a figure, and JSON with everything needed to repeat it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from graticule.analysis import save_figures, score_plot
from graticule.files import write_json, write_text
from graticule.studies.comparison import Comparison
from graticule.studies.latex import latex_table
from graticule.studies.study_table import csv_text, origin
from graticule.training import TrainingRecipe
from graticule.training.surroundings import surroundings


def write_comparison(
    comparison: Comparison, recipes: Mapping[str, TrainingRecipe], folder: Path, command: str = ""
) -> list[Path]:
    """Write `comparison.md`, .csv, .tex, .png, .pdf, .svg and .json in `folder`; returns the paths."""
    verdict = "\n".join(comparison.verdict())
    return [
        write_text(folder / "comparison.md", f"{comparison.markdown()}\n\n{verdict}\n"),
        write_text(folder / "comparison.csv", csv_of(comparison, folder)),
        write_text(folder / "comparison.tex", latex_table(comparison.columns, comparison.rows())),
        *save_figures(score_plot(comparison.scores, comparison.metric.title), folder / "comparison"),
        write_json(folder / "comparison.json", _record(comparison, recipes, folder, command)),
    ]


def csv_of(comparison: Comparison, folder: Path) -> str:
    """Return one row per run: choice, seed, score, wall time in seconds, parameters, folder, and its origin."""
    records: list[dict[str, Any]] = []
    for name, scores in comparison.scores.items():
        seconds, runs = comparison.seconds[name], comparison.runs[name]
        for seed, score, wall, run in zip(comparison.seeds, scores, seconds, runs, strict=True):
            place = {"parameters": comparison.parameters[name], "folder": run.folder.relative_to(folder)}
            values = {comparison.metric.key: score, "seconds": f"{wall:.1f}", **place}
            records.append({"choice": name, "seed": seed, **values, **origin(run)})
    return csv_text(records, records[0])


def _record(
    comparison: Comparison, recipes: Mapping[str, TrainingRecipe], folder: Path, command: str
) -> dict[str, Any]:
    """Return the values needed to repeat a comparison, and its numbers."""
    values = {name: {k: v for k, v in recipe.to_dict().items() if k != "seed"} for name, recipe in recipes.items()}
    first, *others = values.values()
    common = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    return {
        "command": command,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "recipe": common,
        "choices": {name: {k: v for k, v in of.items() if k not in common} for name, of in values.items()},
        "seeds": list(comparison.seeds),
        "metric": dataclasses.asdict(comparison.metric),
        "examples": comparison.examples,
        comparison.metric.key: comparison.scores,
        "seconds": comparison.seconds,
        "parameters": comparison.parameters,
        "runs": {name: [str(run.folder.relative_to(folder)) for run in runs] for name, runs in comparison.runs.items()},
        **surroundings(),
    }
