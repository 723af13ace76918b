"""The finder of structure: blocks, grids, prefix tokens, tables, biases and rotations of models of any library."""

from functools import partial

import pytest
import timm
import torch
from torch import nn

import tiny
from graticule.external.backbone_view import BackboneView
from graticule.external.structure import find_structure
from graticule.external.traced_model import TracedModel, take_position, view_of


class Own(nn.Module):
    """Two blocks of one head over 2 x 3 patches, with a table, a bias, a rotation of pairs (i, i + 1) and a mask."""

    def __init__(self, shape=(2, 3)):
        super().__init__()
        self.img_size = (4 * shape[0], 4 * shape[1])
        self.cut = nn.Conv2d(3, 4, 4, 4)
        self.register_buffer("where", torch.randn(shape[0] * shape[1], 4))
        self.parts = nn.ModuleList([OwnBlock(shape[0] * shape[1]) for _ in range(2)])

    def forward(self, x):
        x = self.cut(x).flatten(2).mT + self.where
        for part in self.parts:
            x = part(x)
        return x.mean(1)


class OwnBlock(nn.Module):
    def __init__(self, tokens):
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.gain = nn.Parameter(torch.ones(4))
        self.far = nn.Parameter(torch.randn(tokens, tokens))
        self.angles = nn.Parameter(torch.randn(tokens, 2))
        self.register_buffer("mask", torch.zeros(tokens, tokens).index_fill(1, torch.tensor([0]), -100.0))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        cosines, sines = (f(self.angles).repeat_interleave(2, -1) for f in (torch.cos, torch.sin))
        q, k = (a * cosines + torch.stack([-a[..., 1::2], a[..., ::2]], -1).flatten(-2) * sines for a in (q, k))
        return x + self.gain * ((q @ k.mT + (self.far + self.mask)).softmax(-1) @ v)


def test_all_forms_of_position_of_an_unknown_model_are_found():
    model = Own()
    structure = find_structure(model)
    assert structure.blocks == ("parts.0", "parts.1") and structure.attention == (0, 1)
    assert [(grid.shape, grid.prefix) for grid in structure.grids] == [((2, 3), 0)] * 2
    assert structure.prefix == 0 and structure.patch_size == (4, 4)
    kinds = [(site.kind, site.layer, site.sine) for site in structure.sites]
    of_block = [("rotary", False), ("rotary", True)] * 2 + [("bias of displacements", False)]
    expected = [(kind, layer, sine) for layer in range(2) for kind, sine in of_block]
    assert kinds == [("absolute table", None, False), *expected]
    assert structure.sites[0].source_parameters == {"where"} and torch.equal(structure.sites[0].rows(), model.where)
    bias = structure.sites[5]
    assert bias.source_parameters == {"parts.0.far"} and torch.equal(bias.constant, model.parts[0].far)
    assert structure.position_parameters == {"absolute table": 0, "rotary": 24, "bias of displacements": 72}


def test_zeroing_leaves_masks_and_gains_and_rotates_by_angle_zero():
    model = tiny.draw(Own()).double()
    bare = Own().double()
    bare.load_state_dict(model.state_dict())
    bare.where.zero_()
    for part in bare.parts:
        nn.init.zeros_(part.far)
        nn.init.zeros_(part.angles)
    x = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    view = TracedModel(model)
    (a, _), (b, _) = view.without_position().run(x).layers[-1], TracedModel(bare).run(x).layers[-1]
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    (c, _), (d, _) = TracedModel(bare).shuffled(1).run(x).layers[-1], view.shuffled(1).run(x).layers[-1]
    torch.testing.assert_close(c, b, rtol=0, atol=0)
    assert not torch.allclose(d, a)
    assert view.attention(x)[0].weights[..., 0].max() < 1e-9  # the mask stays


def test_the_position_of_a_larger_image_is_taken_from_the_nearest_patches():
    small, large = Own(), Own((4, 6))
    take = partial(take_position, find_structure(small))
    site = next(site for site in find_structure(small).sites if site.kind == "absolute table")
    taken = take(find_structure(large), site.index, small.where)
    assert torch.equal(taken, large.where[[7, 9, 11, 19, 21, 23]])


def test_prefix_tokens_and_sizes_of_models_of_timm_are_found():
    for name, prefix in (("deit_tiny_distilled_patch16_224", 2), ("vit_base_patch16_siglip_224", 0)):
        model = timm.create_model(name, img_size=(32, 64), depth=1, embed_dim=12, num_heads=2)
        structure = find_structure(model)
        assert (structure.prefix, structure.grid.shape, structure.patch_size) == (prefix, (2, 4), (16, 16))


def test_a_model_that_converts_is_viewed_converted_unless_it_has_hooks():
    model = tiny.draw(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=12, num_heads=2)).eval()
    handle = model.blocks[1].register_forward_hook(lambda module, args, output: 2 * output)
    changed, compiled = view_of(model), view_of(torch.compile(model, backend="eager"))
    handle.remove()
    stock = view_of(model)
    assert isinstance(changed, TracedModel) and compiled.model is model and isinstance(stock, BackboneView)
    images = torch.randn(2, 3, 32, 32)
    for (x, grid), (y, other) in zip(stock.run(images).layers, TracedModel(model).run(images).layers, strict=True):
        torch.testing.assert_close(x, y)
        assert grid == other
    torch.testing.assert_close(stock.run(images).logits, model(images))


def test_models_that_take_no_single_images_are_refused():
    class Packed(Own):
        def forward(self, patches, shapes):
            return patches

    class Video(Own):
        def __init__(self):
            super().__init__()
            self.cut = nn.Conv3d(3, 4, 4, 4)

    with pytest.raises(ValueError, match="got Packed, which needs patches and shapes"):
        find_structure(Packed())
    with pytest.raises(ValueError, match="got Video, which cuts videos into patches"):
        find_structure(Video())
    with pytest.raises(ValueError, match="`img_size` must be one that Own runs on, got 9 x 9"):
        find_structure(Own(), (9, 9))


def test_two_patches_of_a_larger_image_have_the_position_of_one_of_a_smaller_image():
    smaller = Own((1, 3))
    table = take_position(find_structure(Own()), find_structure(smaller), 0, torch.zeros(6, 4))
    torch.testing.assert_close(table, smaller.where.repeat(2, 1))
