"""Initial state of every test: the same seed, an empty cache of compiled graphs.

Imports are in the fixtures: pytest-xdist loads this file in a process that runs no test.
"""

import atexit
import gc
import io
import logging
import os
import sys
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()
    os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"
    if hasattr(config, "workerinput"):  # its results are sent; freeing some million objects one by one takes seconds
        atexit.register(os._exit, 0)


#: The names of tests that take more than a second: `make test-long` runs them, and so does .ci/run.
LONG = Path(__file__).with_name("long.txt").read_text(encoding="utf-8").split()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the long tests, and run the files whose tests fork first, while the process is small."""
    long = {*LONG}
    for item in items:
        if f"tests/{item.nodeid.partition('[')[0].removeprefix('tests/')}" in long:
            item.add_marker(pytest.mark.long)
    forking = {module: hasattr(module, "forked") or hasattr(module, "two_processes") for module in map(_module, items)}
    items.sort(key=lambda item: not forking[_module(item)])


def _module(item: pytest.Item) -> object:
    return getattr(item, "module", None)


def pytest_collection_finish() -> None:
    """Exclude imported objects, some million, from garbage collection, and collect rarely."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # extensions look for leaks when Python ends
    gc.set_threshold(1_000_000)  # 20,000 took 7 % of the time of the tests
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _no_pretended_gpu():
    """Start autograd before anything is compiled or exported, so that tests can fork.

    Without a GPU, PyTorch's fake tensors register a dummy device. If it exists at the first backward pass, autograd
    starts a thread for it, and the backward pass of every forked process fails.
    """
    import lightning_fabric  # noqa: F401
    import torch

    torch.ones((), requires_grad=True).backward()
    if not torch.cuda.is_available():  # set by Fabric; with it, fake tensors look for a driver in every operation
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"


@pytest.fixture(autouse=True)
def _start_alike(monkeypatch):
    import torch

    from graticule.lab.training import cost
    from graticule.registry import plugins

    torch.default_generator.manual_seed(0)  # torch.manual_seed formats a traceback per device type, 1 ms per test
    torch._dynamo.reset()
    monkeypatch.setattr(logging.root, "handlers", [])  # installed by timm before 1.0.31, for the stderr of that time
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # 10 ms per file; no test cuts the power
    monkeypatch.setattr(cost, "_SECONDS", 0.0)  # three timed passes, however short
    monkeypatch.setattr(plugins, "_loaded", [])  # runs in other processes load them again


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory):
    """Train a short run on images with the default position; tests must not change its folder."""
    from graticule.lab.training.loop import train
    from short_runs import short

    return train(short(), tmp_path_factory.mktemp("runs") / "plain", progress=False)


@pytest.fixture(scope="session")
def lape_run(tmp_path_factory):
    """Train a short run on images with LaPE; tests must not change its folder."""
    from graticule.lab.training.loop import train
    from short_runs import short

    return train(short(joining="lape"), tmp_path_factory.mktemp("runs") / "lape", progress=False)


@pytest.fixture(scope="session")
def folder_run(tmp_path_factory):
    """Train a short run on a text file; tests must not change its folder."""
    from graticule.lab.training.loop import train
    from text_commands import short_recipe, write_text

    folder = tmp_path_factory.mktemp("folder")
    texts = {"dataset": "text_file", "data_root": write_text(folder / "text.txt")}
    recipe = short_recipe(encoding="bucketed_bias", **texts)
    return train(recipe, folder / "run", progress=False)


@pytest.fixture(scope="session")
def table_run(tmp_path_factory):
    """Train two epochs on text with a learned table, the first the best; tests must not change its folder."""
    from graticule.lab.training.loop import train
    from text_commands import short_recipe, spoiled_after_first_epoch

    with spoiled_after_first_epoch():
        recipe = short_recipe(encoding="learnable", epochs=2)
        return train(recipe, tmp_path_factory.mktemp("runs") / "learnable", progress=False)


@pytest.fixture
def quick_figures(monkeypatch):
    """Draw small figures without a layout, which takes most of the time, in tests that do not inspect them."""
    from graticule.lab.figures import save as figure_files

    def rendered(figure, kind):
        figure.set_layout_engine("none")
        figure.savefig(buffer := io.BytesIO(), format=kind, dpi=40)
        return buffer.getvalue()

    monkeypatch.setattr(figure_files, "render", rendered)


@pytest.fixture
def registered_data():
    """Unregister the data sets that a test registers."""
    from graticule.lab.data.registry import DATASETS
    from graticule.registry import plugins

    copies = [(table, dict(table)) for table in (DATASETS, plugins._registered)]
    yield
    for table, before in copies:
        table.clear()
        table.update(before)


@pytest.fixture(scope="module")
def forgotten():
    """Unregister everything that the tests of one module register: methods, models, data sets, recipes and tasks."""
    import timm.models._registry as timm_registry

    from graticule.backbones import registry
    from graticule.lab.data.registry import DATASETS
    from graticule.lab.recipes.load import RECIPES
    from graticule.lab.training.task import list_tasks
    from graticule.position.joining import JOININGS
    from graticule.position.position import ENCODINGS
    from graticule.position.resampling import RESAMPLERS
    from graticule.registry import plugins

    for table in (RECIPES, DATASETS):
        table.discover()  # built-in names are registered first and stay
    ours = [
        ENCODINGS,
        JOININGS,
        RESAMPLERS,
        registry.MODELS,
        registry.CLASSES,
        registry.default_cfgs,
        RECIPES,
        DATASETS,
        plugins._registered,
    ]
    ours.append(list_tasks())
    timms = [
        *(timm_registry._model_entrypoints, timm_registry._model_to_module, timm_registry._model_default_cfgs),
        *(timm_registry._model_pretrained_cfgs, timm_registry._model_with_tags),
    ]
    copies = [(holder, dict(holder)) for holder in (*ours, *timms, sys.modules)]
    models = {name: set(of) for name, of in timm_registry._module_to_models.items()}
    yield
    for holder, before in copies:
        for name in set(holder) - set(before):
            if holder is not sys.modules or name.startswith("graticule_plugin_"):
                del holder[name]
    for name, of in timm_registry._module_to_models.items():
        of.intersection_update(models.get(name, set()))


@pytest.fixture(scope="module")
def my_methods(forgotten):
    """Import the file of docs/extending.md, like --plugin, for the tests of one module."""
    import graticule

    return graticule.load_plugin(Path(__file__).parents[1] / "docs" / "my_methods.py")
