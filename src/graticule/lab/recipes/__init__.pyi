from .load import list_recipes as list_recipes
from .load import load_recipe as load_recipe
