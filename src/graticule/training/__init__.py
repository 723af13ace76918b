"""The engine that trains a task: recipe, run folder, loop, checkpoints and devices, on Lightning's Trainer."""

import graticule.tasks  # noqa: F401 - first, until the engine names no task
