"""A task from its name, and a table of all tasks."""

from __future__ import annotations

import inspect

from graticule.lab.gym.base import LEAST, TASKS, GymTask, Surface


def build_task(task: str, grid: tuple[int, int], surface: Surface = "plane") -> GymTask:
    """Build a task from its name with options, such as 'place' or 'place(density=0.5)'.

    Raises:
        ValueError: for an unknown name or option, or a value that the task refuses.
    """
    specs = TASKS.specs(task)
    if len(specs) > 1:
        raise ValueError(f"`tasks` must be single names, not combined, got {task!r}.")
    built: GymTask = TASKS[specs[0].name](grid, surface, **specs[0].options)
    return built


def task_rows() -> list[tuple[str, ...]]:
    """Return a header, and one row per task: its question, the knowledge it needs, its surfaces, and chance."""
    rows: list[tuple[str, ...]] = [("task", "question", "needs", "frame", "surfaces", "chance")]
    for name, kind in TASKS.items():
        surface: Surface = kind.surfaces[0]
        chance = build_task(name, (LEAST, LEAST), surface).answer.chance
        said = "0" if chance == 0 else f"1/{round(1 / chance)}"
        question = (inspect.getdoc(kind) or "").partition("\n")[0]
        rows.append((name, question, kind.knows, kind.frame, ", ".join(kind.surfaces), said))
    return rows
