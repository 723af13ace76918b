"""The commands for gated MLPs: output and error messages."""

import json
from pathlib import Path

import numpy as np
import pytest

from commands import refused, run_command
from graticule.analysis.mixing import mixing_maps, mixing_parts
from graticule.lab.cli import main
from graticule.lab.tasks.options import Recipe
from graticule.lab.training.run import Run
from in_turn import in_turn


def trained(folder: Path, *arguments: str) -> Run:
    """Train a quick run; fails if the run does not exist afterwards."""
    short = ("--quick", "--limit-train", "16", "--epochs", "1", "--warmup-epochs", "0")
    main(["train", *arguments, *short, "--output", str(folder)])
    return Run.open(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, plain_run) -> dict[str, Run]:
    """Train a quick run per family: two stages of 2 and 4 layers with 4 and 8 groups, and 6 layers; and a ViT."""
    root = tmp_path_factory.mktemp("runs")
    gated = {name: trained(root / name, f"digits_{name}") for name in ("posmlp", "gmlp")}
    return {**gated, "vit": plain_run}


def rows(out: str) -> list[list[str]]:
    """Return the cells of the rows of a table that start with the number of a layer."""
    return [line.split() for line in out.splitlines() if line[:1].isdigit()]


@pytest.mark.usefixtures("quick_figures")
def test_mixing_draws_figures_and_prints_a_row_per_layer_of_the_best_weights(capsys, tmp_path, runs):
    model, folder = runs["posmlp"].model(), tmp_path / "new"
    code, out, err = run_command(capsys, "analyze", "mixing", runs["posmlp"].folder, "--output", folder)
    assert code == 0, err
    names = ["mixing-bias.png", "mixing-reach.png", "mixing.npz", "mixing.png"]
    assert sorted(path.name for path in folder.iterdir()) == names and all(str(folder / name) in out for name in names)
    maps, table = mixing_maps(model), rows(out)
    assert out.splitlines()[0] == "posmlp" and [row[0] for row in table] == ["0", "1", "2", "3", "4", "5"]
    assert [row[1:3] for row in table] == [["8x8", "4"]] * 2 + [["4x4", "8"]] * 4
    assert [row[3:5] for row in table] == [[f"{m.distance():.2f}", f"{m.non_locality()[0]:.3f}"] for m in maps]
    assert [" ".join(row[5:]) for row in table] == ["4 of 4"] * 2 + ["8 of 8"] * 4
    with np.load(folder / "mixing.npz", allow_pickle=False) as arrays:
        for layer in maps:
            np.testing.assert_array_equal(arrays[f"layer{layer.layer}_weights"], layer.weights)
            np.testing.assert_array_equal(arrays[f"layer{layer.layer}_bias"], layer.bias)


def test_mixing_draws_both_parts_of_lrpe_m_for_the_layers_that_it_draws(capsys, tmp_path, quick_figures):
    run = trained(tmp_path / "run", "digits_posmlp", "--encoding", "lrpe_m")
    chosen = ("--layers", 1, 4, "--query", "1x2", "--output", tmp_path)
    code, out, _ = run_command(capsys, "analyze", "mixing", run.folder, *chosen)
    assert code == 0 and str(tmp_path / "mixing-parts.png") in out
    with np.load(tmp_path / "mixing.npz", allow_pickle=False) as arrays:
        assert {name for name in arrays if "dense" in name} == {"layer1_dense", "layer4_dense"}
        for layer in mixing_parts(run.model(), layers=[1, 4]):
            np.testing.assert_array_equal(arrays[f"layer{layer.layer}_relative"], layer.relative)


def test_mixing_of_two_runs_numbers_their_files(capsys, tmp_path, runs, quick_figures):
    folders = [runs["posmlp"].folder, runs["gmlp"].folder]
    chosen = ("--layers", 0, "--groups", 0, "--output", tmp_path)
    code, out, _ = run_command(capsys, "analyze", "mixing", *folders, *chosen)
    expected = {f"mixing{kind}-{n}.{end}" for kind, end in (("", "png"), ("-bias", "png"), ("", "npz")) for n in (1, 2)}
    assert code == 0 and {path.name for path in tmp_path.iterdir()} == {*expected, "mixing-reach.png"}
    lines = out.splitlines()
    assert lines.index("posmlp") < lines.index("gmlp") and len(rows(out)) == 2
    with np.load(tmp_path / "mixing-2.npz") as arrays:
        assert arrays["layer0_weights"].shape == (1, 7, 7)


@in_turn(
    ("arguments", "message"),
    [
        ("POSMLP --layers 6", "`layers` must be from 0 to 5"),
        ("POSMLP --layers -1", "`layers` must be from 0 to 5"),
        ("POSMLP --groups 8", "`groups` must be from 0 to 7"),
        ("POSMLP --groups -1", "`groups` must be from 0 to 7"),
        ("POSMLP --query abc", "`query` must be ROWxCOLUMN, such as 0x3, got 'abc'"),
        ("POSMLP --query 3", "`query` must be ROWxCOLUMN"),
        ("POSMLP --query -1x0", "`query` must be a (row, column) inside the"),
        ("POSMLP --query 7x7", "inside the 4 x 4 tokens that stage 1 mixes, got (7, 7)"),
        ("POSMLP --img-size 30", "nearest sizes are 24 and 32"),
        (
            "POSMLP --img-size large",
            "must be a sequence of whole numbers, as in --img-size PIXELS ..., got 'large'",
        ),
        ("POSMLP POSMLP", "`models` must differ"),
        ("POSMLP ./nowhere", "'./nowhere', which does not exist"),
        ("POSMLP GMLP --groups 1", "`groups` must be from 0 to 0"),
        ("VIT", "must mix its tokens by position, as gMLP and PosMLP do, got VisionTransformer"),
        ("POSMLP VIT", "must mix its tokens by position"),
    ],
)
def test_wrong_arguments_of_mixing_are_refused_and_nothing_is_written(
    capsys, tmp_path, runs, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    folders = {name.upper(): run.folder for name, run in runs.items()}
    assert message in refused(capsys, "analyze", "mixing", *(folders.get(word, word) for word in arguments.split()))
    assert not list(tmp_path.iterdir())


# train, with arguments of the backbone and forms of the encoding


def test_the_recipe_of_a_run_folder_is_the_one_that_was_typed(capsys, tmp_path):
    encoding = "learnable + ggqpe(form='gamma', bias_start=0.5)"
    typed = ["--encoding", encoding, "--train-share", "0.5"]
    typed += ["--model-kwargs", "gate_norm=true", "embed_dim=16"]
    run = trained(tmp_path / "run", "digits_posmlp", *typed)
    written = json.loads(run.recipe_file.read_text())["recipe"]
    recipe = Recipe.from_dict(written)
    assert recipe == run.recipe() and recipe.to_dict() == written
    assert recipe.encoding == encoding
    assert recipe.train_share == 0.5
    assert recipe.backbone_arguments() == {"gate_norm": True, "embed_dim": 16}
    assert run.model().embed_dims == (16, 32)
    capsys.readouterr()
    code, _, err = run_command(capsys, "train", run.folder, "--seed", 5, "--output", tmp_path / "again")
    assert code == 0, err
    again = Run.open(tmp_path / "again").recipe().to_dict()
    assert again == {**written, "seed": 5}
