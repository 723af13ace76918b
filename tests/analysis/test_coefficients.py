"""The coefficients of LaPE's Eq. 6 and 7 split the output of a norm into tokens, position and shift."""

import pytest
import torch
from torch import nn

import graticule
from graticule.analysis.correlation import coefficients, norm_coefficients
from in_turn import in_turn


def test_the_coefficients_of_two_channels_by_hand():
    # over two channels the standard deviation is half the distance: 1 for (0, 2), 2 for (1, 5), 3 for their sum (1, 7);
    # for (2, 0) + (1, 5) = (3, 5) it is 1 and 2 and 1
    tokens = torch.tensor([[[0.0, 2.0], [2.0, 0.0]]])
    position = torch.tensor([[1.0, 5.0], [1.0, 5.0]])
    found = coefficients(tokens, position)
    torch.testing.assert_close(found.tokens, torch.tensor([[1 / 3, 1.0]]))
    torch.testing.assert_close(found.position, torch.tensor([[2 / 3, 2.0]]))
    torch.testing.assert_close(found.shift, torch.tensor([[0.0, -2.0]]))


def tiny(encoding, joining="default", **kwargs):
    return graticule.create_model(
        "vit_nano_patch4_28",
        encoding=encoding,
        joining=joining,
        **{"img_size": (8, 12), "embed_dim": 8, "num_heads": 2, "depth": 2, "in_chans": 1, "num_classes": 3} | kwargs,
    )


def test_the_parts_of_every_layer_add_up_to_its_normalized_input():
    torch.manual_seed(0)
    model = tiny("learnable(std=1)").double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    images = torch.randn(3, 1, 8, 12, dtype=torch.float64)
    seen = []
    norms = [model.block(0, index).norm1 for index in range(2)]
    hooks = [norm.register_forward_hook(lambda module, given, out: seen.append((given[0], out))) for norm in norms]
    for norm in norms:
        norm.eps = 0.0
    found = norm_coefficients(model, images)
    for hook in hooks:
        hook.remove()
    assert found.tokens.shape == (2, 3, 7)  # layers, images, tokens of a grid of 2 x 3 with a class token
    w = model.position(model.grid_of(images))[0].pre
    for layer in range(2):
        norm, (given, out) = norms[layer], seen[layer]
        parts = (found.tokens[layer], found.position[layer], found.shift[layer])
        tokens, position, shift = (part[..., None] for part in parts)
        sum_of_parts = tokens * norm(given - w) + position * norm(w) + shift * norm.bias
        torch.testing.assert_close(sum_of_parts, out, rtol=1e-9, atol=1e-9)


@in_turn("choice", [("learnable", "lape"), ("rope", "default"), ("none", "default")])
def test_what_does_not_add_one_table_at_the_start_is_refused(choice):
    with pytest.raises(ValueError, match="`model` must add one table to the embedded tokens"):
        norm_coefficients(tiny(*choice), torch.randn(1, 1, 8, 12))
    with pytest.raises(ValueError, match="`model` must be a backbone of one stage, got Linear"):
        norm_coefficients(nn.Linear(2, 2), torch.randn(1, 1, 8, 12))
