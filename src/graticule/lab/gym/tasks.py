"""All tasks by name; importing this module registers the tasks of the package."""

from __future__ import annotations

from graticule.lab.gym import absolute, relative
from graticule.lab.gym import absolute as counting
from graticule.lab.gym import relative as pointing
from graticule.lab.gym.base import TASKS, GymTask, Surface

__all__ = ["TASKS", "absolute", "build_task", "counting", "pointing", "relative"]


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
