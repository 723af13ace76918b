"""An evaluation of a language model counts every token once."""

import math

import pytest
import torch

from graticule.lab.data.text_module import PADDING
from graticule.lab.tasks.language import LanguageModeling
from graticule.lab.tasks.options import TextRecipe
from graticule.lab.training.validation import held_out
from in_turn import in_turn
from tiny import draw

CONTEXT, TOKENS = 16, 208
SMALL = {"limit_train": 4, "limit_test": TOKENS // CONTEXT, "eval_batch_size": 4, "context": CONTEXT}


def built(**options):
    """Return a task, its data, and a small model."""
    task = LanguageModeling(
        TextRecipe(model="lm_nano", model_kwargs=("embed_dim=24", "num_heads=3", "depth=2"), **SMALL, **options)
    )
    data = task.build_data()
    return task, data, task.build_model(task.describe(data)).eval()


@torch.no_grad()
def naive_loss(model, data) -> float:
    """Compute nats per token, window by window, from the outputs of the model."""
    nats = []
    for inputs, targets in data.eval_dataloader(CONTEXT):
        for window, answers in zip(inputs, targets, strict=True):
            p = model(window[None])[0].double().softmax(-1)
            nats += [-math.log(p[n, token]) for n, token in enumerate(answers.tolist()) if token != PADDING]
    assert len(nats) == TOKENS
    return math.fsum(nats) / TOKENS


@in_turn(
    ("encoding", "joining"),
    [("learnable", "lape"), ("relative_bias", "default"), ("sinusoidal_1d", "lape"), ("rope_1d", "default")],
)
def test_the_loss_is_that_of_the_model_window_by_window(encoding, joining):
    task, data, model = built(encoding=encoding, joining=joining)
    model = draw(model).double()
    result = held_out(task, model, data, progress=False)
    assert result.examples == TOKENS and result.loss == pytest.approx(naive_loss(model, data), abs=1e-6)
    assert result.score == pytest.approx(result.loss / math.log(2) * TOKENS / data.num_bytes("test"))


def test_a_uniform_model_needs_the_logarithm_of_the_vocabulary_and_one_with_nan_weights_has_no_score():
    task, data, model = built()
    for parameter in model.parameters():
        parameter.data.zero_()
    assert held_out(task, model, data, progress=False).loss == pytest.approx(math.log(257), rel=1e-6)
    model.norm.weight.data.fill_(math.nan)
    model.norm.bias.data.fill_(math.nan)
    result = held_out(task, model, data, progress=False)
    assert math.isnan(result.score) and math.isnan(result.loss) and result.examples == TOKENS
