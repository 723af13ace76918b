"""Recipes, one file per paper with its variants; `load_recipe` loads one by its name or from a path."""

from graticule.recipes.load import list_recipes, load_recipe

__all__ = ["list_recipes", "load_recipe"]
