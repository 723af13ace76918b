"""Opening a trained model from its files."""

from pathlib import Path

import pytest
import torch

import graticule
from graticule.lab.training.loop import train
from short_runs import copied, short


@pytest.fixture(scope="module")
def run(lape_run, tmp_path_factory):
    """Return a copy of a short run."""
    return copied(lape_run, tmp_path_factory.mktemp("load") / "run")


def same_weights(model, other):
    """Return whether two models have the same state, value by value."""
    state, others = model.state_dict(), other.state_dict()
    return state.keys() == others.keys() and all(torch.equal(value, others[name]) for name, value in state.items())


def test_a_run_is_opened_by_its_folder_with_its_best_or_last_weights_in_evaluation_mode(run):
    for checkpoint in ("best", "last"):
        model = graticule.load(run.folder, checkpoint=checkpoint)
        assert same_weights(model, run.model(checkpoint=checkpoint))
        assert not any(module.training for module in model.modules())


def test_each_file_of_weights_that_a_run_writes_is_opened_with_the_model_of_its_run(run):
    for file, checkpoint in ((run.weights, "best"), (run.best, "best"), (run.last, "last")):
        model = graticule.load(str(file))
        assert same_weights(model, run.model(checkpoint=checkpoint)), file.name
        assert not model.training


def test_a_published_folder_is_opened(tmp_path):
    model = graticule.create_model("vit_nano_patch4_28", joining="lape")
    model.save_pretrained(tmp_path / "published")
    opened = graticule.load(tmp_path / "published")
    assert same_weights(opened, model) and not opened.training
    with pytest.raises(ValueError, match="`checkpoint` must be left out for a published model"):
        graticule.load(tmp_path / "published", checkpoint="last")


def test_files_without_a_known_model_are_refused(run, tmp_path):
    alone = tmp_path / "weights.safetensors"
    alone.write_bytes(run.weights.read_bytes())
    damaged = run.folder / "damaged.safetensors"
    damaged.write_bytes(run.weights.read_bytes()[:100])
    for source, options, error, message in (
        (tmp_path / "nowhere", {}, FileNotFoundError, "`source` must be a run or a file of its weights, got .*nowhere"),
        (run.folder / "nowhere.ckpt", {}, FileNotFoundError, "which does not exist"),
        (tmp_path, {}, ValueError, "which has no recipe.json; build the model and call graticule.load_checkpoint"),
        (alone, {}, ValueError, "which is not in the folder of a run"),
        (damaged, {}, ValueError, "is not a checkpoint of PyTorch or safetensors, or it is truncated"),
        (run.weights, {"checkpoint": "last"}, ValueError, "`checkpoint` must be left out if `source` is a file"),
        (run.folder, {"checkpoint": "worst"}, ValueError, "`checkpoint` must be one of best, last"),
        (run.folder, {"plugin": "nowhere.py"}, FileNotFoundError, "`plugin` must be a Python file"),
        (3, {}, TypeError, "`source`"),
    ):
        with pytest.raises(error, match=message):
            graticule.load(source, **options)


def test_the_plugin_of_a_run_is_imported_if_it_is_named(run, tmp_path, monkeypatch, my_methods):
    from graticule.registry import plugins

    file, folder = my_methods.__file__, tmp_path / "run"
    trained = train(short(encoding="random_fourier(frequencies=4)", epochs=1), folder, progress=False)
    monkeypatch.setattr(plugins, "_registered", {})
    with pytest.raises(ValueError, match=r"needs the plugin my_methods\.py"):
        graticule.load(folder)
    imported = []
    registered = dict.fromkeys([Path(file)], *trained.plugins.values())
    monkeypatch.setattr(
        "graticule.registry.plugins.load_plugin",
        lambda name: imported.append(name) or plugins._registered.update(registered),
    )
    model = graticule.load(folder, plugin=file)
    assert imported == [file] and type(model.position.encodings[0]).__name__ == "RandomFourier"
