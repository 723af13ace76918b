"""What a backbone is trained for, on Lightning's Trainer."""

from graticule.tasks.build import build_data, build_model, data_sizes, read_recipe
from graticule.tasks.classification import Classification
from graticule.tasks.distillation import Distillation
from graticule.tasks.evaluate import Score, check_sizes, evaluate, set_windows
from graticule.tasks.evaluate_text import TextScore, check_lengths, evaluate_text
from graticule.tasks.language import LanguageModeling
from graticule.tasks.recipe import Mixing, Recipe
from graticule.tasks.text_recipe import TextRecipe
from graticule.training.checkpoints import Interrupted, Preempted
from graticule.training.loop import train
from graticule.training.recipe import TrainingRecipe
from graticule.training.run import Run

__all__ = [
    "Classification",
    "Distillation",
    "Interrupted",
    "LanguageModeling",
    "Mixing",
    "Preempted",
    "Recipe",
    "Run",
    "Score",
    "TextRecipe",
    "TextScore",
    "TrainingRecipe",
    "build_data",
    "build_model",
    "check_lengths",
    "check_sizes",
    "data_sizes",
    "evaluate",
    "evaluate_text",
    "read_recipe",
    "set_windows",
    "train",
]
