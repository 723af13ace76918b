"""Language models are trained, saved and resumed by the same engine as backbones."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from graticule.lab.data.text_module import PADDING, TextModule
from graticule.lab.tasks.language import token_nats
from graticule.lab.tasks.options import Recipe, TextRecipe
from graticule.lab.training.loop import train
from graticule.lab.training.run import Run
from graticule.lab.training.task import list_tasks, read_recipe, task_of
from graticule.lab.training.validation import held_out
from short_runs import assert_same_end, copied, rows, stopped

#: Two epochs of three steps, the last one not full; an odd number of held-out windows.
SHORT = {
    "model": "lm_nano",
    "encoding": "learnable",
    "joining": "lape",
    "context": 16,
    "limit_train": 50,
    "limit_test": 21,
    "batch_size": 20,
    "eval_batch_size": 4,
    "epochs": 2,
    "accelerator": "cpu",
}
RICH = SHORT | {"drop_rate": 0.1, "drop_path_rate": 0.1, "ema_decay": 0.8, "warmup_epochs": 1, "accumulate": 2}


def short(**options) -> TextRecipe:
    return TextRecipe(**(SHORT | options))


def naive_bits(model, data: TextModule) -> float:
    """Compute bits per byte, window by window, in float64."""
    model = model.double().eval()
    nats = 0.0
    with torch.inference_mode():
        for inputs, targets in data.eval_dataloader(data.size):
            for text, words in zip(inputs, targets, strict=True):
                chances = model(text[None])[0].softmax(-1)
                nats -= sum(float(chances[place, word].log()) for place, word in enumerate(words) if word != PADDING)
    return nats / math.log(2) / data.num_bytes("test")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """Train a short run; tests must not change its folder."""
    return train(short(), tmp_path_factory.mktemp("short") / "run", progress=False)


def test_bits_per_byte_are_those_of_a_naive_pass_over_the_held_out_text(run):
    result = run.result()
    assert result["last_bpb"] == pytest.approx(naive_bits(run.model(checkpoint="last"), run.data()), abs=1e-5)
    assert result["best_bpb"] == min(float(row["val_bpb"]) for row in rows(run))


def test_the_loss_is_the_mean_of_minus_the_log_of_the_next_tokens_chance():
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 5, 7, dtype=torch.float64), torch.randint(0, 7, (2, 5))
    targets[1, 4] = PADDING
    nats = token_nats(logits, targets)
    for text, place in ((0, 0), (0, 4), (1, 3)):
        by_hand = -math.log(float(logits[text, place].softmax(-1)[targets[text, place]]))
        assert nats[text, place].item() == pytest.approx(by_hand, abs=1e-6)
    assert nats[1, 4] == 0


def test_a_score_is_exact_though_the_model_is_in_half_precision(tmp_path):
    run = train(short(precision="bf16-true", limit_test=300), tmp_path / "run", progress=False)
    model, data = run.model(checkpoint="last").bfloat16(), run.data()
    nats = 0.0
    with torch.inference_mode():
        for inputs, targets in data.eval_dataloader(data.size):
            nats += token_nats(model(inputs), targets).sum(dtype=torch.float64).item()
    assert run.result()["last_bpb"] == pytest.approx(nats / math.log(2) / data.num_bytes("test"), rel=1e-6)


def test_a_uniform_model_needs_the_logarithm_of_the_vocabulary_and_one_with_nan_weights_has_no_score():
    task = task_of(short())
    data = task.build_data()
    model = task.build_model(task.describe(data)).eval()
    for parameter in model.parameters():
        parameter.data.zero_()
    assert held_out(task, model, data, progress=False).loss == pytest.approx(math.log(257), rel=1e-6)
    model.norm.weight.data.fill_(math.nan)
    result = held_out(task, model, data, progress=False)
    assert math.isnan(result.score) and math.isnan(result.loss) and result.examples == data.num_bytes("test")


def test_a_run_that_was_stopped_within_an_epoch_ends_as_one_that_was_not(tmp_path):
    recipe = TextRecipe(**RICH)
    uninterrupted = train(recipe, tmp_path / "whole", progress=False)
    run = stopped(recipe, tmp_path / "run", step=4)
    assert not run.finished
    assert_same_end(train(run.recipe(), run.folder, resume=True, progress=False), uninterrupted)


def test_a_recipe_read_from_json_has_its_class():
    for recipe in (short(data_root="texts", model_kwargs=("depth=2",)), Recipe(seed=3)):
        again = read_recipe(json.loads(json.dumps(recipe.to_dict())))
        assert type(again) is type(recipe) and again.to_dict() == recipe.to_dict()
    with pytest.raises(ValueError, match="`task` must be given"):
        read_recipe({"seed": 3})
    known = ", ".join(list_tasks())
    with pytest.raises(ValueError, match=f"`task` must be one of {known}; got 'langauge'"):
        read_recipe({"task": "langauge"})
    with pytest.raises(ValueError, match="img_size"):
        read_recipe({"task": "language", "img_size": [28, 28]})


def test_a_run_starts_from_one_of_another_length_and_encoding(tmp_path, capsys, run):
    first = copied(run, tmp_path / "first")
    options = {"start_from": first.folder, "context": 32, "joining": "default"}
    second = train(short(limit_train=25, lr=1e-9, min_lr=0.0, **options), tmp_path / "second", progress=False)
    started, source = load_file(second.weights), load_file(first.weights)
    torch.testing.assert_close(
        started["blocks.0.attn.qkv.weight"], source["blocks.0.attn.qkv.weight"], atol=1e-6, rtol=0
    )
    torch.testing.assert_close(started["embed.weight"], source["embed.weight"], atol=1e-6, rtol=0)
    assert "16 -> 32" in capsys.readouterr().out


def test_no_run_on_text_starts_from_a_run_on_images(tmp_path, plain_run):
    with pytest.raises(FileNotFoundError, match=r"`start_from` must be a run or a checkpoint, got .*nowhere"):
        train(short(start_from=tmp_path / "nowhere"), tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match="`start_from` must be a run on text"):
        train(short(start_from=plain_run.folder), tmp_path / "run", progress=False)
