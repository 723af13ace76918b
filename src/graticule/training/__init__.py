"""The engine that trains any task: recipe, run folder, loop, checkpoints and devices, on Lightning's Trainer.

Names are imported when they are first used: recipes and tasks can be declared without loading PyTorch.
"""

from typing import TYPE_CHECKING

from graticule.lazy import lazy_names

if TYPE_CHECKING:
    from graticule.training.evaluation import Evaluated, Evaluation, HeldOut, HeldOutEvaluation, Table
    from graticule.training.interruption import Interrupted, Preempted
    from graticule.training.loop import train
    from graticule.training.opening import load
    from graticule.training.recipe import TrainingRecipe
    from graticule.training.run import Run
    from graticule.training.task import Task, build_data, build_model, list_tasks, read_recipe, register_task, task_of

__all__ = [
    "Evaluated",
    "Evaluation",
    "HeldOut",
    "HeldOutEvaluation",
    "Interrupted",
    "Preempted",
    "Run",
    "Table",
    "Task",
    "TrainingRecipe",
    "build_data",
    "build_model",
    "list_tasks",
    "load",
    "read_recipe",
    "register_task",
    "task_of",
    "train",
]

_HOMES = {
    "Evaluated": "evaluation",
    "Evaluation": "evaluation",
    "HeldOut": "evaluation",
    "HeldOutEvaluation": "evaluation",
    "Interrupted": "interruption",
    "Preempted": "interruption",
    "Run": "run",
    "Table": "evaluation",
    "Task": "task",
    "TrainingRecipe": "recipe",
    "build_data": "task",
    "build_model": "task",
    "list_tasks": "task",
    "load": "opening",
    "read_recipe": "task",
    "register_task": "task",
    "task_of": "task",
    "train": "loop",
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
