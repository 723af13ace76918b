"""Our studies resume where they stopped, are what they say, and keep the scores of their tables."""

import dataclasses
import pickle
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from pandas import DataFrame
from torchvision.datasets import CIFAR10

from evidence import studies
from evidence.built import differences, facts_of, read_built
from evidence.studies import CELL, COLUMNS, Study, load, names, read_table, run_study, write_table
from evidence.studies.__main__ import main
from graticule.lab.data.registry import load_dataset
from graticule.lab.studies.comparison import recipe_hash, run_hash
from graticule.lab.studies.plan import check_choices, plan
from graticule.lab.training.run_folder import lock_folder
from graticule.lab.training.task import build_data, build_model
from image_files import write_folder

TOP = Path(__file__).parents[3]
DATA = TOP / "docs" / "data"
TINY = {
    "model_kwargs": ("depth=1", "embed_dim=8", "num_heads=1"),
    "limit_train": 20,
    "limit_test": 10,
    "batch_size": 20,
    "epochs": 1,
    "warmup_epochs": 0,
    "accelerator": "cpu",
}
SMALL = Study(
    question="Does it run?",
    recipe="digits_quick",
    choices={"none": {"encoding": "none"}, "learnable": {"encoding": "learnable"}},
    base=TINY,
    variants={"a": {}, "b": {"lr": 0.1}},
    without=(("none", "b"),),
    seeds=(0,),
    sizes=((28, 28), (32, 36)),
    modes=("canvas",),
    measure=lambda run: [("reach", "last layer", run.recipe().lr)],
    seconds=1,
)
LITE = {"model": "vit_lite_2_4_32", "img_size": (32, 32), "encoding": "learnable", "model_kwargs": ()}
#: A part of a label of the studies -> the facts that it says, by its numbers.
LABELS = {
    r"\bstd ([\d.]+)": lambda std: {"std": float(std)},
    r"^(\d+) epochs": lambda epochs: {"epochs": int(epochs)},
    r"^windows of (\d) x (\d)": lambda *sides: {"windows": " x ".join(sides)},
    r"([\d,]+) digits": lambda count: {"images": int(count.replace(",", ""))},
    r"(LaPE|LN chain)$": lambda _: {"joining": "lape(decomposition='layer_norm')"},
    r"^(beside), std": lambda _: {"joining": "lape(decomposition='w')"},
    r"^(once)": lambda _: {"joining": "default"},
    r"^PEG.*, (\d) x \d$": lambda side: {"encoding": f"peg(kernel={side})"},
}


def table_of(values, variant="", metric="top1", at="trained"):
    """Return one row per choice and seed, as in a table."""
    rows = [
        (choice, variant, seed, metric, at, value, 10, 4.0, "x", "2026-01-02", "1", "2", "3", "m", 1)
        for choice, scores in values.items()
        for seed, value in enumerate(scores)
    ]
    return DataFrame(rows, columns=[*COLUMNS])


def cells(rows):
    return [tuple(row) for row in rows[CELL].drop_duplicates().itertuples(index=False)]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Run a study; returns its folder and its table."""
    folder = tmp_path_factory.mktemp("study")
    run_study(SMALL, folder, folder / "study_small.csv", progress=False)
    return folder, folder / "study_small.csv"


def test_the_table_has_a_row_for_every_score_of_every_run_and_says_where_it_is_from(done):
    rows = read_table(done[1])
    assert cells(rows) == [("none", "a", 0), ("learnable", "a", 0), ("learnable", "b", 0)]
    places = [("top1", "trained"), *((m, f"canvas {at}") for at in ("28", "32x36") for m in ("top1", "loss"))]
    for cell, of in rows.groupby(CELL, sort=False):
        assert [*zip(of.metric, of["at"], strict=True)] == [*places, ("reach", "last layer")], cell
        assert of.value.iloc[-1] == (0.1 if cell[1] == "b" else SMALL.recipes()["none, a"].lr)
        assert of.value.iloc[0] == of.value.iloc[1]  # nothing changes at the training size
        recipe = SMALL.recipes()[", ".join(cell[:2])]
        assert {*of.recipe} == {run_hash(recipe, build_data(recipe).fingerprint())}
    assert all(rows.torch) and all(rows.timm) and rows.date.min() > "2026"


def test_rows_in_the_table_are_not_trained_again_and_trained_runs_are_measured(done, tmp_path, monkeypatch):
    folder, trained = shutil.copytree(done[0], tmp_path / "copy"), []
    before = read_table(table := folder / "study_small.csv")
    monkeypatch.setattr(studies, "train_runs", lambda runs, *_, **__: trained.extend(runs))
    run_study(SMALL, folder, table, progress=False)
    assert trained == [] and read_table(table).equals(before)
    write_table(table, before[before.variant != "b"])
    run_study(SMALL, folder, table, progress=False)
    assert [run.choice for run in trained] == ["learnable, b"]
    assert read_table(table).equals(before)


def test_rows_added_by_another_process_meanwhile_are_not_added_again(done, tmp_path, monkeypatch):
    folder = shutil.copytree(done[0], tmp_path / "copy")
    before = read_table(table := folder / "study_small.csv")
    studies._add_rows(table, before[before.choice == "none"].assign(value=0.0), folder)
    assert read_table(table).equals(before)
    monkeypatch.setattr(studies, "_PATIENCE", 0.01)
    with lock_folder(folder), pytest.raises(OSError, match="copy is in use by another process"):
        studies._add_rows(table, before, folder)


def test_scores_of_another_recipe_or_model_are_not_mixed_with_new_ones(done, tmp_path):
    table = shutil.copy(done[1], tmp_path / "study_small.csv")
    further = dataclasses.replace(SMALL, seeds=(0, 1))
    other = dataclasses.replace(SMALL, base={**TINY, "lr": 0.5})
    with pytest.raises(ValueError, match=r"`study` must have the recipes and data of its table, .* 'none, a'"):
        run_study(other, tmp_path, table, progress=False)
    write_table(table, read_table(table).assign(parameters=7))
    with pytest.raises(ValueError, match=r"`expects` must be what is built: 'none, a' must have parameters 7, got \d+"):
        run_study(further, tmp_path, table, progress=False)
    assert [*tmp_path.iterdir()] == [table]


def test_scores_of_other_data_are_not_mixed_with_new_ones(tmp_path):
    """In one table, and in one folder of runs; a table without hashes of data is taken as it is."""
    first, other = write_folder(tmp_path / "a"), write_folder(tmp_path / "b", ("cat", "dog", "emu"))
    base = {**TINY, "dataset": "image_folder", "img_size": (8, 8), "batch_size": 2, "epochs": 1}
    one = dataclasses.replace(SMALL, base=base, sizes=(), measure=None, variants={"": {}}, without=())
    both, table = dataclasses.replace(one, seeds=(0, 1)), tmp_path / "study_small.csv"
    run_study(one, tmp_path / "runs", table, data_root=first, progress=False)
    with pytest.raises(ValueError, match=r"must have the recipes and data of its table, .*-[0-9a-f]{12}, not"):
        run_study(both, tmp_path / "runs", table, data_root=other, progress=False)
    with pytest.raises(
        ValueError, match=rf"`data_root` must be of .*none.seed-0' was trained on, {first}, got {other}"
    ):
        run_study(one, tmp_path / "runs", tmp_path / "new.csv", data_root=other, progress=False)
    old = read_table(table)
    write_table(table, old.assign(recipe=old.recipe.str.partition("-")[0]))
    before = table.read_bytes()
    run_study(one, tmp_path / "runs", table, data_root=other, progress=False)
    assert table.read_bytes() == before


@pytest.mark.parametrize("file", sorted(DATA.glob("study_*.csv")), ids=lambda file: file.stem)
def test_a_table_is_written_as_it_was_read_and_has_the_recipes_of_its_study(file, tmp_path):
    rows = read_table(file)
    assert write_table(tmp_path / "copy.csv", rows).read_bytes() == file.read_bytes()
    assert len(rows.drop_duplicates([*CELL, "metric", "at"])) == len(rows)
    if (name := file.stem.removeprefix("study_")) in names():
        study = load(name)
        for cell, recipe in study.recipes().items():
            known = rows[(rows.choice == study.cells[cell][0]) & (rows.variant == study.cells[cell][1])].recipe
            assert {text.partition("-")[0] for text in known} <= {recipe_hash(recipe)}, cell


def test_an_invalid_table_is_refused(tmp_path):
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"bad.csv must have the columns choice, .*, got a, b\."):
        read_table(tmp_path / "bad.csv")
    assert read_table(tmp_path / "absent.csv").empty


@pytest.mark.parametrize("name", names())
def test_a_study_can_be_planned_and_its_stored_models_are_as_its_labels_say(name):
    study, built = load(name), read_built(DATA, name)
    recipes = study.recipes()
    assert study.question.endswith("?") and study.seconds > 0
    assert len({recipe_hash(recipe) for recipe in recipes.values()}) == len(recipes), "two choices are equal"
    groups = {name for name, facts in study.expects.items() if isinstance(facts, dict)}
    assert groups <= {*study.choices, *study.variants}
    assert [*built] == [*study.cells.values()], "run: python -m evidence.results"
    for cell, facts in built.items():
        for text, says in LABELS.items():
            for match in re.finditer(text, ", ".join(cell)):
                assert differences(facts, says(*match.groups())) == [], cell
    rows = read_table(DATA / f"study_{name}.csv")
    for (choice, variant), of in rows.groupby(["choice", "variant"]):
        assert {*of.parameters} == {int(built[choice, variant]["parameters"])}


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_the_models_of_a_study_are_as_stored_and_as_it_expects(name):
    study = load(name)
    for cell, facts in read_built(DATA, name).items():
        recipe = study.recipes()[", ".join(filter(None, cell))]
        of_data = {"camvid": {"channels": 3, "num_classes": 11, "class_names": ["class"] * 11}}
        channels = 3 if name in ("lape_place_cifar10", "lape_table2") else 1
        torch.manual_seed(0)
        model = build_model(recipe, **of_data.get(name, {"channels": channels, "num_classes": 10}))
        today = facts_of(recipe, model, int(facts["images"]))
        stored = {**facts, "std": float(facts["std"])} if facts["std"] else {**facts}
        for expected in (stored, study.expected(*cell)):
            assert differences(today, expected) == [], f"{cell}: `expects`, or run python -m evidence.results"
        assert recipe.limit_train in (None, int(facts["images"]))


def facts_in(choice):
    """Return the facts of a model with these changed values of the recipe."""
    one = dataclasses.replace(SMALL, choices={"x": choice}, variants={"": {}}, without=())
    facts, recipes = [], one.recipes()
    inspect = lambda name, model, images: facts.append(facts_of(recipes[name], model, images))  # noqa: E731
    check_choices(plan(recipes, (0,), "nowhere"), inspect=inspect)
    return facts[0]


@pytest.mark.parametrize(
    ("choice", "expects", "message"),
    [
        (LITE, {"std": 0.02}, r"std 0\.02, got 0\.2\d+"),
        (LITE | {"img_size": (28, 28)}, {"grid": "8 x 8"}, "grid 8 x 8, got 7 x 7"),
        (
            {"encoding": "peg(layers=4)"},
            {"encoding": "peg(layers=2)"},
            r"encoding peg\(layers=2\), got peg\(layers=4\)",
        ),
        ({"encoding": "learnable(std=1)", "model_kwargs": ()}, {"std": 1.0}, r"std 1\.0, got 0\.8\d+"),
        ({"encoding": "rope"}, {"std": 0.02}, "std 0.02, got none"),
        ({"encoding": "peg + learnable"}, {"encoding": "peg"}, r"encoding peg, got peg \+ learnable"),
        ({"joining": "lape_sharing"}, {"joining": "lape"}, "joining lape, got lape_sharing"),
        ({"joining": "lape"}, {"joining": "lape(decomposition='w')"}, r"joining .*'w'\), got lape"),
        ({"model_kwargs": ("depth=4",)}, {"layers": 24}, "layers 24, got 4"),
        ({"limit_train": 40}, {"images": 20, "epochs": 2}, "images 20, got 40; epochs 2, got 1"),
        ({"global_pool": "avg"}, {"global_pool": "token"}, "global_pool token, got avg"),
        (
            {"model": "posmlp_nano_32", "img_size": (32, 32), "encoding": "ggqpe", "model_kwargs": ("windows=[4,4]",)},
            {"windows": "8 x 8"},
            "windows 8 x 8, got 4 x 4",
        ),
    ],
)
def test_a_model_that_is_not_as_expected_is_refused_before_training(choice, expects, message, tmp_path):
    one = dataclasses.replace(SMALL, choices={"x": choice}, variants={"": {}}, without=(), expects={"x": expects})
    with pytest.raises(ValueError, match=rf"`expects` must be what is built: 'x' must have {message}\."):
        run_study(one, tmp_path, tmp_path / "table.csv", progress=False)
    assert [*tmp_path.iterdir()] == []
    facts = facts_in(choice)
    built = {name: float(facts[name]) if name == "std" and facts[name] else facts[name] for name in expects}
    assert differences(facts, built) == []


def test_a_peg_after_the_last_layer_has_no_effect_as_its_study_says():
    recipes = load("cpvt_forms").recipes()
    without_effect = {}
    for name in ("PEG at 0", "PEG at 3", "PEG at 0 to 3"):
        model = build_model(recipes[name], num_classes=10).eval()
        model(torch.rand(1, 1, *model.img_size)).sum().backward()
        gradients = {key: p.grad.abs().max().item() for key, p in model.position.named_parameters() if "weight" in key}
        without_effect[name] = [value == 0 for value in gradients.values()]
    assert without_effect == {"PEG at 0": [False], "PEG at 3": [True], "PEG at 0 to 3": [False, False, False, True]}


def test_the_command_lists_the_studies_and_runs_one(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []
    monkeypatch.setattr("evidence.studies.__main__.run_study", lambda *args, **kwargs: calls.append((args, kwargs)))
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == names() and not calls
    assert "36 of 36 runs measured, about 45 min 0 s on one core." in lines[0]
    main(["lape_epochs", "--quick"])
    main(["lape_epochs", "--seeds", "3", "4"])
    (quick, _), (runs, _) = (call for call in calls)
    assert quick[0].seeds == (0,) and quick[2] == Path("runs/study-lape_epochs-quick/study_lape_epochs.csv")
    assert runs[0].seeds == (3, 4) and runs[2] == DATA / "study_lape_epochs.csv"
    with pytest.raises(ValueError, match=r"`study` must be one of camvid, .*; got 'lape_epoch'; did you mean"):
        main(["lape_epoch"])


def test_a_study_may_finish_the_seeds_of_a_variant_before_the_next(tmp_path):
    order = {}
    for first in (False, True):
        study = dataclasses.replace(SMALL, variant_first=first, seeds=(0, 1))
        missing = studies.missing_runs(study, read_table(tmp_path / "absent.csv"), tmp_path, study.recipes())
        order[first] = [(study.cells[run.choice], run.recipe.seed) for run in missing]
    none, learnable, other = ("none", "a"), ("learnable", "a"), ("learnable", "b")
    assert order[False] == [(cell, seed) for seed in (0, 1) for cell in (none, learnable, other)]
    assert order[True] == [(cell, seed) for seed in (0, 1) for cell in (none, learnable)] + [(other, 0), (other, 1)]


def test_a_deadline_keeps_what_is_done_and_the_same_command_continues(done, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "runs/study-small"
    table = shutil.copytree(done[0], folder) / "study_small.csv"
    complete = read_table(table)
    write_table(table, complete[complete.variant != "b"])
    shutil.rmtree(folder / "learnable--b")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evidence.studies.__main__.load", lambda name: SMALL)

    def train_until_stopped(runs, *_, **__):
        time.sleep(60)

    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(studies, "train_runs", train_until_stopped)
        main(["small", "--output", str(folder), "--minutes", "0.005"])
    assert f"stopped with 2 of 3 runs; the same command continues; wrote {folder}" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is handler
    main(["small", "--output", str(folder), "--minutes", "5"])
    assert capsys.readouterr().out == f"wrote {folder / 'study_small.csv'}\n"
    assert read_table(table)[["choice", "value"]].equals(complete[["choice", "value"]])


def test_copies_of_cifar_are_read_only_if_they_are_accepted(tmp_path, monkeypatch):
    for name in ("train_list", "test_list", "meta"):
        monkeypatch.setattr(CIFAR10, name, getattr(CIFAR10, name))
    (folder := tmp_path / CIFAR10.base_folder).mkdir()
    images = {"data": np.full((2, 3072), 7, np.uint8), "labels": [3, 4]}
    for file, _ in CIFAR10.train_list + CIFAR10.test_list:
        (folder / file).write_bytes(pickle.dumps(images, 2))
    (folder / CIFAR10.meta["filename"]).write_bytes(pickle.dumps({CIFAR10.meta["key"]: [*"abcdefghij"]}, 2))
    with pytest.raises(FileNotFoundError, match="whole and undamaged"):
        load_dataset("cifar10", "train", tmp_path)
    studies.accept_copies()
    copies, info = load_dataset("cifar10", "train", tmp_path)
    assert len(copies) == 10 and (copies.pixels == 7).all() and info.class_names == (*"abcdefghij",)
