"""The command line: files and output of the commands, and their error messages."""

import json
import os
import re
from pathlib import Path

import pytest
import torch

from commands import refused, run_command
from graticule.lab.tasks.options import Recipe
from graticule.lab.training.loop import train
from graticule.lab.training.run import Run
from image_files import write_folder
from in_turn import in_turn
from short_runs import copied


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Run:
    recipe = Recipe(joining="lape", limit_train=100, limit_test=40, batch_size=20, epochs=2, accelerator="cpu")
    return train(recipe, tmp_path_factory.mktemp("runs") / "trained", progress=False)


@pytest.fixture(scope="module")
def pegged(tmp_path_factory) -> Run:
    recipe = Recipe(
        encoding="peg", global_pool="avg", limit_train=40, limit_test=40, batch_size=20, epochs=1, accelerator="cpu"
    )
    return train(recipe, tmp_path_factory.mktemp("runs") / "pegged", progress=False)


# Output of the commands


def test_a_run_folder_contains_recipe_versions_seed_metrics_and_checkpoints(trained):
    described = json.loads(trained.recipe_file.read_text())
    assert described["recipe"]["joining"] == "lape" and described["recipe"]["seed"] == 0
    assert torch.__version__.startswith(described["versions"]["torch"]) and described["parameters"] > 0
    lines = trained.metrics_file.read_text().splitlines()
    assert len(lines) == 3 and lines[0].startswith("epoch,") and "val_top1" in lines[0]
    assert trained.best.is_file() and trained.last.is_file() and trained.weights.is_file()
    assert list((trained.folder / "tensorboard").glob("events*"))


def test_train_prints_its_results_and_where_they_are(capsys, tmp_path):
    code, out, err = run_command(capsys, "train", "digits_quick", "--quick", "--output", tmp_path / "run")
    assert code == 0 and "top-1" in out and str(tmp_path / "run") in out
    first, *_, last = err.splitlines()  # no terminal: one line per epoch, and no bar
    assert first.startswith("epoch 1/") and "loss" in first and last.endswith("about 0 s left") and "\r" not in err
    assert Run.open(tmp_path / "run").finished


def test_evaluate_gives_one_row_per_size_and_the_drop_against_the_training_size(capsys, tmp_path, trained):
    code, out, _ = run_command(capsys, "evaluate", trained.folder, "--sizes", "20", "28", "24x36", "--output", tmp_path)
    assert code == 0 and "28x28 *" in out and "24x36" in out and "+0.00" in out
    records = json.loads((tmp_path / "evaluation.json").read_text())
    assert [record["size"] for record in records] == [[20, 20], [28, 28], [24, 36]]
    assert records[1]["images"] == 40
    assert records[1]["top1"] == pytest.approx(trained.result()["best_top1"], abs=1e-4)
    assert (tmp_path / "evaluation.png").read_bytes().startswith(b"\x89PNG") and "\n* the training size" in out
    code, out, _ = run_command(capsys, "evaluate", trained.folder, "--sizes", "20", "--output", tmp_path)
    assert code == 0 and "*" not in out


def test_correlations_draws_a_sheet_and_prints_a_number_per_layer(capsys, tmp_path, trained):
    code, out, _ = run_command(capsys, "analyze", "correlations", trained.folder, "--output", tmp_path)
    assert code == 0 and "reach" in out and "hierarchy" not in out.lower().split("reach")[0]
    assert (tmp_path / "correlations.png").is_file() and (tmp_path / "correlations.npz").is_file()
    assert len([line for line in out.splitlines() if " after_norm " in line]) == 6
    assert "reach over the layers: a range of" in out and "p = " in out and not (tmp_path / "bias.png").exists()


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["evaluate", "RUN", "--sizes", 20], {"run", "size", "top1"}),
        (["analyze", "correlations", "RUN", "--untrained", 0], {"stage", "correlations", "verdict"}),
        pytest.param(["analyze", "attention", "RUN", "--layers", 1], {"trained"}, marks=pytest.mark.slow),
        pytest.param(["analyze", "translation", "RUN", "--count", 8], {"trained"}, marks=pytest.mark.slow),
        (["models"], {"models", "encodings", "recipes"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_json_alone_is_on_stdout_if_it_is_asked_for(capsys, tmp_path, trained, quick_figures, arguments, keys):
    words = [trained.folder if argument == "RUN" else argument for argument in arguments]
    files = [] if arguments[0] == "models" else ["--output", tmp_path]
    code, out, err = run_command(capsys, *words, *files, "--json")
    results = json.loads(out)
    assert code == 0 and keys <= set(results[0] if isinstance(results, list) else results)
    assert err.startswith("wrote ") if files else err == ""


def test_look_translation_prints_a_table_per_run_and_draws_all_runs(capsys, tmp_path, trained, pegged, quick_figures):
    options = ("--count", 8, "--shifts", "1x0", "-1x2", "--output", tmp_path)
    code, out, _ = run_command(capsys, "analyze", "translation", trained.folder, pegged.folder, *options)
    assert code == 0 and out.count("inside") == 2 and out.count("logits") == 2
    assert {path.name for path in tmp_path.iterdir()} == {"translation-1.npz", "translation-2.npz", "translation.png"}
    message = " ".join(out.split())
    assert f"{2**0.5:.2f}: the shift changes as much as another image does" in message  # of test_equivariance.py
    code, out, _ = run_command(capsys, "analyze", "translation", pegged.folder, "--count", 8, "--img-size", "20x36")
    assert code == 0 and "20x36" in out and (pegged.folder / "translation.npz").is_file()


def test_attention_draws_a_sheet_with_and_without_position(capsys, tmp_path, trained, pegged):
    chosen = ("--layers", 1, 2, "--heads", 0, "--image", 5, "--without-position", "--output", tmp_path)
    code, out, _ = run_command(capsys, "analyze", "attention", trained.folder, pegged.folder, *chosen)
    assert code == 0 and out.count("without position") == 2 and "distance" in out
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"attention.png", "attention-image.png", *(f"attention-{n}.npz" for n in range(1, 5))}
    code, *_ = run_command(
        *(capsys, "analyze", "attention", trained.folder, "--query", "0x6", "--format", "pdf"), *("--output", tmp_path)
    )
    assert code == 0 and (tmp_path / "attention-image.pdf").read_bytes().startswith(b"%PDF")
    code, *_ = run_command(capsys, "analyze", "attention", trained.folder, "--query", "cls", "--output", tmp_path)
    assert code == 0 and (tmp_path / "attention-image.png").is_file()


@in_turn(
    ("arguments", "message"),
    [
        (["analyze", "translation", "RUN", "--shifts", "down"], "`shifts`"),
        (["analyze", "translation", "RUN", "--shifts", "7x0"], "must move the image"),
        (["analyze", "translation", "RUN", "--count", 1], "`count`"),
        (["analyze", "translation", "RUN", "--count", 41], "number of test images, 40"),
        (["analyze", "translation", "RUN", "--img-size", 30], "nearest sizes are 28 and 32"),
        (["analyze", "translation", "RUN", "RUN"], "`models` must differ"),
        (["analyze", "attention", "RUN", "--layers", 6], "`layers` must be from 0 to 5, got 6"),
        (["analyze", "attention", "RUN", "--layers", -1], "`layers` must be from 0 to 5, got -1"),
        (["analyze", "attention", "RUN", "--heads", 4], "`heads`"),
        (["analyze", "attention", "RUN", "--image", 40], "`image`"),
        (["analyze", "attention", "RUN", "--query", "7x0"], "`query` must be inside the 7 x 7 patches"),
        (["analyze", "attention", "RUN", "--query", "middle"], "`query` must be ROWxCOLUMN"),
        (["analyze", "attention", "./nowhere"], "does not exist"),
        (["evaluate", "RUN", "--mode", "canvas"], "`mode` must be left out without sizes, since it has no effect"),
        (["predict", "RUN", "."], "`images` must be files, got '.', which is a folder; give ./*."),
        (["compare", "digits_quick", "--choices"], "`--choices` must have values, as in --choices CHOICE ..."),
        (["train", "digits_quick", "--img-size", "28x"], "`img_size` must be 2 whole numbers, as in --img-size N N, g"),
        (["adapt", "RUN", "--encoding", "rope", "--images", "no"], "`images` must be a folder of images, got 'no'"),
        (["evaluate", "RUN", "--sizes", "28", "large"], "`sizes`"),
        (["compare", "digits_quick", "--choices", "encoding=peg(places=[0, 6])"], "`places`"),
        (["compare", "digits_quick", "--choices", "encoding=peg + learnabel"], "did you mean 'learnable'"),
        (["train", "digits_quick", "--encoding", "peg(kernel=4)"], "`kernel` must be odd"),
        (["train", "digits_quick", "--encoding", "learnable(kernel=5)"], "must not have the option 'kernel'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    capsys, tmp_path, trained, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    words = [trained.folder if argument == "RUN" else argument for argument in arguments]
    before = sorted(trained.folder.iterdir())
    assert message in refused(capsys, *words)
    assert not list(tmp_path.iterdir()) and sorted(trained.folder.iterdir()) == before


@pytest.mark.filterwarnings("ignore:the weights are of a model with encoding")
def test_a_trained_peg_can_be_frozen_in_another_training(capsys, tmp_path, pegged):
    frozen = ("--encoding", "peg(frozen=True)", "--global-pool", "avg", "--position-from", pegged.weights)
    code, _, err = run_command(capsys, "train", "digits_quick", "--quick", *frozen, "--output", tmp_path / "run")
    assert code == 0, err
    learned = pegged.model().position.state_dict()
    again = Run.open(tmp_path / "run").model(checkpoint="last").position.state_dict()
    assert learned.keys() == again.keys() and all(torch.equal(learned[name], again[name]) for name in learned)
    code, _, err = run_command(
        capsys, "train", "digits_quick", "--quick", "--position-from", pegged.weights, "--output", tmp_path / "other"
    )
    assert code == 1 and "position parameters" in err and not (tmp_path / "other" / "recipe.json").exists()


def test_compare_makes_one_table_and_resumes_where_it_stopped(capsys, tmp_path, quick_figures):
    command = ["compare", "digits_quick", "--choices", "joining=default", "joining=lape(layers=3)"]
    command += ["--seeds", "0", "1", "--quick", "--output", tmp_path]
    code, out, _ = run_command(capsys, *command, "--list")
    assert code == 0 and out.splitlines()[-1].endswith("new") and not list(tmp_path.iterdir())
    code, out, _ = run_command(capsys, *command)
    assert code == 0 and "joining=lape(layers=3)" in out
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    assert [len(scores) for scores in comparison["top1"].values()] == [2, 2]
    default, lape = (comparison["parameters"][f"joining={name}"] for name in ("default", "lape(layers=3)"))
    assert lape - default == 3 * 2 * 64
    assert comparison["command"].startswith(
        "graticule compare digits_quick --choices joining=default 'joining=lape(layers=3)'"
    )
    assert {f"comparison.{kind}" for kind in ("md", "csv", "png")} <= {path.name for path in tmp_path.iterdir()}
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("weights.safetensors")}
    assert len(before) == 4
    code, again, err = run_command(capsys, *command, "--json")
    assert json.loads(again)["comparison"]["top1"] == comparison["top1"] and err.startswith("wrote ")
    for name in re.split(", | and ", err.splitlines()[-1].removeprefix("wrote ")):
        assert Path(name).is_file(), name
    code, again, _ = run_command(capsys, *command)
    assert code == 0 and {path: path.stat().st_mtime_ns for path in tmp_path.rglob("weights.safetensors")} == before
    assert again == out
    fewer = [argument for argument in command if argument != "joining=default"]
    err = refused(capsys, *fewer)
    assert "which also has joining=default" in err and "--replace" in err


def test_models_lists_all_that_can_be_chosen(capsys):
    code, out, _ = run_command(capsys, "models")
    assert code == 0 and all(
        name in out for name in ("sinusoidal_2d", "lape_sharing", "channel_norm", "cifar100", "digits_quick")
    )


def test_models_prints_the_size_of_a_vit_as_computed_by_hand(capsys):
    # 196 patches of 16 x 16 x 3; per block 12 d^2 per token in linear layers, 2 N^2 d in attention; the head
    dim, tokens, patches = 192, 197, 196
    expected = patches * 768 * dim + 12 * (12 * tokens * dim**2 + 2 * tokens**2 * dim) + dim * 1000
    code, out, _ = run_command(capsys, "models", "vit_tiny_patch16_*", "--json")
    assert code == 0 and json.loads(out)["vit_tiny_patch16_224"]["multiply_adds"] == expected


def test_models_lists_language_models_with_their_sizes_on_bytes(capsys):
    code, out, _ = run_command(capsys, "models", "lm_*")
    head, _, *rows = (line.split("  ") for line in out.split("\n\n")[0].splitlines())
    assert code == 0 and [cell.strip() for cell in head if cell] == [
        *("model", "parameters", "dim", "layers", "tokens", "context")
    ]
    expected = []
    for name, dim, layers in (("nano", 64, 4), ("tiny", 128, 6), ("small", 384, 8), ("base", 768, 12)):
        # embedding and table; qkv, projection and MLP of every block with their biases and norms; the last norm
        count = (257 + 128) * dim + layers * (12 * dim**2 + 13 * dim) + 2 * dim
        expected.append([f"lm_{name}", f"{count / 1e6:.2f} M", str(dim), str(layers), "257", "128"])
    assert [[cell.strip() for cell in row if cell] for row in rows] == expected


def test_models_finds_a_word_in_every_kind_of_name_and_in_the_lines_on_recipes(capsys):
    code, out, _ = run_command(capsys, "models", "LaPE", "--json")
    matches = json.loads(out)
    assert code == 0 and matches["joinings"] == ["lape_sharing", "lape"] and "encodings" not in matches
    assert {"cvt_cifar10", "seg_tiny_mask_ade20k"} <= matches["recipes"].keys()
    code, out, _ = run_command(capsys, "models", "posmlp_n", "glrpe", "digits_posmlp")
    assert code == 0 and out.startswith("model ") and "\nposmlp_nano_32 " in out and "\n  glrpe\n" in out
    assert "\n  digits_posmlp  A small PosMLP" in out
    code, out, _ = run_command(capsys, "models", "vit_nano_patch4_28")  # a model alone, not all that contain its name
    assert code == 0 and len(out.splitlines()) == 3
    assert "`patterns` must match a name, got 'detr_tiny'; did you mean" in refused(capsys, "models", "detr_tiny")


def test_a_recipe_that_is_none_is_answered_with_those_whose_line_has_the_word(capsys):
    said = refused(capsys, "train", "lape")
    assert "got 'lape'; recipes with it: cct_cifar10, cct_cifar100, ceit_tiny_imagenet" in said
    assert "got 'digits_quik'; did you mean 'digits_quick'" in refused(capsys, "train", "digits_quik")


def test_unknown_names_are_answered_with_the_nearest(capsys):
    for pattern, hint in (("deit_tny*", "mean deit_tiny*"), ("zzz*", "models lists all.")):
        err = refused(capsys, "models", pattern)
        assert repr(pattern) in err and hint in err and len(err) < 200
    assert "did you mean 'evaluate'" in refused(capsys, "evalute")
    assert "did you mean 'digits_quick'" in refused(capsys, "train", "digits_quik")


# Recipes


def test_the_deit_recipe_runs_on_an_image_folder_and_names_a_broken_image(capsys, tmp_path):
    root = write_folder(tmp_path / "data", per_class=4)
    (root / "train" / "cat" / "1.JPEG").write_bytes(b"no image")
    command = ["train", "deit_tiny_imagenet", "--quick", "--data-root", root, "--output", tmp_path / "run"]
    code, out, _ = run_command(capsys, *command, "--epochs", "1", "--warmup-epochs", "0", "--aug-repeats", "1")
    assert code == 0 and "1 broken images were left out" in out and "1.JPEG" in out
    recipe = Run.open(tmp_path / "run").recipe()
    assert recipe.mixing.mixup == 0.8 and recipe.augmentation.rand_augment and recipe.img_size == (224, 224)


def test_a_recipe_of_ones_own_is_a_file_with_a_function(capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from graticule.lab.tasks import Recipe\n\ndef recipe():\n    return Recipe(joining='shared')\n")
    code, *_ = run_command(capsys, "train", file, "--quick", "--output", tmp_path / "run")
    assert code == 0 and Run.open(tmp_path / "run").recipe().joining == "shared"
    file.write_text("recipe = 3\n")
    assert "recipe()" in refused(capsys, "train", file)


# Errors are named before any work


#: Recipe -> options of train, and what the error says.
REFUSED = {
    "digits_quick": [
        ("--img-size 30 28", "`img_size`", "30", "28", "32"),
        ("--joining lape(layers=9)", "`layers`", "6", "9"),
        ("--joining lape(layers=0)", "`layers`", "0"),
        ("--dataset gym_place --data-root .", "`data_root` must be left out", "since it has no effect"),
        ("--joining unshared --encoding sinusoidal_1d", "unshared", "sinusoidal_1d"),
        ("--encoding learnabel", "'learnabel'", "did you mean 'learnable'"),
        ("--joining laep", "'laep'", "did you mean 'lape'"),
        ("--model vit_nano_patch4_82", "did you mean 'vit_nano_patch4_28'"),
        ("--dataset digit", "did you mean 'digits'"),
        ("--epocs 3", "--epocs", "did you mean --epochs", "graticule train digits_quick --help-all"),
        ("--augmentation.erase 0.5", "did you mean --augmentation.erasing"),
        ("--epochs 0", "`epochs`", "0"),
        ("--epochs three", "graticule: error: `epochs` must be a whole number, got 'three'."),
        ("--optimizer adamww", "optimizer", "adamww"),
        ("--patch-size 5", "`img_size`", "5"),
        ("--lr nan", "`lr` must be a finite number, got nan"),
        ("--seed 4294967296", "`seed` must be less than 4294967296"),
        ("--warmup-lr -5", "`warmup_lr` must be at least 0"),
        ("--min-lr -1", "`min_lr` must be at least 0"),
        ("--weight-decay -1", "`weight_decay` must be at least 0"),
        ("--clip-grad -1", "`clip_grad` must be greater than 0"),
        ("--epochs 1000000000", "`epochs` must be at most 100000"),
        ("--img-size 70000 28", "`img_size[0]` must be at most 65536"),
        ("--mixing.prob nan", "`mixing.prob` must be a finite number"),
        ("--mixing.mixup nan", "`mixing.mixup` must be a finite number"),
        ("--augmentation.color-jitter inf", "`augmentation.color_jitter` must be a finite number"),
    ],
    "pydoc_quick": [
        ("--dataset text_file", "`data_root`"),
        ("--dataset digits", "`dataset`", "pydoc, text_file"),
        ("--dataset pydocs", "did you mean 'pydoc'"),
        ("--encoding peg", "encoding", "would use later tokens"),
        ("--encoding sgu", "encoding"),
        ("--encoding rotary_1", "did you mean 'rope_1d'"),
        ("--model vit_nano_patch4_28", "lm_nano"),
        ("--model lm_tyni", "did you mean 'lm_tiny'"),
        ("--model-kwargs depht=3", "`model_kwargs`", "did you mean 'depth'"),
        ("--model-kwargs depth=[2]", "`depth` must be a whole number"),
        ("--context 0", "`context` must be at least 1"),
        ("--context 99999999", "`context`", "training tokens"),
        ("--drop-rate 1", "`drop_rate`"),
        ("--start-from nowhere", "nowhere"),
    ],
    "digits_posmlp": [
        ("--model-kwargs windws=[4,2]", "did you mean 'windows'"),
        ("--model-kwargs windows", "must be different NAME=VALUE"),
        ("--model-kwargs windows=", "must be different NAME=VALUE"),
        ("--model-kwargs =[4,2]", "must be different NAME=VALUE"),
        ("--model-kwargs windows=[4,2] windows=[8,4]", "must be different NAME=VALUE"),
        ("--model-kwargs windows=[4,2", "VALUE is JSON or a word, and not null, such as windows=[28,14,14,7]"),
        ("--model-kwargs windows=[4,two]", "VALUE is JSON or a word"),
        ("--model-kwargs drop_rate=NaN", "`model_kwargs` must be valid for posmlp_nano_32"),
        ("--model-kwargs windows=null", "and not null"),
        ("--model-kwargs windows=4", "`model_kwargs` must be valid for posmlp_nano_32"),
        ("--model-kwargs act_layer=GELU", "`model_kwargs` must be one of embed_dim"),
        ("--model-kwargs img_size=64", "`model_kwargs` must be one of embed_dim, depths, windows"),
        ("--model-kwargs patch_size=2", "`model_kwargs` must be one of"),
        ("--model-kwargs num_classes=3", "`model_kwargs` must be one of"),
        ("--model-kwargs encoding=sgu", "`model_kwargs` must be one of"),
        ("--model-kwargs windows=[4,2,1]", "each of the 2 stages, got 3, 2, 2 and 2"),
        ("--model-kwargs combine=mul", "`combine` must be one of gate, add, concat, nonsplit; got 'mul'"),
        ("--patch-size 2", "`patch_size` must be left out: posmlp_nano_32 has no such argument, got 2"),
        ("--img-size 36 36", "nearest sizes are 32 and 40"),
        ("--encoding peg", "`mixing`"),
        ("--encoding glrpp", "did you mean 'glrpe'"),
        ("--encoding ggqpe(biass=False)", "did you mean 'bias'"),
        ("--encoding ggqpe(form='beta')", "gamma_gamma_t"),
        ("--train-share 0", "`train_share` must be greater than 0"),
    ],
}


@pytest.mark.parametrize("recipe", REFUSED)
def test_a_wrong_option_of_train_is_named_and_nothing_is_written(capsys, tmp_path, recipe):
    for options, *texts in REFUSED[recipe]:
        err = refused(capsys, "train", recipe, "--quick", "--output", tmp_path / "run", *options.split())
        assert all(text in err for text in texts), (options, err)
        assert not (tmp_path / "run").exists()


#: Recipe -> options of compare, and what the error says.
REFUSED_CHOICES = {
    "pydoc_quick": [
        ("--sizes 20", "`sizes` must be left out with the task language"),
    ],
    "digits_quick": [
        ("--sizes 30 --choices encoding=peg", "`img_size`"),
        ("--choices encoding=pge", "did you mean 'peg'"),
    ],
    "digits_posmlp": [
        ("--choices encoding=ggqpe model_kwargs=windws=[4,2]", "did you mean 'windows'"),
        ("--choices encoding=ggqpe model_kwargs=windows=[4,2", "`model_kwargs` must be different NAME=VALUE"),
        ("--choices encoding=ggqpe model_kwargs=windows=[4,2],img_size", "`choices` must be like"),
        ("--choices encoding=ggqpe model_kwargs=img_size=[32,32]", "`model_kwargs` must be one of"),
        ("--choices encoding=ggqpe encoding=ggqpe(forn='alpha')", "did you mean 'form'"),
        ("--choices encoding=ggqpe patch_size=2", "`patch_size` must be left out"),
        ("--choices encoding=ggqpe encoding=relative_bias", "`encoding` must be one that PosMlp can use"),
    ],
}


@pytest.mark.parametrize("recipe", REFUSED_CHOICES)
def test_wrong_options_of_compare_are_named_before_any_training(capsys, tmp_path, recipe):
    for options, text in REFUSED_CHOICES[recipe]:
        words = options.split() if "--choices" in options else ["--choices", "joining=default", *options.split()]
        command = ("compare", recipe, "--quick", "--seeds", 0, "--output", tmp_path / "out", *words)
        assert text in refused(capsys, *command) and not (tmp_path / "out").exists()


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_checkpoint_that_would_run_code_is_named(capsys, tmp_path, trained):
    sign, copy = tmp_path / "it-ran", copied(trained, tmp_path / "run")
    torch.save({"model": Hostile(f"touch {sign}")}, copy.best)
    err = refused(capsys, "evaluate", copy.folder)
    assert str(copy.best) in err and "run code" in err and not sign.exists()
