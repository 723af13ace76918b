"""One readable file a setting; `load_recipe` finds it by name, or at a path of your own."""

from __future__ import annotations

import importlib
import pkgutil
import runpy
from pathlib import Path

from graticule.names import known_name
from graticule.tasks import Run, TrainingRecipe


def list_recipes() -> dict[str, str]:
    """List the recipes that come with the package: name -> first line of the docstring."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        text = importlib.import_module(f"{__name__}.{module.name}").__doc__ or ""
        found[module.name] = text.strip().splitlines()[0]
    return found


def load_recipe(name: str) -> TrainingRecipe:
    """Load a recipe by its name, from a Python file of yours that has a function `recipe()`, or of a run folder.

    Raises:
        ValueError: for an unknown name, with the nearest ones, or a file without `recipe()`.
        FileNotFoundError: for a path that is not there.
    """
    if Run(Path(name)).recipe_file.is_file():
        return Run.open(name).recipe()
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise FileNotFoundError(f"`recipe` must be a name or a Python file, got {name!r}, which is not there.")
        build = runpy.run_path(str(path)).get("recipe")
    else:
        known_name("recipe", name, [module.name for module in pkgutil.iter_modules(__path__)])
        build = importlib.import_module(f"{__name__}.{name}").recipe
    made = build() if callable(build) else None
    if not isinstance(made, TrainingRecipe):
        raise ValueError(f"{name} must have a function `recipe()` that returns a graticule.tasks.Recipe or TextRecipe.")
    return made
