"""Generation token by token: equal with and without the cache, and texts are refused before any work."""

import pytest
import torch

import graticule
from graticule.backbones.language import draw as draw_token
from in_turn import in_turn
from tiny import draw

WORDS, CONTEXT = 13, 16
CHOICES = [
    ("none", "default"),
    ("learnable", "lape"),
    ("sinusoidal_1d", "shared"),
    ("relative_bias", "lape"),
    ("rope_1d", "default"),
    ("bucketed_bias", "default"),
    ("learnable+shaw+relative_bias", "lape_sharing"),
]


def small(encoding="learnable", joining="default"):
    model = graticule.create_language_model(
        "lm_nano",
        vocab_size=WORDS,
        context=CONTEXT,
        embed_dim=24,
        depth=2,
        num_heads=3,
        encoding=encoding,
        joining=joining,
    )
    return draw(model).double()


def run(model, tokens, new_tokens=8, **kwargs):
    return torch.stack(list(graticule.generate(model, tokens, new_tokens, **kwargs)), 1)


def prompt(length=4, batch=3):
    return torch.randint(WORDS, (batch, length))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kwargs", [{"temperature": 0}, {}, {"temperature": 0.7, "top_k": 3}])
@pytest.mark.parametrize(("encoding", "joining"), CHOICES)
def test_with_and_without_the_cache_the_tokens_are_the_same(encoding, joining, kwargs):
    model, tokens = small(encoding, joining), prompt()
    with_cache = run(model, tokens, generator=seeded(), **kwargs)
    without = run(model, tokens, generator=seeded(), use_cache=False, **kwargs)
    assert with_cache.shape == (3, 8) and with_cache.dtype == torch.long
    assert torch.equal(with_cache, without)


def test_at_temperature_zero_every_token_is_the_likeliest():
    model, tokens = small("rope_1d"), prompt()
    for token in graticule.generate(model, tokens, 6, temperature=0):
        with torch.no_grad():
            assert torch.equal(model(tokens)[:, -1].argmax(-1), token)
        tokens = torch.cat([tokens, token[:, None]], 1)


def test_tokens_are_drawn_as_often_as_the_softmax_says():
    logits = torch.randn(5)
    for temperature in (1.0, 0.5):
        found = draw_token(logits.expand(40_000, -1), temperature, generator=seeded()).bincount(minlength=5) / 40_000
        torch.testing.assert_close(found, (logits / temperature).softmax(-1), rtol=0, atol=0.01)


def test_top_k_draws_among_the_k_likeliest_as_often_as_they_are_likely():
    logits = torch.tensor([0.0, 3.0, 1.0, 2.5, -1.0])
    found = draw_token(logits.expand(40_000, -1), top_k=2, generator=seeded()).bincount(minlength=5) / 40_000
    kept = logits[[1, 3]].softmax(-1)
    torch.testing.assert_close(found, torch.tensor([0, kept[0], 0, kept[1], 0]), rtol=0, atol=0.01)
    assert (draw_token(logits.expand(50, -1), top_k=1) == 1).all()


@pytest.mark.parametrize("training", [True, False])
def test_it_is_in_evaluation_mode_meanwhile_and_as_it_was_afterwards(training):
    model = small().train(training)
    texts = graticule.generate(model, prompt(), 3)
    next(texts)
    assert not model.training
    assert not torch.is_inference_mode_enabled()
    texts.close()
    assert model.training == training
    run(model, prompt(), 3)
    assert model.training == training


@in_turn("length", [17, 5])
def test_a_text_that_would_outgrow_its_table_is_refused_before_any_work(length):
    model, calls = small(), []
    model.embed.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(
        ValueError, match=r"cut the text, or call model.set_context\(\d+\).*without a table, such as sinusoidal_1d"
    ):
        graticule.generate(model, prompt(length), 50)
    assert not calls
    model.set_context(length + 49)
    assert run(model, prompt(length), 50).shape == (3, 50)


@pytest.mark.parametrize("encoding", ["none", "sinusoidal_1d", "rope_1d", "bucketed_bias", "shaw"])
def test_without_a_table_a_text_is_as_long_as_one_likes(encoding):
    model, tokens = small(encoding), prompt()
    longer = run(model, tokens, 3 * CONTEXT, temperature=0)
    assert torch.equal(run(model, tokens, 3 * CONTEXT, temperature=0, use_cache=False), longer)


def test_the_work_a_token_does_not_grow_with_the_text():
    """Each token is computed alone, and its position was computed once."""
    model, seen, asked = small("learnable+relative_bias", "lape"), [], []
    model.blocks[0].mlp.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    model.position.register_forward_hook(lambda *_: asked.append(1))
    run(model, prompt(5), 7)
    assert seen == [5, *[1] * 6]
    assert len(asked) == 1


@in_turn(
    ("kwargs", "message"),
    [
        ({"new_tokens": -1}, "`new_tokens` must be a whole number of at least 0, got -1"),
        ({"temperature": -0.5}, "`temperature` must be at least 0 and finite, got -0.5"),
        ({"temperature": float("nan")}, "`temperature` must be at least 0 and finite, got nan"),
        ({"top_k": 0}, "`top_k` must be from 1 to `vocab_size`, 13, got 0"),
        ({"top_k": 14}, "`top_k` must be from 1 to `vocab_size`, 13, got 14"),
        ({"tokens": torch.zeros(1, 0, dtype=torch.long)}, r"`tokens` must be int64 \(B, N\), N at least 1, got"),
        ({"tokens": torch.zeros(2, 3)}, r"`tokens` must be int64 \(B, N\), N at least 1, got torch.float32 \(2, 3\)"),
    ],
)
def test_bad_arguments_are_refused_at_once(kwargs, message):
    with pytest.raises(ValueError, match=message):
        graticule.generate(small(), **{"tokens": prompt(), "new_tokens": 3, **kwargs})
