"""Unusual folders, links, devices and names: reading, writing and output of the commands."""

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from commands import refused, run_command
from graticule.lab.commands.opening import named_data
from graticule.lab.recipes.load import load_recipe
from graticule.lab.tasks.classification import Classification
from graticule.lab.tasks.options import Recipe
from graticule.lab.training.loop import train
from graticule.lab.training.opening import open_model
from graticule.lab.training.run import Run
from graticule.system.files import write_json, write_text

pytestmark = pytest.mark.usefixtures("quick_figures")


def short(**options) -> Recipe:
    fixed = {"limit_train": 20, "limit_test": 20, "batch_size": 20, "epochs": 1, "accelerator": "cpu"}
    return Recipe(**{**fixed, "model_kwargs": ("depth=1",), **options})


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Run:
    return train(short(epochs=2, checkpoint_steps=1), tmp_path_factory.mktemp("runs") / "run", progress=False)


@pytest.fixture
def run(trained, tmp_path) -> Run:
    """Return a copy of a run."""
    import shutil

    return Run(Path(shutil.copytree(trained.folder, tmp_path / "run")))


# Names and paths


def test_a_folder_named_as_a_recipe_does_not_replace_it(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    run.folder.rename(tmp_path / "digits_quick")
    assert load_recipe("digits_quick").epochs != 2
    for path in ("./digits_quick", "digits_quick/recipe.json", str(tmp_path / "digits_quick")):
        assert load_recipe(path).epochs == 2
    (tmp_path / "digits_quick").rename(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"`recipe` must be a name or a path, got 'mine'; .*\./mine"):
        load_recipe("mine")


def test_a_folder_or_file_named_as_a_model_does_not_replace_it(capsys, tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    run.folder.rename(tmp_path / "vit_micro_patch4_28")
    (tmp_path / "vit_nano_patch4_28").write_bytes(b"")
    for name in ("vit_micro_patch4_28", "vit_nano_patch4_28"):
        assert open_model(name, "random").run is None
    for path in ("./vit_micro_patch4_28", str(tmp_path / "vit_micro_patch4_28")):
        assert Run(open_model(path).folder).finished
    (tmp_path / "vit_micro_patch4_28").rename(tmp_path / "mine")
    for command in (["analyze", "correlations", "mine"], ["export", "mine", "--output", "a.pt2"]):
        assert "there is no such model; did you mean './mine'?" in refused(capsys, *command)


def test_a_folder_named_as_a_data_set_does_not_replace_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    data = named_data(open_model("vit_nano_patch4_28", "random"), "digits")
    assert data.test_images((28, 28), [0])[0].shape == (1, 1, 28, 28)


def test_a_recipe_without_its_values_is_refused_and_not_trained_with_defaults(run):
    described = json.loads(run.recipe_file.read_text())
    run.recipe_file.write_text(json.dumps(described | {"recipe": {}}))
    with pytest.raises(ValueError, match="`model` must be given"):
        load_recipe(str(run.folder))


# A folder that another process uses


def test_a_run_that_ends_in_the_folder_while_data_are_built_is_not_taken_for_this_one(tmp_path, monkeypatch):
    build, folder = Classification.build_data, tmp_path / "run"

    def meanwhile(task, run=None):
        monkeypatch.setattr(Classification, "build_data", build)
        train(short(seed=1), folder, progress=False)
        return build(task, run)

    monkeypatch.setattr(Classification, "build_data", meanwhile)
    with pytest.raises(FileExistsError, match="must not contain a run"):
        train(short(), folder, progress=False)
    assert Run(folder).recipe().seed == 1

    folder = tmp_path / "resumed"
    monkeypatch.setattr(Classification, "build_data", meanwhile)
    with pytest.raises(ValueError, match="`seed` would change"):
        train(short(), folder, resume=True, progress=False)


# Devices, pipes and links as outputs


def test_devices_and_pipes_are_written_to_and_stay(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json(pipe, [1, 2])
    assert json.loads(os.read(reader, 100)) == [1, 2] and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)
    assert write_text(Path(os.devnull), "nothing") == Path(os.devnull) and not Path(os.devnull).is_file()
    with pytest.raises(OSError, match=r"/dev/full could not be written .*No space left"):
        write_text(Path("/dev/full"), "nothing")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="a folder of Linux")
def test_a_file_in_memory_is_replaced():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "result.json"
        for text in ("first", "second"):
            assert write_text(path, text).read_text() == text


def test_an_output_of_another_kind_is_refused(capsys, run):
    err = refused(capsys, "analyze", "correlations", run.folder, "--output", run.log_file)
    assert "`output` must be a folder" in err


def test_a_full_disk_is_named_where_weights_are_written(capsys, tmp_path, run, monkeypatch):
    from safetensors import SafetensorError

    def full(weights, path, metadata=None):
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("graticule.checkpoints.read.save_file", full)
    err = refused(capsys, "publish", run.folder, tmp_path / "new")
    assert "model.safetensors could not be written" in err and "is the disk full?" in err
    assert not list((tmp_path / "new").glob("*safetensors*"))
    with pytest.raises(OSError, match=r"weights\.safetensors could not be written.*is the disk full\?"):
        train(short(), tmp_path / "another", progress=False)
    assert not list((tmp_path / "another").glob("*weights*"))


# Shown text


def test_control_characters_in_names_and_values_are_escaped(capsys, tmp_path, run):
    red = run.folder.rename(tmp_path / "\x1b[31mred\n")
    for arguments in (["runs", tmp_path], ["evaluate", red], ["analyze", "correlations", red]):
        code, out, err = run_command(capsys, *arguments)
        assert code == 0 and "\x1b" not in out + err and "\\x1b[31mred\\n" in out
    described = json.loads((red / "recipe.json").read_text())
    described["recipe"]["model"] = "\x1b[31m\nvit"
    (red / "recipe.json").write_text(json.dumps(described))
    for arguments in (["runs", tmp_path], ["evaluate", red], ["train", "--resume", red]):
        code, out, err = run_command(capsys, *arguments)
        assert "\x1b" not in out + err and err.count("\n") == (code == 1)
    assert "\x1b" not in refused(capsys, "train", "digits_quick", "--\x1b[31m")


@pytest.mark.parametrize(("where", "code"), [(">&-", 0), ("> /dev/full", 1)])
def test_a_standard_output_that_is_closed_or_full_is_no_traceback(where, code):
    command = f"{sys.executable} -m graticule --help {where}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
    assert done.returncode == code and "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert done.stderr.count("\n") == code


def test_an_allocation_that_fails_is_an_error_of_one_line(capsys, monkeypatch):
    def beyond(arguments):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes.\nmore")

    monkeypatch.setattr("graticule.lab.commands.models.run", beyond)
    code, _, err = run_command(capsys, "models")
    assert code == 1 and "out of memory" in err and err.count("\n") == 1
