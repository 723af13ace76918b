"""A file in the room of its kind is found by its registry; no list names it."""

import sys
from importlib import import_module
from pathlib import Path
from string import Template

import pytest

import graticule
from graticule.backbones.registry import MODELS
from graticule.lab.commands import new
from graticule.lab.data.registry import DATASETS, list_datasets
from graticule.lab.recipes.load import RECIPES, list_recipes
from graticule.lab.training.task import list_tasks
from graticule.position.position import ENCODINGS

pytestmark = pytest.mark.usefixtures("forgotten")
TEMPLATES = Path(new.__file__).with_name("templates")
#: Kind -> its room, the table of the room, and a function that lists its names.
ROOMS = {
    "encoding": ("encodings", ENCODINGS, graticule.list_encodings),
    "bias": ("encodings", ENCODINGS, graticule.list_encodings),
    "rotary": ("encodings", ENCODINGS, graticule.list_encodings),
    "backbone": ("backbones", MODELS, graticule.list_models),
    "task": ("lab.tasks", list_tasks(), list_tasks),
    "dataset": ("lab.data.sets", DATASETS, list_datasets),
    "recipe": ("lab.recipes", RECIPES, list_recipes),
}


@pytest.mark.parametrize("kind", ROOMS)
def test_a_new_file_of_a_room_is_found(kind, tmp_path, monkeypatch):
    room, table, names = ROOMS[kind]
    name = f"found_{kind}"
    text = Template((TEMPLATES / f"{kind}.py.txt").read_text())
    (tmp_path / f"{name}.py").write_text(text.substitute(name=name, cls="Found", file=f"{name}.py"))
    package = import_module(f"graticule.{room}")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    assert name not in names()
    monkeypatch.setattr(table, "_complete", False)  # as in a new process
    try:
        assert name in names()
    finally:
        del sys.modules[f"graticule.{room}.{name}"]
        delattr(package, name)
