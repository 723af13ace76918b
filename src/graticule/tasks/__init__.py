"""What a backbone is trained for, on Lightning's Trainer."""

from graticule.tasks.build import build_data, build_model, data_sizes, read_recipe
from graticule.tasks.checkpoints import Interrupted, Preempted
from graticule.tasks.classification import Classification
from graticule.tasks.distillation import Distillation
from graticule.tasks.evaluate import Score, check_sizes, evaluate, set_windows
from graticule.tasks.evaluate_text import TextScore, check_lengths, evaluate_text
from graticule.tasks.language import LanguageModeling
from graticule.tasks.recipe import Mixing, Recipe
from graticule.tasks.run import Run
from graticule.tasks.text_recipe import TextRecipe
from graticule.tasks.training import train
from graticule.tasks.training_recipe import TrainingRecipe

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
