"""A run stores the names of its classes: data in which an output would mean another class are refused."""

import dataclasses
import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import graticule
from commands import run_command
from graticule.lab import cli
from graticule.lab.commands.opening import named_data
from graticule.lab.data.images import check_class_names, class_labels, same_classes
from graticule.lab.data.text_module import TextModule
from graticule.lab.recipes.load import load_recipe
from graticule.lab.tasks.options import Distillation, Recipe
from graticule.lab.training.loop import train
from graticule.lab.training.opening import label_names, open_model
from graticule.lab.training.run import Run
from graticule.lab.training.task import task_of
from graticule.system.files import write_json
from image_files import draw_image, write_folder
from short_runs import short


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


def test_renamed_classes_are_refused_by_name_in_evaluation_and_when_a_run_is_resumed(
    trained, renamed, tmp_path, capsys
):
    folder = moved(trained, renamed, tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for command in (["evaluate", str(folder)], ["train", "--resume", str(folder)]):
        assert cli.main(command) == 1
        err = capsys.readouterr().err
        assert err.startswith("graticule: error: `data_root` must have the classes of") and "\n" not in err.strip()
        assert "only in the data: 'zcat'; " in err and "only in " in err and "/run: 'cat'" in err
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_a_run_leaves_out_of_its_images_is_said_at_its_start(tmp_path, capsys):
    """24 x 40 pixels lose 40 % of their width in a square; mixed sizes have no size of their own."""
    cases = []
    for name, sizes, message in (
        ("wide", [(24, 40)], "which leaves out 40 % of an image (mean of 6; all have 24 x 40 pixels)"),
        ("square", [(16, 16)], None),
        ("mixed", [(24, 40), (40, 40)], "which leaves out 20 % of an image (mean of 6)"),
    ):
        root = write_folder(tmp_path / name)
        for index, path in enumerate(sorted((root / "train").rglob("*.JPEG"))):
            draw_image(index, *sizes[index % len(sizes)]).save(path)
        cases.append((recipe(root), message and f"evaluation crops the center to 8 x 8, {message}"))
    larger = "images of 28 x 28 pixels are resized to 28 x 44, another aspect ratio; `img_size` 28 28 would keep it"
    for case, message in (*cases, (short(img_size=(28, 44)), larger), (short(img_size=(14, 14)), None)):
        task = task_of(case)
        assert task.notes(task.build_data()) == ([message] if message else [])
    run = train(cases[0][0], tmp_path / "run", progress=False)
    assert cases[0][1] in capsys.readouterr().err and cases[0][1] in run.log_file.read_text()


def test_a_relative_data_folder_is_kept_as_an_absolute_path(tmp_path, monkeypatch):
    write_folder(tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    run = train(recipe(Path("images")), tmp_path / "run", progress=False)
    assert run.recipe().data_root == tmp_path / "images"


def test_a_run_opened_with_other_examples_than_in_training_warns(trained, tmp_path, capsys):
    def warnings_of(root):
        Run.open(moved(trained, root, tmp_path / f"run of {root.name}")).data()
        return capsys.readouterr().err

    assert warnings_of(write_folder(tmp_path / "same")) == ""
    root = write_folder(tmp_path / "other")
    draw_image(99).save(root / "val" / "cat" / "0.JPEG")
    (root / "train" / "dog" / "0.JPEG").unlink()
    line = warnings_of(root)
    assert "the data are not those that" in line and line.count("\n") == 1
    assert line.endswith("train has 5 examples, and had 6; test has 6 examples, and had 6 others\n")


@mock.patch("graticule.lab.data.module.spread", lambda count: [0])  # the contents of one image
def test_a_file_that_is_replaced_at_any_place_is_said(trained, tmp_path):
    run = Run.open(moved(trained, root := write_folder(tmp_path / "images"), tmp_path / "run"))
    file = root / "train" / "dog" / "2.JPEG"
    described, content, stamp = json.loads(run.recipe_file.read_text()), file.read_bytes(), file.stat().st_mtime_ns
    data = run.data()
    write_json(run.recipe_file, {**described, "data": data.fingerprint()})
    again = "train has files that were written again, of the same sizes"
    for new, time, expected in (
        (content, stamp, []),
        (content[:-1] + b"x", stamp + 1, [again]),
        (content + b"x", stamp, ["train has 6 examples, and had 6 others"]),
    ):
        file.write_bytes(new)
        os.utime(file, ns=(time, time))
        assert run.changes(data) == expected
    file.write_bytes(content)
    for path in root.rglob("*.JPEG"):
        os.utime(path, ns=(stamp + 10**12, stamp + 10**12))
    assert run.changes(data) == []  # as after a copy


def test_the_fingerprint_of_a_text_is_that_of_its_tokens(tmp_path):
    fingerprints = []
    for text in ("a text " * 20, "a text " * 20, "a test " * 20):
        (tmp_path / "a.txt").write_text(text)
        data = TextModule("text_file", root=tmp_path / "a.txt", context=8)
        fingerprints.append(data.fingerprint())
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def ways(root):
    """Return the options that name the folder of a data set."""
    return ["--images", root], ["--images", "image_folder", "--data-root", root]


def test_a_model_without_names_takes_as_many_classes_in_order_and_says_so(tmp_path, capsys):
    model = graticule.create_model("vit_nano_patch4_28", img_size=8, depth=1, in_chans=3, num_classes=2)
    published = graticule.save_pretrained(model, tmp_path / "published")
    for classes in ("ab", "abc", "abcd"):
        for data in ways(write_folder(tmp_path / classes, tuple(classes))):
            code, _, err = run_command(capsys, "evaluate", published, *data, "--output", tmp_path)
            if len(classes) == 2:
                assert code == 0 and "does not name its classes: the classes of" in err, err
            else:
                assert code == 1 and "`images` must have the 2 classes of" in err and f"got {len(classes)}" in err


def test_a_model_normalizes_and_resizes_the_images_of_a_data_set_and_of_a_folder_alike(trained, tmp_path, capsys):
    image_folder, losses = trained.recipe().data_root, []
    for mean in (0.9, 0.1):
        options = {"mean": [mean] * 3, "interpolation": "nearest", "crop_pct": 0.5}
        published = graticule.save_pretrained(trained.model(), tmp_path / str(mean), preprocessing=options)
        for data in ways(image_folder):
            assert run_command(capsys, "evaluate", published, *data, "--output", tmp_path)[0] == 0
            losses.append(json.loads((tmp_path / "evaluation.json").read_text())[0]["loss"])
    assert losses[0] == losses[1] != losses[2] == losses[3]


def test_a_published_run_prepares_images_of_one_native_size_as_in_training(tmp_path):
    """By the name of the data set and as files, with sides that are not equal."""
    run = train(short(img_size=(28, 44), epochs=1, limit_test=None), tmp_path / "run", progress=False)
    opened = open_model(str(graticule.save_pretrained(run.model(), tmp_path / "published")))
    expected = run.data().test_images((28, 44), range(5))[0]
    assert torch.equal(named_data(opened, "digits").test_images((28, 44), range(5))[0], expected)
    for index in range(5):
        (tmp_path / "images" / str(index)).mkdir(parents=True)
        run.data().images["test"][index][0].save(tmp_path / "images" / str(index) / "0.png")
    image_folder = named_data(opened, str(tmp_path / "images"))
    assert torch.equal(image_folder.test_images((28, 44), range(5))[0], expected)


def test_a_run_predicts_is_audited_and_published_without_its_data(trained, tmp_path, capsys):
    image_folder, gone = trained.recipe().data_root / "train", moved(trained, tmp_path / "gone", tmp_path / "run")
    file = next(image_folder.rglob("*.JPEG"))
    for command in (
        ("predict", gone, file),
        ("audit", gone, "--images", image_folder, "--sizes", 12),
        ("explore", gone, "--images", file),
        ("publish", gone, tmp_path / "published"),
    ):
        code, _, err = run_command(capsys, *command)
        assert code == 0, err
    config = json.loads((tmp_path / "published" / "config.json").read_text())
    assert tuple(config["pretrained_cfg"]["mean"]) == trained.data().info.mean
    assert "| held-out images | 6 |" in (tmp_path / "published" / "README.md").read_text()


@pytest.fixture(scope="module")
def sources(trained, tmp_path_factory):
    """Return the weights of a classifier of cats and dogs in every form."""
    folder = tmp_path_factory.mktemp("sources")
    published = graticule.save_pretrained(trained.model(), folder / "published")
    changes = {"model": str(published), "data_root": trained.recipe().data_root, "joining": "lape", "anyway": True}
    adapted = train(dataclasses.replace(load_recipe("adapt").quick(), **changes), folder / "adapted", progress=False)
    files = {"weights": trained.weights, "checkpoint": trained.best, "file": published / "model.safetensors"}
    folders = {"run": trained.folder, "adapted run": adapted.folder, "adapted": adapted.folder / "published"}
    return {**files, **folders, "published": published}


#: Commands and the forms of weights that they take.
WAYS = [
    *(("start_from", form) for form in ("run", "published file", "adapted run")),
    *(("model", "published"), ("evaluate", "adapted"), ("teacher", "published file"), ("teacher", "run")),
]
#: Other files of the same kinds of weights.
WAYS += [
    pytest.param(*way, marks=pytest.mark.slow)
    for way in [
        *(("start_from", form) for form in ("weights", "checkpoint")),
        *(("model", "run"), ("model", "adapted"), ("evaluate", "published")),
    ]
]


@pytest.mark.parametrize(("command", "source"), WAYS)
def test_every_command_knows_the_classes_of_weights(sources, trained, renamed, tmp_path, capsys, command, source):
    path = sources[source.removeprefix("published ")]
    head = graticule.load(sources["adapted"] if "adapted" in source else trained.folder).head.weight
    for data, same in ((trained.recipe().data_root, True), (renamed, False)):
        folder = tmp_path / str(same)
        if command == "evaluate":
            code, _, err = run_command(capsys, command, path, "--images", data, "--output", folder)
            assert code == (not same) and same == ("only in the data: 'zcat'" not in err), err
        elif command == "teacher":
            by_file = {"teacher": "vit_nano_patch4_28", "teacher_checkpoint": path}
            options = Distillation(**(by_file if path.is_file() else {"teacher": str(path)}))
            if same and path.is_file():  # of another architecture than the name
                continue
            refused = r"must have the classes of `distillation\.teacher.*'zcat'.*'cat'"
            with nullcontext() if same else pytest.raises(ValueError, match=refused):
                train(recipe(data, distillation=options), folder, progress=False)
            assert folder.exists() == same
        else:
            changes = {command: path if command == "start_from" else str(path), "lr": 1e-9, "min_lr": 0.0}
            changes |= {"model_kwargs": ()} if command == "model" else {}
            run = train(recipe(data, **changes), folder, progress=False)
            assert ((load_file(run.weights)["head.weight"] - head).abs().max() < 1e-6) == same
            assert label_names(run.folder) == (("cat", "dog") if same else ("dog", "zcat"))


def test_classes_are_matched_by_name_and_in_order_only_without_names():
    with pytest.raises(ValueError, match="class 1 is 'b', and 'c' in RUN"):
        check_class_names("abc", "acb", "RUN")
    assert class_labels("cab", "abc", 3) == [2, 0, 1] and class_labels("b", "abc", 3) == [1]
    assert class_labels("xyz", "abc", 3) is None and class_labels("abcd", "abc", 3) is None
    assert class_labels("xyz", "", 3) == class_labels("xyz", "012", 3) == class_labels("012", "abc", 3) == [0, 1, 2]
    assert class_labels("xy", "", 3) is None and class_labels("", "abc", 3) is None
    assert same_classes("012", "abc") and same_classes("abc", "012") and same_classes("abc", "abc")
    assert not same_classes("01", "abc") and not same_classes("abc", "acb") and not same_classes("102", "abc")


def test_a_run_is_not_resumed_with_other_examples(trained, tmp_path, capsys):
    root = write_folder(tmp_path / "other")
    draw_image(99).save(root / "val" / "cat" / "0.JPEG")
    folder = moved(trained, root, tmp_path / "run")
    code, _, err = run_command(capsys, "train", "--resume", folder)
    assert code == 1 and err.count("test has 6 examples, and had 6 others") == 1
