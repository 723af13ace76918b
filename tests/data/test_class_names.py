"""A run stores the names of its classes: data in which an output would mean another class are refused."""

import json
import shutil

import pytest
from image_files import write_folder
from safetensors.torch import load_file

from graticule import cli
from graticule.data import check_class_names, same_classes
from graticule.tasks import Distillation, Recipe, class_names
from graticule.training import Run, train


def recipe(root, **options):
    fixed = {"dataset": "image_folder", "data_root": root, "img_size": (8, 8), "batch_size": 2, "accelerator": "cpu"}
    return Recipe(**{**fixed, "epochs": 1, "model_kwargs": ("depth=1",), **options})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes")
    return train(recipe(write_folder(folder / "images")), folder / "run", progress=False)


@pytest.fixture
def renamed(tmp_path):
    """Write the same images with the first class named zcat, so that it is the last."""
    root = write_folder(tmp_path / "images")
    for split in ("train", "val"):
        (root / split / "cat").rename(root / split / "zcat")
    return root


def moved(run, root, folder):
    """Copy a run to `folder` with `root` as its data folder."""
    shutil.copytree(run.folder, folder)
    described = json.loads((folder / "recipe.json").read_text())
    described["recipe"]["data_root"] = str(root)
    (folder / "recipe.json").write_text(json.dumps(described))
    return folder


def test_a_run_keeps_the_names_of_its_classes_in_order(trained):
    assert class_names(Run.open(trained.folder)) == ("cat", "dog")
    assert trained.data().info.class_names == ("cat", "dog")


def test_renamed_classes_are_refused_by_name_in_evaluation_and_when_a_run_is_resumed(
    trained, renamed, tmp_path, capsys
):
    folder = moved(trained, renamed, tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for command in (["evaluate", str(folder)], ["train", "--resume", str(folder)]):
        assert cli.main(command) == 1
        said = capsys.readouterr().err
        assert said.startswith("graticule: error: `data_root` must have the classes of") and "\n" not in said.strip()
        assert "only in the data: 'zcat'; " in said and "only in " in said and "/run: 'cat'" in said
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_class_more_than_the_run_knows_is_refused_by_name(trained, tmp_path):
    root = write_folder(tmp_path / "images", ("cat", "cow", "dog"))
    with pytest.raises(
        ValueError, match=r"`data_root` must have the classes of .* \(2\), got 3; only in the data: 'cow'"
    ):
        Run.open(moved(trained, root, tmp_path / "run")).data()


def test_a_damaged_list_of_names_is_refused(trained, tmp_path):
    folder = moved(trained, trained.recipe().data_root, tmp_path / "run")
    described = json.loads((folder / "recipe.json").read_text())
    for wrong in ("cat", [1, 2], None):
        (folder / "recipe.json").write_text(json.dumps(described | {"class_names": wrong}))
        with pytest.raises(ValueError, match="class_names"):
            Run.open(folder).data()


def test_a_run_that_starts_from_one_with_other_classes_gets_a_new_classifier(trained, renamed, tmp_path, capsys):
    options = {"start_from": trained.folder, "lr": 1e-9, "min_lr": 0.0}
    same = train(recipe(trained.recipe().data_root, **options), tmp_path / "same", progress=False)
    other = train(recipe(renamed, **options), tmp_path / "other", progress=False)
    assert "other classes" in capsys.readouterr().out
    theirs, same, other = (load_file(run.weights) for run in (trained, same, other))
    for name in ("blocks.0.attn.qkv.weight", "head.weight"):
        assert (same[name] - theirs[name]).abs().max() < 1e-6
    assert (other["blocks.0.attn.qkv.weight"] - theirs["blocks.0.attn.qkv.weight"]).abs().max() < 1e-6
    assert (other["head.weight"] - theirs["head.weight"]).abs().max() > 1e-4


def test_a_teacher_of_other_classes_is_refused_by_name(trained, renamed, tmp_path):
    taught = recipe(renamed, distillation=Distillation(teacher=str(trained.folder)))
    with pytest.raises(ValueError, match=r"must have the classes of `distillation\.teacher`.*'zcat'.*'cat'"):
        train(taught, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_classes_in_another_order_are_refused_with_the_first_that_differs():
    with pytest.raises(ValueError, match="class 1 is 'b', and 'c' in RUN"):
        check_class_names("abc", "acb", "RUN")


def test_classes_without_names_may_be_any_others_that_are_as_many():
    assert same_classes("012", "abc") and same_classes("abc", "012") and same_classes("abc", "abc")
    assert not same_classes("01", "abc") and not same_classes("abc", "acb") and not same_classes("102", "abc")
