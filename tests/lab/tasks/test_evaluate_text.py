"""An evaluation counts every token once at any length, over the same bytes, and does not change the model."""

import copy
import math

import pytest
import torch

import graticule
from graticule.lab.data.sampling import PADDING
from graticule.lab.data.text_module import TextModule
from graticule.lab.tasks.language import check_lengths, evaluate_text
from in_turn import in_turn
from tiny import draw

CONTEXT, TOKENS = 16, 208
#: Encoding, joining, and whether a table must be resampled for a longer text.
TOLD = [
    ("none", "default", False),
    ("sinusoidal_1d", "lape", False),
    ("rope_1d", "default", False),
    ("bucketed_bias", "default", False),
    ("continuous_bias", "default", False),
    ("shaw", "default", False),
    ("learnable", "default", True),
    ("learnable", "lape", True),
    ("relative_bias", "default", True),
    ("relative_bias", "lape", True),  # its norm is over the keys of the whole context
    ("learnable+bucketed_bias", "default", True),
]
TOLD = [pytest.param(*row, marks=pytest.mark.slow) if row[0] in ("shaw", "continuous_bias") else row for row in TOLD]
told = pytest.mark.parametrize(("encoding", "joining", "resampled"), TOLD)


def text(**options) -> TextModule:
    module = TextModule(context=CONTEXT, limit_train=4, limit_test=TOKENS // CONTEXT, eval_batch_size=4, **options)
    module.setup()
    return module


@pytest.fixture(scope="module")
def data() -> TextModule:
    return text()


def small(data, encoding="learnable", joining="default", **kwargs):
    size = {"vocab_size": data.info.vocab_size, "context": CONTEXT, "embed_dim": 24, "num_heads": 3, "depth": 2}
    return graticule.create_language_model("lm_nano", encoding=encoding, joining=joining, **{**size, **kwargs})


def scores(model, data, *lengths):
    return evaluate_text(model, data, lengths, progress=False)


@torch.no_grad()
def naive_loss(model, data, length) -> float:
    """Compute nats per token, window by window, from the outputs of the model."""
    nats = []
    for inputs, targets in data.eval_dataloader(length):
        for window, answers in zip(inputs, targets, strict=True):
            p = model(window[None])[0].double().softmax(-1)
            nats += [-math.log(p[n, token]) for n, token in enumerate(answers.tolist()) if token != PADDING]
    assert len(nats) == TOKENS
    return math.fsum(nats) / TOKENS


@told
def test_the_loss_is_that_of_the_model_window_by_window_at_any_length(data, encoding, joining, resampled):
    model = draw(small(data, encoding, joining)).double().eval()
    if resampled:
        with pytest.raises(ValueError, match="`tokens` must be at most 16 long"):
            model(torch.zeros(1, 40, dtype=torch.long))
    for score in scores(model, data, 1, 5, CONTEXT, 17, 40):
        reader = copy.deepcopy(model)
        if resampled and score.length > CONTEXT:
            reader.set_context(score.length)
        assert score.resampled == (resampled and score.length > CONTEXT)
        assert score.loss == pytest.approx(naive_loss(reader, data, score.length), abs=1e-6)


@told
def test_the_model_is_unchanged_and_learns_on(data, encoding, joining, resampled):
    model = small(data, encoding, joining).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = torch.randint(256, (2, CONTEXT))
    logits, kind = model(tokens), type(model.position)
    scores(model, data, 40, 7)
    assert model.training and model.position.training and type(model.position) is kind and model.context == CONTEXT
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    again = model(tokens)
    assert torch.equal(again, logits)
    again.sum().backward()
    assert model.embed.weight.grad.abs().sum() > 0


def test_a_uniform_model_needs_the_logarithm_of_the_vocabulary_per_token(data):
    model = small(data)
    for parameter in model.parameters():
        parameter.data.zero_()
    token = math.log2(data.info.vocab_size)
    for score in scores(model, data, 3, 16, 64):
        assert score.loss == pytest.approx(token * math.log(2), rel=1e-6)
        assert score.bits_per_byte == pytest.approx(token * TOKENS / data.num_bytes("test"), rel=1e-6)
    assert [bits for *_, bits in score.by_place] == pytest.approx([math.log2(257)] * 7, rel=1e-6)


def test_a_model_with_nan_weights_has_no_score_and_is_unchanged(data):
    model = small(data)
    model.norm.weight.data.fill_(math.nan)
    for score in scores(model, data, 1, 5, CONTEXT, 40):
        bits = [score.bits_per_byte, score.loss, *(bits for *_, bits in score.by_place)]
        assert all(map(math.isnan, bits)) and score.tokens == TOKENS
    assert model.norm.weight.isnan().all() and model.context == CONTEXT


def test_a_bin_has_the_bits_of_its_positions(data):
    model = small(data)

    def forward(tokens):
        logits = torch.zeros(*tokens.shape, 257)
        logits[:, 4:, 128:] = -1e9  # from the fifth position on it predicts only ASCII
        return logits

    model.forward = forward
    (score,) = scores(model, data, CONTEXT)
    assert [(first, last) for first, last, _ in score.by_place] == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16)]
    uniform = math.log2(257)
    assert [bits for *_, bits in score.by_place] == pytest.approx([uniform, uniform, uniform, 7, 7], rel=1e-6)
    assert score.bits_per_byte == pytest.approx((4 * uniform + 12 * 7) / 16, rel=1e-6)


@in_turn(
    ("lengths", "message"),
    [
        ([], r"`lengths` must be different lengths, at least one, got \[\]"),
        ([8, 4, 8], r"`lengths` must be different lengths, at least one, got \[8, 4, 8\]"),
        ([8, 0], "`lengths` must be whole numbers of at least 1, got 0"),
        ([-8], "`lengths` must be whole numbers of at least 1, got -8"),
        ([2.5], "`lengths` must be whole numbers of at least 1, got 2.5"),
        ([8, 209], "`lengths` must be at most 208, the number of held-out tokens, got 209"),
    ],
)
def test_invalid_lengths_are_refused_before_any_work(data, lengths, message):
    model = small(data).train()
    model.forward = None  # calling it would be a TypeError
    for check in (lambda: check_lengths(model, lengths, data), lambda: scores(model, data, *lengths)):
        with pytest.raises(ValueError, match=message):
            check()
    assert model.training
