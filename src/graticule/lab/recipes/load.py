"""Load a recipe by its name, or from a path."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from graticule.lab.training.recipe import TrainingRecipe
from graticule.registry.checks import is_path, known_name, search_names
from graticule.registry.plugins import call_file
from graticule.registry.registry import NameTable

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class RegisteredRecipe:
    """A function that returns a recipe, and the arguments for the variant of this name."""

    function: Callable[..., Any]
    about: str
    """one line about the recipe"""
    arguments: dict[str, Any] = field(default_factory=dict)


#: The recipes by name; reading it imports no PyTorch.
RECIPES: NameTable[str, RegisteredRecipe] = NameTable(
    "recipe", "graticule.lab.recipes", definition=lambda recipe: recipe.function
)


def register_recipe(name: str, about: str | None = None, **arguments: Any) -> Callable[[F], F]:
    """Return a decorator for functions that return a recipe; several on one function register its variants.

    Args:
        name: the name for `graticule train` and `load_recipe`, an identifier.
        about: one line about the recipe (default: the first line of the function's docstring).
        arguments: passed to the function.

    Raises:
        ValueError: if `name` is not an identifier or already taken, or the function does not take `arguments`.
        TypeError: if the decorated object is not a function.

    Example:
        >>> import graticule
        >>> @graticule.register_recipe("my_digits", depth=3)
        ... @graticule.register_recipe("my_deep_digits", depth=6)
        ... def digits(depth: int) -> graticule.Recipe:
        ...     '''Train a small ViT on digits.'''
        ...     return graticule.Recipe(model_kwargs=(f"depth={depth}",), epochs=3)
    """

    def describe(function: object) -> RegisteredRecipe:
        if not inspect.isfunction(function):
            raise TypeError(f"the recipe {name!r} must be a function that returns a recipe, got {function!r}.")
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise ValueError(f"the recipe {name!r} must have the arguments of {function.__name__}: {error}.") from None
        documented = (inspect.getdoc(function) or "").partition("\n")[0]
        return RegisteredRecipe(function, documented if about is None else about, arguments)

    return RECIPES.register(name, describe)


def list_recipes() -> dict[str, str]:
    """List the recipes of the package and of plugins: name -> one line of description."""
    return {name: recipe.about for name, recipe in sorted(RECIPES.items())}


def describe_recipe(name: str) -> str | None:
    """Return the line about a recipe, and the sentence of its file that begins with Reproduces; None for a path."""
    if name not in RECIPES:
        return None
    document = sys.modules[RECIPES[name].function.__module__].__doc__ or ""
    reproduces = re.search(r"^Reproduces: (?!nothing)(.|\n )*?\.(?=\s+[A-Z])", document, re.MULTILINE)
    return f"{RECIPES[name].about}\n\n{reproduces[0] if reproduces else ''}".strip()


def load_recipe(name: str) -> TrainingRecipe:
    """Load a recipe by its name, or from a path.

    A path contains a separator or ends in .py or .json: a Python file with a function `recipe()`, the folder of a run,
    or its recipe.json. Anything else is a name, even if a file or folder has that name.

    Raises:
        ValueError: for an unknown name, with the nearest ones, or a file that raises or is without `recipe()`.
        FileNotFoundError: for a path that does not exist.
    """
    path = Path(name)
    if (path.name == "recipe.json" or is_path(name)) and not name.endswith(".py"):
        from graticule.lab.training.run import Run

        return Run.open(path.parent if path.name == "recipe.json" else name).recipe()
    if not name.endswith(".py"):
        if name not in RECIPES and path.is_dir():
            raise ValueError(f"`recipe` must be a name or a path, got {name!r}; for the run in that folder, ./{name}.")
        recipes = list_recipes()
        mentioned = ", ".join([] if name in recipes else search_names(name, recipes))
        registered = RECIPES[known_name("recipe", name, recipes, mentioned and f"recipes with it: {mentioned}")]
        recipe = registered.function(**registered.arguments)
    elif path.is_file():
        recipe = call_file(path, "recipe")
    else:
        raise FileNotFoundError(f"`recipe` must be a name or a Python file, got {name!r}, which does not exist.")
    if not isinstance(recipe, TrainingRecipe):
        raise ValueError(
            f"{name} must have a function `recipe()` that returns a recipe, such as graticule.Recipe, got none."
        )
    return recipe
