"""The language model is causal, a short text is the start of a long one, tables limit the length; generation."""

import copy

import pytest
import torch
import torch.nn.functional as F

import graticule
from graticule import LayerPosition
from graticule.backbones.language import LanguageModel
from graticule.backbones.language import draw as draw_token
from in_turn import in_turn, refusals
from tiny import CHOICES, ENCODERS, PAIRS, assert_same, count, draw, fields

WORDS, CONTEXT, DIM, DEPTH, HEADS = 11, 10, 24, 3, 3
SIZE = {"vocab_size": WORDS, "context": CONTEXT, "embed_dim": DIM, "depth": DEPTH, "num_heads": HEADS}
#: Encodings that use the tokens around a token, and those of gated MLPs.
CONDITIONAL = [name for name in ENCODERS if not fields(name) <= LanguageModel.takes]
#: Every encoding with every joining that supports texts, and some combinations.
TEXTS = [
    *[(encoding, joining) for encoding, joining in CHOICES if not {*encoding.split("+")} & {*CONDITIONAL}],
    ("learnable+shaw", "lape"),
    ("shaw+irpe+relative_bias", "default"),
    ("sinusoidal_1d+rope_1d+bucketed_bias", "shared"),
    ("learnable+bucketed_bias", "lape_sharing"),
]
every = in_turn(("encoding", "joining"), TEXTS)


def small(encoding="learnable", joining="default", **kwargs):
    return graticule.create_language_model("lm_nano", encoding=encoding, joining=joining, **{**SIZE, **kwargs})


def drawn(*args, **kwargs):
    return draw(small(*args, **kwargs)).double().eval().requires_grad_(False)


def texts(length=CONTEXT, batch=2):
    return torch.randint(WORDS, (batch, length))


def has_table(encoding, joining):
    """Return whether it has a table that is resampled; the norm of a bias has one per key."""
    return bool(small(encoding, joining).position.resampled_encodings())


@in_turn("encoding", graticule.list_encodings())
def test_every_encoding_that_does_not_look_ahead_is_taken_with_every_joining(encoding):
    for joining in graticule.list_joinings():
        if encoding not in CONDITIONAL and (encoding, joining) in PAIRS:
            assert small(encoding, joining)(texts()).shape == (2, CONTEXT, WORDS), joining
        else:
            with pytest.raises(ValueError, match=r"`(encoding|joining)` must|`grid` must have 2 axes"):
                small(encoding, joining)
                pytest.fail(f"{joining} is taken")


@every
def test_changing_a_token_changes_no_logit_before_it(encoding, joining):
    model, tokens = drawn(encoding, joining), texts()
    before = model(tokens)
    for n in range(CONTEXT):
        other = tokens.clone()
        other[:, n] = (other[:, n] + 1) % WORDS
        after = model(other)
        assert torch.equal(after[:, :n], before[:, :n]) and ((after - before)[:, n:].abs().amax(-1) > 1e-9).all()


@every
def test_the_logits_of_a_text_are_those_of_its_beginnings_and_of_its_pieces_with_a_cache(encoding, joining):
    model, tokens = drawn(encoding, joining), texts()
    logits = model(tokens)
    for length in (1, 4, 9):
        assert_same(model(tokens[:, :length]), logits[:, :length], 1e-12)
    cache = model.new_cache(CONTEXT)
    pieces = [model(piece, cache) for piece in tokens.split((4, 1, 1, 3, 1), 1)]
    assert_same(torch.cat(pieces, 1), logits, 1e-10)
    assert cache.length == CONTEXT


@in_turn("encoding", ["liere", "rope_golden_gate"])
@in_turn("coordinates", ["separate", "min", "max", "corners", "area", "unit"])
@torch.no_grad()
def test_tokens_keep_their_coordinates_as_a_text_grows_beyond_the_context(encoding, coordinates):
    model, tokens = drawn(f"{encoding}(coordinates={coordinates!r})"), texts(2 * CONTEXT + 1)
    longer = model(tokens)
    for length in (1, CONTEXT, CONTEXT + 1, 2 * CONTEXT):
        assert_same(model(tokens[:, :length]), longer[:, :length], 1e-12)
    model.set_context(2 * CONTEXT)
    assert not torch.allclose(model(tokens), longer)  # now relative to the new context


@every
def test_a_text_longer_than_the_context_is_computed_or_refused_with_the_choices(encoding, joining):
    model, tokens = small(encoding, joining), texts(2 * CONTEXT + 1)
    model = model.double().eval()
    if has_table(encoding, joining):
        message = r"`tokens` must be at most 10 long, as the table of .* is, got 21: .*set_context\(21\).*sinusoidal_1d"
        for act in (lambda: model(tokens), lambda: model.new_cache(21), lambda: model.positions(21)):
            with pytest.raises(ValueError, match=message):
                act()
        model.set_context(21)
    with torch.no_grad():
        longer = model(tokens)
        assert longer.shape == (2, 21, WORDS) and longer.isfinite().all()
        # a fixed table was rounded to float32 when it was built, and is computed in float64 beyond its end
        assert_same(model(tokens[:, :CONTEXT]), longer[:, :CONTEXT], 1e-6)
        cache = model.new_cache(21)
        assert_same(model(tokens, cache), longer, 1e-10)


@every
def test_it_folds_into_constants_and_back(encoding, joining):
    model, tokens = drawn(encoding, joining), texts()
    before, short = model(tokens), model(tokens[:, :4])
    graticule.fold(model)
    assert torch.equal(model(tokens), before) and torch.equal(model(tokens[:, :4]), short)
    with pytest.raises(ValueError, match="`tokens` must be at most 10 long: the model is folded for that many, got 11"):
        model(texts(11))
    graticule.unfold(model)
    assert torch.equal(model(tokens), before)


@pytest.mark.slow
@pytest.mark.parametrize(("encoding", "joining"), [("learnable+relative_bias", "lape"), ("rope_1d+shaw", "default")])
def test_it_is_one_graph_with_the_same_numbers_and_gradients(encoding, joining):
    model, tokens = draw(small(encoding, joining, depth=2)).double(), texts()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    for module in (model, compiled):
        logits = module(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    compiled_parameters = dict(compiled._orig_mod.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(compiled_parameters[name].grad, parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_without_an_encoding_the_mask_alone_tells_the_order():
    model, tokens = drawn("none"), texts()
    assert all(position == LayerPosition() for position in model.position(model.grid))
    tokens[:, 0] = (tokens[:, 1] + 1) % WORDS
    swapped = tokens[:, [1, 0, *range(2, CONTEXT)]]
    assert (model(swapped)[:, 1] - model(tokens)[:, 0]).abs().amax(-1).min() > 1e-3  # the same word, one token later
    one_layer = drawn("none", depth=1)  # in which later tokens attend to the words before them as a set
    assert_same(one_layer(swapped)[:, 2:], one_layer(tokens)[:, 2:], 1e-12)


def test_a_scale_is_that_of_the_embedding_alone():
    plain, scaled = drawn(tied=False), drawn(tied=False, embed_scale=3.0)
    state = plain.state_dict()
    scaled.load_state_dict(state | {"embed.weight": state["embed.weight"] / 3})
    tokens = torch.randint(0, WORDS, (2, CONTEXT))
    assert_same(scaled(tokens), plain(tokens), 1e-10)
    tied = drawn(embed_scale=3.0)
    assert torch.equal(
        tied.forward_head(torch.ones(1, DIM).double()), torch.ones(1, DIM).double() @ tied.embed.weight.T
    )


def test_tied_weights_are_one_parameter_and_untied_ones_two():
    tied, untied = small(), small(tied=False)
    assert count(untied) - count(tied) == WORDS * DIM
    assert not any(name.startswith("head") for name in tied.state_dict())
    x = torch.randn(1, 2, DIM)
    assert torch.equal(tied.forward_head(x), x @ tied.embed.weight.T)
    assert torch.equal(untied.forward_head(x), untied.head(x))
    tokens = torch.zeros(1, 3, dtype=torch.long)
    tied(tokens)[..., 5].sum().backward()
    assert tied.embed.weight.grad[5].any()  # through the head only: it is not in the text


@in_turn(
    ("tokens", "message"),
    [
        (torch.zeros(3, dtype=torch.long), r"`tokens` must be int64 \(B, N\), N at least 1, got torch.int64 \(3,\)"),
        (torch.zeros(1, 3), r"`tokens` must be int64 \(B, N\), N at least 1, got torch.float32 \(1, 3\)"),
        (torch.zeros(1, 0, dtype=torch.long), r"N at least 1, got torch.int64 \(1, 0\)"),
    ],
)
def test_what_is_no_text_is_refused(tokens, message):
    model = small()
    for cache in (None, model.new_cache(4)):
        with pytest.raises(ValueError, match=message):
            model(tokens, cache)
    with pytest.raises(ValueError, match="`tokens` must be at least one token long, got none"):
        model.new_cache(0)


test_what_is_no_model_is_refused = refusals(
    ({"vocab_size": 0}, r"`vocab_size` must be (a whole number of )?at least 1, got 0"),
    ({"context": 0}, r"`context` must be (a whole number of )?at least 1, got 0"),
    ({"depth": 0}, r"`depth` must be (a whole number of )?at least 1, got 0"),
    ({"drop_path_rate": 1.0}, r"`drop_path_rate` must be less than 1, got 1.0"),
    ({"embed_scale": 0.0}, "`embed_scale` must be greater than 0, got 0.0"),
    ({"num_heads": 5}, "`embed_dim` must be a multiple of `num_heads`, got 24 with 5 heads"),
    ({"encoding": "shw"}, "`encoding` must be one of .*did you mean 'shaw'"),
    call=lambda kwargs: small(**kwargs),
)


def test_a_checkpoint_of_another_context_is_brought_over_as_set_context_does_it():
    resampled = set()
    for encoding, joining in PAIRS:
        if encoding in CONDITIONAL or joining not in ("default", "lape") or not has_table(encoding, joining):
            continue
        if encoding in ("windowed", "cropped"):  # their tables have a grid of their own, which stays
            continue
        resampled.add(encoding)
        case = f"{encoding}, {joining}"
        short, long = drawn(encoding, joining, context=16), drawn(encoding, joining, context=24)
        taken = graticule.transfer(long, short.state_dict())
        resized = [row.name for row in taken.rows if row.status == "resized"]
        short.set_context(24)
        expected = short.state_dict()
        assert [name for name, value in long.state_dict().items() if not torch.equal(value, expected[name])] == [], case
        assert resized and all(name.startswith("position.") for name in resized), case
    assert resampled >= {"learnable", "relative_bias"}


def test_more_tokens_than_the_cache_is_for_are_refused():
    model = small()
    cache = model.new_cache(4)
    model.eval().requires_grad_(False)(texts(3), cache)
    with pytest.raises(ValueError, match="`tokens` must leave the text at 4 tokens at most, its cache's, got 5"):
        model(texts(2), cache)


WRITERS = [("none", "default"), ("rope_1d", "default")]
WRITERS += [("learnable", "lape"), ("learnable+shaw+relative_bias", "lape_sharing")]


def writer(encoding="learnable", joining="default"):
    return draw(small(encoding, joining, context=16, depth=2)).double()


def run(model, tokens, new_tokens=8, **kwargs):
    return torch.stack(list(graticule.generate(model, tokens, new_tokens, **kwargs)), 1)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kwargs", [{"temperature": 0}, {}, {"temperature": 0.7, "top_k": 3}])
@pytest.mark.parametrize(("encoding", "joining"), WRITERS)
def test_with_and_without_the_cache_the_tokens_are_the_same(encoding, joining, kwargs):
    model, tokens = writer(encoding, joining), texts(4, 3)
    with_cache = run(model, tokens, generator=seeded(), **kwargs)
    without = run(model, tokens, generator=seeded(), use_cache=False, **kwargs)
    assert with_cache.shape == (3, 8) and with_cache.dtype == torch.long and torch.equal(with_cache, without)


def test_at_temperature_zero_every_token_is_the_likeliest():
    model, tokens = writer("rope_1d"), texts(4, 3)
    for token in graticule.generate(model, tokens, 6, temperature=0):
        with torch.no_grad():
            assert torch.equal(model(tokens)[:, -1].argmax(-1), token)
        tokens = torch.cat([tokens, token[:, None]], 1)


def test_tokens_are_drawn_as_often_as_the_softmax_of_all_or_of_the_k_likeliest_says():
    logits = torch.tensor([0.0, 3.0, 1.0, 2.5, -1.0])
    others = torch.tensor([True, False, True, False, True])  # than the two likeliest
    for temperature, top_k in ((1.0, None), (0.5, None), (1.0, 2)):
        draws = draw_token(logits.expand(40_000, -1), temperature, top_k, generator=seeded())
        expected = logits.masked_fill(others, -torch.inf) if top_k else logits / temperature
        assert_same(draws.bincount(minlength=5) / 40_000, expected.softmax(-1), 0.01)
    assert (draw_token(logits.expand(50, -1), top_k=1) == 1).all()


def test_it_is_in_evaluation_mode_meanwhile_and_as_it_was_afterwards():
    for training in (True, False):
        model = writer().train(training)
        written = graticule.generate(model, texts(4, 3), 3)
        next(written)
        assert not model.training and not torch.is_inference_mode_enabled()
        written.close()
        assert model.training == training
        run(model, texts(4, 3), 3)
        assert model.training == training


@in_turn("length", [17, 5])
def test_a_text_that_would_outgrow_its_table_is_refused_before_any_work(length):
    model, calls = writer(), []
    model.embed.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(
        ValueError, match=r"cut the text, or call model.set_context\(\d+\).*without a table, such as sinusoidal_1d"
    ):
        graticule.generate(model, texts(length, 3), 50)
    assert not calls
    model.set_context(length + 49)
    assert run(model, texts(length, 3), 50).shape == (3, 50)


test_bad_arguments_of_generation_are_refused_at_once = refusals(
    ({"new_tokens": -1}, "`new_tokens` must be a whole number of at least 0, got -1"),
    ({"temperature": -0.5}, "`temperature` must be at least 0 and finite, got -0.5"),
    ({"temperature": float("nan")}, "`temperature` must be at least 0 and finite, got nan"),
    ({"top_k": 0}, f"`top_k` must be from 1 to `vocab_size`, {WORDS}, got 0"),
    ({"top_k": WORDS + 1}, f"`top_k` must be from 1 to `vocab_size`, {WORDS}, got {WORDS + 1}"),
    ({"tokens": torch.zeros(1, 0, dtype=torch.long)}, r"`tokens` must be int64 \(B, N\), N at least 1, got"),
    ({"tokens": torch.zeros(2, 3)}, r"`tokens` must be int64 \(B, N\), N at least 1, got torch.float32 \(2, 3\)"),
    call=lambda kwargs: graticule.generate(writer(), **{"tokens": texts(4, 3), "new_tokens": 3, **kwargs}),
)


def test_the_work_a_token_does_not_grow_with_the_text():
    """Each token is computed alone, and its position was computed once."""
    model, seen, asked = writer("learnable+relative_bias", "lape"), [], []
    model.blocks[0].mlp.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    model.position.register_forward_hook(lambda *_: asked.append(1))
    run(model, texts(5, 3), 7)
    assert seen == [5, *[1] * 6] and len(asked) == 1
