"""What every test starts from: the same seed, an empty cache of compiled graphs."""

import sys
from pathlib import Path

import pytest
import timm.models._registry as timm_registry
import torch

import graticule
from graticule import plugins
from graticule.backbones import registry
from graticule.data.registry import DATASETS, TEXTS
from graticule.encodings import ENCODINGS
from graticule.joining import JOININGS
from graticule.recipe_registry import RECIPES
from graticule.recipes.load import registered_recipes
from graticule.resampling import RESAMPLERS
from graticule.training import cost, list_tasks


@pytest.fixture(autouse=True)
def _start_alike(monkeypatch):
    torch.manual_seed(0)
    torch._dynamo.reset()
    monkeypatch.setattr(cost, "_SECONDS", 0.0)  # three timed passes, however short they are
    monkeypatch.setattr(plugins, "_loaded", [])  # runs that are trained elsewhere load them again


@pytest.fixture
def registered_data():
    """Forget the data sets and texts that a test registers."""
    kept = [(table, dict(table)) for table in (DATASETS, TEXTS, plugins._registered)]
    yield
    for table, before in kept:
        table.clear()
        table.update(before)


@pytest.fixture(scope="module")
def forgotten():
    """Forget what the tests of one module register: methods, models, data sets, recipes and tasks."""
    registered_recipes()  # those of the package are there before and stay
    ours = [
        ENCODINGS._classes,
        JOININGS._classes,
        RESAMPLERS._classes,
        registry.MODELS,
        registry.default_cfgs,
        RECIPES,
        DATASETS,
        TEXTS,
        plugins._registered,
    ]
    ours.append(list_tasks()._classes)
    timms = [
        *(timm_registry._model_entrypoints, timm_registry._model_to_module, timm_registry._model_default_cfgs),
        *(timm_registry._model_pretrained_cfgs, timm_registry._model_with_tags),
    ]
    kept = [(holder, dict(holder)) for holder in (*ours, *timms, sys.modules)]
    models = {name: set(of) for name, of in timm_registry._module_to_models.items()}
    yield
    for holder, before in kept:
        for name in set(holder) - set(before):
            if holder is not sys.modules or name.startswith("graticule_plugin_"):
                del holder[name]
    for name, of in timm_registry._module_to_models.items():
        of.intersection_update(models.get(name, set()))


@pytest.fixture(scope="module")
def my_methods(forgotten):
    """Import the file of docs/extending.md, as --plugin does, for the tests of one module."""
    return graticule.load_plugin(Path(__file__).parents[1] / "docs" / "my_methods.py")
