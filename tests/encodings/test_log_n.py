"""Laws of the log-N temperature of attention."""

import math

import pytest
import torch

from graticule import Grid
from graticule.encodings.log_n import LogN
from in_turn import in_turn
from tiny import assert_same, draw, images, tiny

COMBINED = ["log_n", "rope + log_n", "learnable + log_n", "shaw + log_n", "relative_bias + log_n", "pope + log_n"]


def pair(encoding, **kwargs):
    model = draw(tiny(encoding, **kwargs)).double().eval()
    plain = tiny(encoding.removesuffix("log_n").removesuffix(" + ") or "none", **kwargs).double().eval()
    names = zip(plain.state_dict(), dict(model.named_parameters()), strict=True)
    plain.load_state_dict({plain_name: model.state_dict()[ours] for plain_name, ours in names})
    return model, plain


@in_turn("encoding", COMBINED)
def test_it_changes_nothing_at_the_size_of_training_and_something_at_another(encoding):
    model, plain = pair(encoding)
    x = images(dtype=torch.float64)
    assert torch.equal(model(x), plain(x))
    x = images(64, 40, dtype=torch.float64)
    assert (model(x) - plain(x)).abs().max() > 1e-4


def test_it_multiplies_the_logits_by_the_ratio_of_logarithms():
    model, plain = pair("rope + log_n")
    grid, x = Grid(6, 7, prefix=1), torch.randn(2, 43, 24, dtype=torch.float64)
    attention = model.blocks[0].attn
    with_it, without = (attention.weights(x, made.position(grid)[0]).log() for made in (model, plain))
    differences = [w - w[..., :1] for w in (with_it, without)]  # logits up to the normalizer of a row
    assert_same(differences[0], differences[1] * math.log(42) / math.log(16), 1e-10)


def test_the_reference_is_the_grid_of_building_or_given_and_stays():
    encoding = LogN(Grid(4, 4, prefix=1))
    assert torch.equal(encoding(Grid(4, 4, prefix=1)), torch.ones(17))
    assert torch.equal(encoding(Grid(2, 8, prefix=3)), torch.ones(19))
    torch.testing.assert_close(encoding(Grid(8, 8)), torch.full((64,), 1.5))
    assert torch.equal(LogN(Grid(4, 4), reference=196)(Grid(14, 14)), torch.ones(196))
    model = tiny("log_n")
    model.set_input_size(64)
    torch.testing.assert_close(model.position(model.grid)[0].query_scale, torch.full((65,), 1.5))
    assert LogN(Grid(1, 1))(Grid(1, 1)).item() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_factor_is_float32_at_least_and_queries_keep_their_dtype(dtype):
    model = tiny("log_n").to(dtype).eval()
    assert model.position(Grid(5, 5, prefix=1))[0].query_scale.dtype == torch.float32
    assert model(images(40, 40, dtype=dtype)).dtype == dtype


def test_a_token_of_a_text_has_the_factor_of_the_tokens_that_it_sees():
    encoding = LogN(Grid(8), causal=True)
    expected = [max(1.0, math.log(i + 1) / math.log(8)) for i in range(20)]
    torch.testing.assert_close(encoding(Grid(20)), torch.tensor(expected))
    assert torch.equal(encoding(Grid(8)), torch.ones(8))
