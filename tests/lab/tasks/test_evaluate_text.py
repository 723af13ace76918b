"""An evaluation counts every token once, and does not change the model."""

import math

import pytest
import torch

import graticule
from graticule.lab.data.text_module import PADDING, TextModule
from graticule.lab.tasks.language import evaluate_text
from in_turn import in_turn
from tiny import draw

CONTEXT, TOKENS = 16, 208
told = in_turn(
    ("encoding", "joining"),
    [(name, joining) for name in ("learnable", "relative_bias") for joining in ("default", "lape")]
    + [("sinusoidal_1d", "lape"), ("rope_1d", "default"), ("learnable+bucketed_bias", "default")],
)


@pytest.fixture(scope="module")
def data() -> TextModule:
    module = TextModule(context=CONTEXT, limit_train=4, limit_test=TOKENS // CONTEXT, eval_batch_size=4)
    return module


def small(data, encoding="learnable", joining="default"):
    size = {"vocab_size": data.info.vocab_size, "context": CONTEXT, "embed_dim": 24, "num_heads": 3, "depth": 2}
    return graticule.create_language_model("lm_nano", encoding=encoding, joining=joining, **size)


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


@told
def test_the_loss_is_that_of_the_model_window_by_window(data, encoding, joining):
    model = draw(small(data, encoding, joining)).double().eval()
    score = evaluate_text(model, data, progress=False)
    assert score.tokens == TOKENS and score.loss == pytest.approx(naive_loss(model, data), abs=1e-6)
    assert score.bits_per_byte == pytest.approx(score.loss / math.log(2) * TOKENS / data.num_bytes("test"))


@told
def test_the_model_is_unchanged_and_learns_on(data, encoding, joining):
    model = small(data, encoding, joining).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = torch.randint(256, (2, CONTEXT))
    logits, kind = model(tokens), type(model.position)
    evaluate_text(model, data, progress=False)
    assert model.training and model.position.training and type(model.position) is kind
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    again = model(tokens)
    assert torch.equal(again, logits)
    again.sum().backward()
    assert model.embed.weight.grad.abs().sum() > 0


def test_a_uniform_model_needs_the_logarithm_of_the_vocabulary_and_one_with_nan_weights_has_no_score(data):
    model = small(data)
    for parameter in model.parameters():
        parameter.data.zero_()
    score = evaluate_text(model, data, progress=False)
    assert score.loss == pytest.approx(math.log(data.info.vocab_size), rel=1e-6)
    model.norm.weight.data.fill_(math.nan)
    model.norm.bias.data.fill_(math.nan)
    score = evaluate_text(model, data, progress=False)
    assert math.isnan(score.bits_per_byte) and math.isnan(score.loss) and score.tokens == TOKENS


def test_a_model_of_another_kind_or_vocabulary_is_refused(data):
    with pytest.raises(ValueError, match="`model` must be a LanguageModel, got Identity"):
        evaluate_text(torch.nn.Identity(), data)
    other = graticule.create_language_model("lm_nano", 65, context=CONTEXT, depth=1)
    with pytest.raises(ValueError, match="vocabulary of the model, 65 tokens, got 257"):
        evaluate_text(other, data)
