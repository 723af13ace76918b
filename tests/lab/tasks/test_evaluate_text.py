"""An evaluation counts every token once at any length, over the same bytes, and does not change the model."""

import copy
import math

import numpy as np
import pytest
import torch

import graticule
from graticule.encodings.forms.absolute import JoinedPosition
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
    found = []
    for inputs, targets in data.eval_dataloader(length):
        for window, answers in zip(inputs, targets, strict=True):
            p = model(window[None])[0].double().softmax(-1)
            found += [-math.log(p[n, token]) for n, token in enumerate(answers.tolist()) if token != PADDING]
    assert len(found) == TOKENS
    return math.fsum(found) / TOKENS


@told
def test_the_loss_is_that_of_the_model_window_by_window_at_any_length(data, encoding, joining, resampled):
    model = draw(small(data, encoding, joining)).double().eval()
    found = scores(model, data, 1, 5, CONTEXT, 40)
    longer = copy.deepcopy(model)
    if resampled:
        with pytest.raises(ValueError, match="`tokens` must be at most 16 long"):
            model(torch.zeros(1, 40, dtype=torch.long))
        longer.set_context(40)
    for score, reader in zip(found, (model, model, model, longer), strict=True):
        assert score.loss == pytest.approx(naive_loss(reader, data, score.length), abs=1e-6)


@told
def test_only_tables_are_resampled_beyond_the_context(data, encoding, joining, resampled):
    found = scores(small(data, encoding, joining), data, 7, CONTEXT, 17, 40)
    assert [score.resampled for score in found] == [False, False, resampled, resampled]


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


def test_every_length_has_every_token_and_the_same_bytes(data):
    model = draw(small(data, "bucketed_bias"))
    lengths = (1, 2, 7, 16, 100, TOKENS)
    for score, length in zip(scores(model, data, *lengths), lengths, strict=True):
        assert (score.length, score.tokens) == (length, TOKENS)
        bits = score.loss * score.tokens / math.log(2)
        assert bits / score.bits_per_byte == pytest.approx(data.num_bytes("test"), rel=1e-12)


def test_the_weighted_mean_over_places_is_that_of_the_text(data):
    model = draw(small(data, "rope_1d"))
    for score in scores(model, data, 1, 7, 16, 100, TOKENS):
        places = np.arange(TOKENS) % score.length + 1
        weights = [((first <= places) & (places <= last)).sum() for first, last, _ in score.by_place]
        mean = np.average([bits for _, _, bits in score.by_place], weights=weights)
        assert sum(weights) == data.num_bytes("test")
        assert mean == pytest.approx(score.bits_per_byte, rel=1e-12)


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


def test_bins_of_positions_double_in_size(data):
    found = {score.length: score.by_place for score in scores(small(data, "none"), data, 1, 2, 3, 8, 10)}
    bins = {length: [(first, last) for first, last, _ in places] for length, places in found.items()}
    assert bins[1] == [(1, 1)]
    assert bins[2] == [(1, 1), (2, 2)]
    assert bins[3] == [(1, 1), (2, 2), (3, 3)]
    assert bins[8] == [(1, 1), (2, 2), (3, 4), (5, 8)]
    assert bins[10] == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 10)]


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


def test_positions_are_computed_once_per_length_and_not_per_batch(data, monkeypatch):
    model, calls = small(data, joining="lape"), []
    inner = JoinedPosition.forward
    monkeypatch.setattr(JoinedPosition, "forward", lambda self, grid: calls.append(grid) or inner(self, grid))
    scores(model, data, 4, CONTEXT, 32)
    assert len(data.eval_dataloader(4)) > 3
    assert [grid.width for grid in calls] == [CONTEXT, CONTEXT, 32]


def test_cost_is_that_of_a_full_batch(data):
    short, long = scores(small(data, "learnable"), data, 4, 64)
    assert (short.batch, long.batch) == (16, 1)
    assert all(score.tokens_per_second > 0 for score in (short, long))
    assert short.memory > 257 * 4  # at least the logits of a token
    with_bias = [score.memory for score in scores(small(data, "bucketed_bias"), data, 4, 64)]
    assert with_bias[1] > with_bias[0]  # a number per query and key


@in_turn(
    ("lengths", "said"),
    [
        ([], r"`lengths` must be different lengths, at least one, got \[\]"),
        ([8, 4, 8], r"`lengths` must be different lengths, at least one, got \[8, 4, 8\]"),
        ([8, 0], "`lengths` must be whole numbers of at least 1, got 0"),
        ([-8], "`lengths` must be whole numbers of at least 1, got -8"),
        ([2.5], "`lengths` must be whole numbers of at least 1, got 2.5"),
        ([8, 209], "`lengths` must be at most 208, the number of held-out tokens, .* got 209"),
    ],
)
def test_invalid_lengths_are_refused_before_any_work(data, lengths, said):
    model = small(data).train()
    model.forward = None  # calling it would be a TypeError
    for act in (lambda: check_lengths(model, lengths, data), lambda: scores(model, data, *lengths)):
        with pytest.raises(ValueError, match=said):
            act()
    assert model.training


def test_another_model_or_vocabulary_is_refused(data):
    with pytest.raises(ValueError, match="`model` must be a LanguageModel, got VisionTransformer"):
        check_lengths(graticule.create_model("vit_nano_patch4_28"), [8], data)
    with pytest.raises(ValueError, match="`data` must have the vocabulary of the model, 300 tokens, got 257"):
        check_lengths(small(data, vocab_size=300), [8], data)
