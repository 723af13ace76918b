"""Pyramids: sizes, stages, supported positions, and support of timm's tools and torch's compilers."""

import pytest
import torch
import torch.nn.functional as F
from torch.export import Dim, export

import graticule
from graticule import Grid
from in_turn import in_turn
from tiny import SMALL, assert_same, draw, images

SIZE = {
    "img_size": 64,
    "embed_dims": [8, 16, 24, 32],
    "num_heads": [1, 2, 3, 4],
    "depths": [1, 2, 1, 1],
    "mlp_ratios": [4, 4, 2, 2],
    "num_classes": 5,
}
DIMS = SIZE["embed_dims"]
NAMES = ["pvt_tiny", "pvt_tiny_peg", "pvt_tiny_gap", "pvt_tiny_peg_gap"]
names = in_turn("name", NAMES)


def pvt(name="pvt_tiny", **kwargs):
    return graticule.create_model(name, **{**SIZE, **kwargs})


def wide(*size, **kwargs):
    return images(*(size or (64, 64)), dtype=torch.float64, **kwargs)


# Sizes


# Computation


@names
def test_the_forward_pass_is_the_stages_with_each_ones_position(name):
    """Computes the whole forward pass by hand, from the modules."""
    model = draw(pvt(name)).double().eval()
    pixels = x = wide(64, 64)
    for s in range(4):
        embed = model.patch_embeds[s]
        y = F.conv2d(x, embed.proj.weight, embed.proj.bias, stride=2 if s else 4)
        height, width = y.shape[-2:]
        stream = F.layer_norm(y.flatten(2).mT, (DIMS[s],), embed.norm.weight, embed.norm.bias, 1e-5)
        prefix = int(s == 3 and "gap" not in name)
        if prefix:
            stream = torch.cat([model.cls_token.expand(2, -1, -1), stream], 1)
        if "peg" not in name:
            stream = stream + model.position.stages[s].encodings[0].pos_embed
        for index, block in enumerate(model.blocks[s]):
            where = (graticule.LayerPosition(), Grid(height, width, prefix=prefix))
            stream = stream + block.attn(block.norm1(stream), *where)
            stream = stream + block.mlp(block.norm2(stream))
            if "peg" in name and index == 0:
                c = model.position.stages[s].pegs["0"].proj[0]
                image = stream[:, prefix:].mT.unflatten(-1, (height, width))
                added = F.conv2d(image, c.weight, c.bias, padding=1, groups=DIMS[s]).flatten(2).mT
                stream = torch.cat([stream[:, :prefix], stream[:, prefix:] + added], 1)
        x = stream[:, prefix:].mT.unflatten(-1, (height, width))
    end = model.norm(stream)
    assert_same(model(pixels), model.head(end.mean(1) if "gap" in name else end[:, 0]))


# Combinations


@in_turn(
    ("kwargs", "said"),
    [
        ({"encoding": "relative_bias"}, "layer 0 `bias`"),
        ({"encoding": "learnable+relative_bias"}, "layer 0 `bias`"),
        ({"encoding": "shaw"}, "layer 0 `bias`"),
        ({"encoding": "convolutional_projection"}, "layer 1 `inputs`"),
        ({"encoding": "convolutional_projection(places=-1)"}, "layer 0 `inputs`"),
        ({"encoding": "peg(acts_on='queries_keys')"}, "layer 1 `inputs`"),
    ],
)
def test_an_encoding_that_acts_inside_attention_is_refused_by_name(kwargs, said):
    message = f"`encoding` must be one that PyramidVisionTransformer can use, .*; got one that gives {said}"
    with pytest.raises(ValueError, match=message):
        pvt(depths=[2, 2, 2, 2], **kwargs)


@in_turn(
    ("kwargs", "message"),
    [
        ({"embed_dims": [8, 16, 24]}, "`embed_dims` and `depths` must have .* every stage, got 3 and 4"),
        ({"num_heads": [1, 2, 3]}, "`num_heads` must have a value for each of the 4 stages, got 3"),
        ({"depths": [1, 1, 1]}, "for each of the 3 stages, got 4 and 4"),
        ({"mlp_ratios": [4, 4, 4]}, "`mlp_ratios` and `sr_ratios` must .* 4 stages, got 3 and 4"),
        ({"sr_ratios": [8, 4, 2, 1, 1]}, "`mlp_ratios` and `sr_ratios` must .* 4 stages, got 4 and 5"),
        ({"depths": [1, 0, 1, 1]}, "`depths` must be at least 1, got 0"),
        ({"depths": [], "embed_dims": [], "num_heads": [], "mlp_ratios": [], "sr_ratios": []}, "`depths` must"),
        ({"num_classes": -1}, "`num_classes` must be at least 0, got -1"),
        ({"in_chans": 0}, "`in_chans` must be at least 1, got 0"),
        ({"drop_path_rate": 1.0}, r"`drop_path_rate` must be in \[0, 1\), got 1.0"),
        ({"num_heads": [1, 2, 5, 4]}, "`embed_dim` must be a multiple of `num_heads`, got 24 with 5 heads"),
        ({"sr_ratios": [8, 4, 0, 1]}, "`sr_ratios` must be at least 1 .* got 0 for 4 x 4 patches"),
        ({"sr_ratios": [8, 4, 8, 1]}, "`sr_ratios` must be .* no more than the sides .* got 8 for 4 x 4 patches"),
        ({"img_size": (64, 32), "sr_ratios": [8, 4, 4, 1]}, "`sr_ratios` must .* got 4 for 4 x 2 patches"),
        ({"encoding": "peg(places=1)"}, "`places` must be from -1, .* 1 layers, to 0, got 1"),
        ({"img_size": (64, 100)}, "got width 100 with a patch of 32; the nearest sizes are 96 and 128"),
        ({"global_pool": "max"}, "`global_pool` must be one of '', 'token', 'avg', got 'max'"),
        ({"global_pool": "avg", "class_token": True}, "`class_token` must be False where .* got True"),
        ({"pretrained": True}, "`pretrained` must be False: timm's hub has no weights of pvt_tiny;"),
    ],
)
def test_invalid_arguments_are_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        pvt(**kwargs)


# Training


# timm's interface


@names
def test_the_final_norm_is_for_the_last_stage_alone(name):
    model = draw(pvt(name)).double().eval()
    x = wide()
    plain = model.forward_intermediates(x, intermediates_only=True)
    normed = model.forward_intermediates(x, intermediates_only=True, norm=True)
    assert all(torch.equal(a, b) for a, b in zip(plain[:3], normed[:3], strict=True))
    assert_same(normed[3].flatten(2).mT, model.norm(plain[3].flatten(2).mT))
    assert_same(normed[3].flatten(2).mT, model.forward_features(x)[:, model.num_prefix_tokens :])


# Folding, compiling, exporting, other memory


def two_stages(name, **kwargs):
    """Return a pyramid of two stages of one block, with every weight drawn, in float64."""
    return draw(graticule.create_model(name, **{**SMALL["PVT"][1], "depths": (1, 1), **kwargs})).double().eval()


def exported(model, step):
    """Export a model for any height and width that are multiples of `step`."""
    height, width = (step * Dim(side, min=2, max=16) for side in ("h", "w"))
    return export(model, (wide(2 * step, 3 * step),), dynamic_shapes=({2: height, 3: width},)).module()


def test_a_pyramid_with_pegs_is_exported_for_any_height_and_width():
    model = two_stages("pvt_tiny_peg")
    program = exported(model, 8)
    for size in ((16, 24), (32, 16), (24, 40)):
        x = wide(*size)
        assert_same(program(x), model(x))
