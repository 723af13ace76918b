"""Checks that options and commands match the task of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


def check_task_options(task: str, **given: Any) -> None:
    """Check that no option of the evaluation of another task is given.

    Raises:
        ValueError: naming the option, and the options of the task.
    """
    from graticule.training import list_tasks

    tasks = list_tasks()
    options = {name: [field.name for field in dataclasses.fields(tasks[name].evaluation)] for name in tasks}
    known = options[task]
    for name, values in given.items():
        if values and name not in known:
            others = [other for other, names in options.items() if name in names]
            has = f"has {' and '.join(f'--{option}' for option in known)}" if known else "has no such options"
            shown = " ".join(map(str, values)) if isinstance(values, list) else values
            raise ValueError(
                f"`{name}` must be left out with the task {task}, which {has}, got {shown}; --{name} is for "
                f"{' and '.join(others)}."
            )


def check_on_images(runs: Sequence[Any], command: str) -> None:
    """Check that all runs are on images.

    Raises:
        ValueError: for the first that is not, naming the commands that accept it.
    """
    for run in runs:
        if run.task().inputs != "images":
            raise ValueError(
                f"`runs` must be on images, which graticule {command} draws, got {str(run.folder)!r}, which is on "
                f"{run.task().inputs}; for text there are graticule evaluate RUN --lengths 128 512, graticule "
                "correlations RUN and graticule generate RUN; for detection and segmentation, graticule evaluate RUN "
                "and graticule predict RUN."
            )
