"""One readable file a setting; `load_recipe` finds it by name, or at a path of your own."""

from __future__ import annotations

import importlib
import pkgutil
import runpy
import sys
from pathlib import Path

from graticule.names import is_path, known_name
from graticule.tasks import Run, TrainingRecipe


def list_recipes() -> dict[str, str]:
    """List the recipes that come with the package: name -> first line of the docstring."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        text = importlib.import_module(f"{__name__}.{module.name}").__doc__ or ""
        found[module.name] = text.strip().splitlines()[0]
    return found


def load_recipe(name: str) -> TrainingRecipe:
    """Load a recipe of this package by its name, or one at a path.

    A path contains a separator or ends in .py or .json: a Python file with a function `recipe()`, the folder of a run,
    or its recipe.json. Anything else is a name, whatever files or folders are called so.

    Raises:
        ValueError: for an unknown name, with the nearest ones, or a file without `recipe()`.
        FileNotFoundError: for a path that is not there.
    """
    if (Path(name).name == "recipe.json" or is_path(name)) and not name.endswith(".py"):
        return Run.open(Path(name).parent if Path(name).name == "recipe.json" else name).recipe()
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise FileNotFoundError(f"`recipe` must be a name or a Python file, got {name!r}, which is not there.")
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.append(folder)  # what lies beside it can be imported, as for a script
        build = runpy.run_path(str(path)).get("recipe")
    else:
        known = [module.name for module in pkgutil.iter_modules(__path__)]
        if name not in known and Path(name).is_dir():
            raise ValueError(f"`recipe` must be a name or a path, got {name!r}; for the run in that folder, ./{name}.")
        known_name("recipe", name, known)
        build = importlib.import_module(f"{__name__}.{name}").recipe
    made = build() if callable(build) else None
    if not isinstance(made, TrainingRecipe):
        raise ValueError(f"{name} must have a function `recipe()` that returns a graticule.tasks.Recipe or TextRecipe.")
    return made
