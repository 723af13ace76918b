"""`graticule export --consolidate`: one file of weights from a checkpoint, in one file or sharded."""

import functools
import os

import pytest
import torch
from safetensors.torch import load_file

from commands import refused, run_command
from graticule.checkpoints.read import read_checkpoint
from graticule.lab.data.registry import DATASETS
from graticule.lab.data.sets.mnist import digits
from graticule.lab.tasks.classification import Recipe
from graticule.lab.training.devices import load_weights
from graticule.lab.training.loop import train
from graticule.lab.training.run import Run
from graticule.lab.training.task import build_model

EXPORT = ("export", "--consolidate")


@pytest.fixture(scope="module", params=["one file", "sharded"])
def trained(request, tmp_path_factory):
    """Train a run whose best epoch is the first, with checkpoints in single files or sharded (over one process)."""
    options = {"strategy": "fsdp"} if request.param == "sharded" else {"ema_decay": 0.5}
    recipe = Recipe(
        joining="lape", model_kwargs=("depth=2",), limit_train=40, limit_test=20, batch_size=20, epochs=2,
        accelerator="cpu", **options,
    )  # fmt: skip
    environment = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DATASETS, "digits", functools.cache(digits))
        run = train(recipe, tmp_path_factory.mktemp("runs") / "run", progress=False)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    assert run.last is not None and run.last.is_dir() == (request.param == "sharded")
    return run


@pytest.mark.parametrize("checkpoint", ["last", "best"])
def test_one_file_has_what_an_evaluation_of_the_checkpoint_reads(capsys, trained, checkpoint):
    code, out, _ = run_command(capsys, *EXPORT, trained.folder, "--checkpoint", checkpoint)
    path = trained.folder / f"weights-{checkpoint}.safetensors"
    assert code == 0 and str(path) in out and "tensors" in out
    ours, theirs = load_file(path), trained.model(checkpoint=checkpoint).state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    if checkpoint == "best":
        best = load_file(trained.weights)
        assert all(torch.equal(ours[name], best[name]) for name in best)
    elif trained.last.is_file():  # the moving average
        kept = read_checkpoint(trained.last)["state_dict"]
        assert all(torch.equal(value, kept[f"model.{name}"]) for name, value in ours.items())
    loaded = load_weights(build_model(trained.recipe(), num_classes=10, channels=1), path).eval()
    images = torch.randn(2, 1, 28, 28)
    assert torch.equal(loaded(images), trained.model(checkpoint=checkpoint)(images))


def test_the_file_is_written_to_the_output(capsys, tmp_path, trained):
    path = tmp_path / "new" / "weights.safetensors"
    code, out, _ = run_command(capsys, *EXPORT, trained.folder, "--output", path)
    assert code == 0 and f"of {trained.best}" in out
    theirs = trained.model(checkpoint="best").state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in load_file(path).items())
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_invalid_arguments_are_named(capsys, tmp_path, trained):
    err = refused(capsys, *EXPORT, trained.folder, "--checkpoint", "newest")
    assert "`checkpoint` must be one of best, last" in err
    err = refused(capsys, *EXPORT, trained.folder, "--int8")
    assert "`consolidate` must be given with --checkpoint and --output only" in err
    err = refused(capsys, *EXPORT, trained.folder, "--output", tmp_path / "weights.pth")
    assert "`output` must be a file that ends in .safetensors" in err
    assert "recipe.json" in refused(capsys, *EXPORT, tmp_path)


def test_a_run_without_a_checkpoint_or_with_a_damaged_one_is_named(capsys, tmp_path, trained):
    import shutil

    run = Run(tmp_path / "run")
    run.folder.mkdir()
    shutil.copy(trained.recipe_file, run.recipe_file)
    assert "has no last checkpoint yet" in refused(capsys, *EXPORT, run.folder, "--checkpoint", "last")
    shutil.copytree(trained.checkpoints, run.checkpoints)
    for file in [run.last] if run.last.is_file() else run.last.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:1000])
    err = refused(capsys, *EXPORT, run.folder, "--checkpoint", "last")
    assert run.last.name in err and not list(run.folder.glob("*.safetensors"))
