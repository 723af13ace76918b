"""Recipes by name: those of the package and those that a plugin registers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from graticule.plugins import check_new_name, register_once

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class RegisteredRecipe:
    """A function that returns a recipe, and the arguments for the variant of this name."""

    function: Callable[..., Any]
    about: str
    """one line about the recipe"""
    arguments: dict[str, Any] = field(default_factory=dict)


RECIPES: dict[str, RegisteredRecipe] = {}


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
    check_new_name("recipe", name)

    def add(function: F) -> F:
        if not inspect.isfunction(function):
            raise TypeError(f"the recipe {name!r} must be a function that returns a recipe, got {function!r}.")
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise ValueError(f"the recipe {name!r} must have the arguments of {function.__name__}: {error}.") from None
        known = RECIPES.get(name)
        register_once("recipe", name, function, known.function if known else None)
        documented = (inspect.getdoc(function) or "").partition("\n")[0]
        RECIPES[name] = RegisteredRecipe(function, documented if about is None else about, arguments)
        return function

    return add
