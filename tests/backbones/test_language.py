"""The language model is causal, a short text equals the start of a long one, and tables limit the length."""

import copy

import pytest
import torch
import torch.nn.functional as F
from timm.optim import param_groups_layer_decay

import graticule
from graticule import LayerPosition, build_position
from graticule.backbones.language import LanguageModel
from graticule.encodings.forms.mixing import TokenMixing
from graticule.position.position import ENCODINGS
from in_turn import in_turn
from tiny import CHOICES, ENCODERS, PAIRS, count, draw, fields, without_memory

WORDS, CONTEXT, DIM, DEPTH, HEADS = 11, 10, 24, 3, 3
SIZE = {"vocab_size": WORDS, "context": CONTEXT, "embed_dim": DIM, "depth": DEPTH, "num_heads": HEADS}
#: Encodings that use the tokens around a token, and those of gated MLPs.
CONDITIONAL = [name for name in ENCODERS if not fields(name) <= LanguageModel.takes]
MIXING = [name for name, kind in ENCODINGS.items() if issubclass(kind, TokenMixing)]
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
    """Return whether it has parameters for its grid; the norm of a bias has one per key."""
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


@in_turn("encoding", [*CONDITIONAL, *MIXING, "learnable+peg"])
def test_what_looks_ahead_is_refused_with_the_reason(encoding):
    with pytest.raises(
        ValueError, match=r"`encoding` must be one that LanguageModel can use, .* would use later tokens"
    ):
        small(encoding)


@every
def test_changing_a_token_changes_no_logit_before_it(encoding, joining):
    model, tokens = drawn(encoding, joining), texts()
    before = model(tokens)
    for n in range(CONTEXT):
        other = tokens.clone()
        other[:, n] = (other[:, n] + 1) % WORDS
        after = model(other)
        assert torch.equal(after[:, :n], before[:, :n])
        assert ((after - before)[:, n:].abs().amax(-1) > 1e-9).all()


@every
def test_with_a_cache_the_logits_are_the_same(encoding, joining):
    model, tokens = drawn(encoding, joining), texts()
    cache, found, start = model.new_cache(CONTEXT), [], 0
    for count_ in (4, 1, 1, 3, 1):
        found.append(model(tokens[:, start : start + count_], cache))
        start += count_
    torch.testing.assert_close(torch.cat(found, 1), model(tokens), rtol=0, atol=1e-10)
    assert cache.length == CONTEXT


@every
def test_a_short_text_is_the_beginning_of_a_long_one(encoding, joining):
    model, tokens = drawn(encoding, joining), texts()
    whole = model(tokens)
    for length in (1, 4, 9):
        torch.testing.assert_close(model(tokens[:, :length]), whole[:, :length], rtol=0, atol=1e-12)


@in_turn("encoding", ["liere", "rope_golden_gate"])
@in_turn("coordinates", ["separate", "min", "max", "corners", "area", "unit"])
@torch.no_grad()
def test_tokens_keep_their_coordinates_as_a_text_grows_beyond_the_context(encoding, coordinates):
    model, tokens = drawn(f"{encoding}(coordinates={coordinates!r})"), texts(2 * CONTEXT + 1)
    longer = model(tokens)
    for length in (1, CONTEXT, CONTEXT + 1, 2 * CONTEXT):
        torch.testing.assert_close(model(tokens[:, :length]), longer[:, :length], rtol=0, atol=1e-12)
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
        torch.testing.assert_close(model(tokens[:, :CONTEXT]), longer[:, :CONTEXT], rtol=0, atol=1e-6)
        cache = model.new_cache(21)
        torch.testing.assert_close(model(tokens, cache), longer, rtol=0, atol=1e-10)


@every
def test_another_context_is_set_for_good(encoding, joining):
    model = drawn(encoding, joining)
    for context in (16, 7):
        model.set_context(context)
        assert model.context == context
        fresh = drawn(encoding, joining, context=context).state_dict()
        assert {k: v.shape for k, v in fresh.items()} == {k: v.shape for k, v in model.state_dict().items()}
        assert model(texts(context)).isfinite().all()


@every
def test_it_folds_into_constants_and_back(encoding, joining):
    model, tokens = drawn(encoding, joining), texts()
    before, short = model(tokens), model(tokens[:, :4])
    graticule.fold(model)
    assert torch.equal(model(tokens), before)
    assert torch.equal(model(tokens[:, :4]), short)
    with pytest.raises(ValueError, match="`tokens` must be at most 10 long: the model is folded for that many, got 11"):
        model(texts(11))
    graticule.unfold(model)
    assert torch.equal(model(tokens), before)


@pytest.mark.parametrize(
    ("encoding", "joining"),
    [("learnable+relative_bias", "lape"), ("rope_1d+shaw", "default")],
)
def test_it_is_one_graph_with_the_same_numbers_and_gradients(encoding, joining):
    model, tokens = draw(small(encoding, joining, depth=2)).double(), texts()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    for one in (model, compiled):
        logits = one(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    theirs = dict(compiled._orig_mod.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(theirs[name].grad, parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


@every
def test_a_gradient_reaches_every_parameter(encoding, joining):
    model, tokens = draw(small(encoding, joining)), texts()
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


@in_turn("encoding", ["none", "learnable", "relative_bias", "rope_1d", "bucketed_bias", "shaw"])
def test_bfloat16_agrees(encoding):
    model, tokens = small(encoding).eval().requires_grad_(False), texts()
    exact = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(tokens)
        cache = model.new_cache(CONTEXT)
        steps = torch.cat([model(tokens[:, n : n + 1], cache) for n in range(CONTEXT)], 1)
    assert cache.layers[0]._keys.dtype == torch.bfloat16
    rounded = copy.deepcopy(model).bfloat16()(tokens)
    assert rounded.dtype == torch.bfloat16
    for found in (mixed, steps, rounded):
        torch.testing.assert_close(found.float(), exact, rtol=0, atol=0.02)


def test_without_an_encoding_the_mask_alone_tells_the_order():
    model, tokens = drawn("none"), texts()
    assert all(given == LayerPosition() for given in model.position(model.grid))
    tokens[:, 0] = (tokens[:, 1] + 1) % WORDS
    swapped = tokens[:, [1, 0, *range(2, CONTEXT)]]
    assert (model(swapped)[:, 1] - model(tokens)[:, 0]).abs().amax(-1).min() > 1e-3  # the same word, one token later
    one_layer = drawn("none", depth=1)  # in which later tokens attend to the words before them as a set
    torch.testing.assert_close(one_layer(swapped)[:, 2:], one_layer(tokens)[:, 2:], rtol=0, atol=1e-12)


def test_the_causal_form_of_the_buckets_is_the_one_that_a_text_has():
    assert small("bucketed_bias").position.encoding.causal
    assert not build_position(
        graticule.Grid(1, 9), dim=12, depth=1, num_heads=3, encoding="bucketed_bias"
    ).encoding.causal


def test_a_scale_is_that_of_the_embedding_alone():
    plain, scaled = drawn(tied=False), drawn(tied=False, embed_scale=3.0)
    state = plain.state_dict()
    scaled.load_state_dict(state | {"embed.weight": state["embed.weight"] / 3})
    tokens = torch.randint(0, WORDS, (2, CONTEXT))
    torch.testing.assert_close(scaled(tokens), plain(tokens), atol=1e-10, rtol=0)
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


def test_the_parameters_are_counted():
    block = 12 * DIM**2 + 13 * DIM
    assert count(small("none")) == WORDS * DIM + DEPTH * block + 2 * DIM
    assert count(small("learnable", "lape")) - count(small("none")) == CONTEXT * DIM + DEPTH * 2 * DIM
    assert count(small("relative_bias")) - count(small("none")) == DEPTH * (2 * CONTEXT - 1) * HEADS
    assert count(small("bucketed_bias")) - count(small("none")) == 32 * HEADS
    assert count(small("rope_1d")) == count(small("none"))


def test_the_sizes_by_name():
    assert graticule.list_language_models() == ["lm_nano", "lm_tiny", "lm_small", "lm_base"]
    expected = {"lm_nano": (64, 4, 4), "lm_tiny": (128, 6, 4), "lm_small": (384, 8, 6), "lm_base": (768, 12, 12)}
    for name, (dim, depth, heads) in expected.items():
        with without_memory():
            model = graticule.create_language_model(name, vocab_size=100)
        assert (model.embed_dim, len(model.blocks), model.blocks[0].attn.num_heads) == (dim, depth, heads)
        assert model.context == 256


def test_it_starts_as_uncertain_as_there_are_words():
    model, tokens = small(), texts(batch=50)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(loss.item() - torch.tensor(float(WORDS)).log().item()) < 0.05


def test_it_learns_a_text_by_heart():
    model, tokens = small("rope_1d"), torch.tensor([[1, 2, 3, 1, 2, 4, 1, 2, 5, 1]])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    assert torch.equal(model(tokens[:, :-1]).argmax(-1), tokens[:, 1:])


def test_checkpointed_blocks_have_the_same_gradients():
    first = draw(small("learnable+relative_bias", "lape")).double()
    second = copy.deepcopy(first)
    second.set_grad_checkpointing()
    tokens = texts()
    for model in (first, second):
        model(tokens).square().sum().backward()
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-10)


def test_dropout_is_for_training():
    tokens = texts()
    for rate in ("pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"):
        model = small(**{rate: 0.5})
        model.requires_grad_(False)
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        assert not torch.equal(model(tokens), model(tokens)), rate
        model.eval()
        assert torch.equal(model(tokens), model(tokens)), rate


def test_position_has_no_weight_decay_and_what_a_layer_has_alone_goes_with_the_layer():
    model = small("learnable", "lape")
    own = {name for name, _ in model.named_parameters()}
    assert model.no_weight_decay() & own == {name for name in own if name.startswith("position.")}
    groups = param_groups_layer_decay(model, 0.1, model.no_weight_decay(), layer_decay=0.5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    scale = {names[id(parameter)]: group["lr_scale"] for group in groups for parameter in group["params"]}
    assert scale["position.joining.norms.1.weight"] == scale["blocks.1.attn.qkv.weight"]
    assert scale["embed.weight"] == scale["position.encodings.0.pos_embed"] < scale["blocks.0.attn.qkv.weight"]
    assert scale["norm.weight"] == 1


def test_a_position_of_ones_own_knows_that_it_is_causal():
    site = {}

    def builder(grid, *, dim, depth, num_heads, **within):
        site.update(within, grid=grid)
        return build_position(grid, dim=dim, depth=depth, num_heads=num_heads, encoding="bucketed_bias")

    model = LanguageModel(builder, WORDS, context=CONTEXT, embed_dim=DIM, depth=2, num_heads=HEADS)
    assert site == {"causal": True, "grid": graticule.Grid(CONTEXT)}
    assert model(texts()).shape == (2, CONTEXT, WORDS)


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


@in_turn(
    ("kwargs", "message"),
    [
        ({"vocab_size": 0}, r"`vocab_size` must be (a whole number of )?at least 1, got 0"),
        ({"context": 0}, r"`context` must be (a whole number of )?at least 1, got 0"),
        ({"depth": 0}, r"`depth` must be (a whole number of )?at least 1, got 0"),
        ({"drop_path_rate": 1.0}, r"`drop_path_rate` must be in \[0, 1\), got 1.0"),
        ({"embed_scale": 0.0}, "`embed_scale` must be positive, got 0.0"),
        ({"num_heads": 5}, "`embed_dim` must be a multiple of `num_heads`, got 24 with 5 heads"),
        ({"encoding": "shw"}, "`encoding` must be one of .*did you mean 'shaw'"),
    ],
)
def test_what_is_no_model_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        small(**kwargs)


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"`name` must be one of lm_nano.*got 'lm_nono'; did you mean 'lm_nano'"):
        graticule.create_language_model("lm_nono", vocab_size=5)
    with pytest.raises(ValueError, match=r"`context` must be (a whole number of )?at least 1, got 0"):
        small().set_context(0)


def test_more_tokens_than_the_cache_is_for_are_refused():
    model = small()
    cache = model.new_cache(4)
    model.eval().requires_grad_(False)(texts(3), cache)
    with pytest.raises(ValueError, match="`tokens` must leave the text at 4 tokens at most, its cache's, got 5"):
        model(texts(2), cache)


def test_a_checkpoint_of_another_context_is_brought_over_as_set_context_does_it():
    resampled = set()
    for encoding, joining in PAIRS:
        if encoding in CONDITIONAL or joining not in ("default", "lape") or not has_table(encoding, joining):
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
