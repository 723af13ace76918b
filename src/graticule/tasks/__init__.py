"""What a backbone is trained for, on Lightning's Trainer."""

from graticule.tasks.classification import Classification
from graticule.tasks.evaluate import Score, evaluate
from graticule.tasks.recipe import Mixing, Recipe
from graticule.tasks.run import Interrupted, Run, build_data, build_model, train

__all__ = [
    "Classification",
    "Interrupted",
    "Mixing",
    "Recipe",
    "Run",
    "Score",
    "build_data",
    "build_model",
    "evaluate",
    "train",
]
