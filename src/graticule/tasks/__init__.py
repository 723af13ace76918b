"""What a backbone is trained for, on Lightning's Trainer."""

from graticule.tasks.build import build_data, build_model
from graticule.tasks.checkpoints import Interrupted, Preempted
from graticule.tasks.classification import Classification
from graticule.tasks.distillation import Distillation
from graticule.tasks.evaluate import Score, check_sizes, evaluate, set_windows
from graticule.tasks.recipe import Mixing, Recipe
from graticule.tasks.run import Run
from graticule.tasks.training import train

__all__ = [
    "Classification",
    "Distillation",
    "Interrupted",
    "Mixing",
    "Preempted",
    "Recipe",
    "Run",
    "Score",
    "build_data",
    "build_model",
    "check_sizes",
    "evaluate",
    "set_windows",
    "train",
]
