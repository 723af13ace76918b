"""Load a recipe by its name, or from a path."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from graticule.names import is_path, known_name
from graticule.plugins import call_file
from graticule.recipe_registry import RECIPES, RegisteredRecipe

if TYPE_CHECKING:
    from graticule.training import TrainingRecipe


def registered_recipes() -> dict[str, RegisteredRecipe]:
    """Return the recipes of the package and of plugins by their names, without importing PyTorch."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")
    return dict(sorted(RECIPES.items()))


def list_recipes() -> dict[str, str]:
    """List the recipes of the package and of plugins: name -> one line of description."""
    return {name: recipe.about for name, recipe in registered_recipes().items()}


def load_recipe(name: str) -> TrainingRecipe:
    """Load a recipe by its name, or from a path.

    A path contains a separator or ends in .py or .json: a Python file with a function `recipe()`, the folder of a run,
    or its recipe.json. Anything else is a name, even if a file or folder has that name.

    Raises:
        ValueError: for an unknown name, with the nearest ones, or a file that raises or is without `recipe()`.
        FileNotFoundError: for a path that does not exist.
    """
    if (Path(name).name == "recipe.json" or is_path(name)) and not name.endswith(".py"):
        from graticule.training import Run

        recipe: TrainingRecipe = Run.open(Path(name).parent if Path(name).name == "recipe.json" else name).recipe()
        return recipe
    made = _from_file(Path(name)) if name.endswith(".py") else _by_name(name)

    from graticule.training import TrainingRecipe

    if not isinstance(made, TrainingRecipe):
        raise ValueError(
            f"{name} must have a function `recipe()` that returns a recipe, such as graticule.Recipe, got none."
        )
    return made


def _by_name(name: str) -> object:
    recipes = registered_recipes()
    if name not in recipes and Path(name).is_dir():
        raise ValueError(f"`recipe` must be a name or a path, got {name!r}; for the run in that folder, ./{name}.")
    recipe = recipes[known_name("recipe", name, recipes)]
    return recipe.function(**recipe.arguments)


def _from_file(path: Path) -> object:
    if not path.is_file():
        raise FileNotFoundError(f"`recipe` must be a name or a Python file, got {str(path)!r}, which does not exist.")
    return call_file(path, "recipe")
