"""The position gym: tasks that each need one kind of knowledge of position, and profiles of models on them.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from graticule.lazy import lazy_names

if TYPE_CHECKING:
    from graticule.studies.gym.base import Examples, GymTask
    from graticule.studies.gym.profile import Profile, read_profile
    from graticule.studies.gym.recipe import GymRecipe
    from graticule.studies.gym.run import gym
    from graticule.studies.gym.standard import standard_choices
    from graticule.studies.gym.tasks import TASKS, build_task

__all__ = [
    "TASKS",
    "Examples",
    "GymRecipe",
    "GymTask",
    "Profile",
    "build_task",
    "gym",
    "read_profile",
    "standard_choices",
]

_HOMES = {
    "Examples": "base",
    "GymRecipe": "recipe",
    "GymTask": "base",
    "Profile": "profile",
    "TASKS": "tasks",
    "build_task": "tasks",
    "gym": "run",
    "read_profile": "profile",
    "standard_choices": "standard",
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
