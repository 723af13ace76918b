"""The effects of a larger image are split into tokens, content and position values."""

import pytest
import torch
from torch import nn

import graticule
from graticule.analysis.effect import PASSES, logits_of_passes, repeat_patches
from graticule.position.grid import Grid
from in_turn import in_turn

#: Encodings with which repeated tokens, with repeated values, attend like the original tokens.
ENCODINGS = ["none", "learnable", "sinusoidal_2d", "relative_bias", "kerple", "rope", "learnable + rope"]


def tiny(encoding, **kwargs):
    torch.manual_seed(0)
    settings = {"img_size": (8, 12), "embed_dim": 8, "num_heads": 2, "depth": 2, "in_chans": 1, "num_classes": 3}
    model = graticule.create_model(
        "vit_nano_patch4_28", encoding=encoding, **settings | {"global_pool": "avg"} | kwargs
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


@pytest.fixture
def images():
    return torch.randn(2, 1, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_patches_are_repeated_as_they_are():
    image = torch.arange(8.0).view(1, 1, 2, 4)  # patches of 2 x 2: the left one has 0 1 4 5, the right one 2 3 6 7
    found = repeat_patches(image, Grid(1, 2), Grid(2, 3))
    rows = [[0.0, 1, 2, 3, 2, 3], [4.0, 5, 6, 7, 6, 7]]
    assert found.tolist() == [[[*rows, *rows]]]


@in_turn("encoding", ENCODINGS)
def test_where_the_content_is_unchanged_tokens_and_values_add_up_to_the_whole_difference(encoding, images):
    model = tiny(encoding, class_token=False)
    larger = repeat_patches(images, Grid(2, 3), Grid(4, 6))
    found = logits_of_passes(model, images, larger)
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(found["tokens"], found["trained"], **close)  # the number of tokens alone changes nothing
    torch.testing.assert_close(found["content"], found["tokens"], **close)
    torch.testing.assert_close(found["values"], model(larger), **close)
    changed = (found["values"] - found["trained"]).abs().max()
    assert (changed < 1e-9) == (encoding == "none")  # only the values of the encoding remain


def test_a_class_token_notices_how_many_tokens_there_are(images):
    model = tiny("learnable", global_pool="token")
    larger = repeat_patches(images, Grid(2, 3), Grid(4, 6))
    found = logits_of_passes(model, images, larger)
    assert (found["tokens"] - found["trained"]).abs().max() > 1e-4
    torch.testing.assert_close(found["content"], found["tokens"], rtol=0, atol=0)


def test_each_pass_is_that_of_the_model_at_its_size_and_the_last_has_the_log_n_temperature(images):
    model = tiny("rope")
    larger = torch.randn(2, 1, 16, 12, dtype=torch.float64)
    found = logits_of_passes(model, images, larger)
    assert tuple(found) == (*PASSES, "log_n")
    torch.testing.assert_close(found["trained"], model(images), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["values"], model(larger), rtol=1e-12, atol=1e-12)
    cooled = tiny("rope + log_n")
    named = dict(cooled.named_parameters())
    assert len(named) == len(dict(model.named_parameters()))
    with torch.no_grad():
        for mine, theirs in zip(cooled.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    torch.testing.assert_close(found["log_n"], cooled(larger), rtol=1e-6, atol=1e-6)


def test_the_same_size_changes_nothing(images):
    found = logits_of_passes(tiny("learnable"), images, images)
    for name in (*PASSES, "log_n"):
        torch.testing.assert_close(found[name], found["trained"], rtol=0, atol=0)


def test_a_smaller_image_and_a_pyramid_are_refused(images):
    with pytest.raises(ValueError, match=r"`sizes` must be no smaller than the training size, 8 x 12.*got 8 x 8"):
        logits_of_passes(tiny("learnable"), images, images[..., :8])
    pyramid = graticule.create_model("posmlp_nano_32", in_chans=1)
    with pytest.raises(ValueError, match="`model` must be a backbone of one stage with a head"):
        logits_of_passes(pyramid, images, images)
