"""Crops: patches have their positions in a larger image."""

import re
from pathlib import Path

import pytest
import torch

import graticule
from graticule import Crop, Grid
from graticule.encodings.forms.mixing import TokenMixing
from graticule.position.position import ENCODINGS
from graticule.position.tokens import Subset
from graticule.testing.places import DIM, HEADS, build_random, check_layers
from in_turn import in_turn, refusals
from tiny import assert_same, laws_of_places

BUILT, WHOLE = Grid(4, 5, prefix=1), Grid(6, 8, prefix=1)
#: A crop of whole patches, and its tokens in the whole image.
CROP = Grid(3, 4, prefix=1, crop=Crop(WHOLE.shape, (2, 3, 3, 4)))
TOKENS = torch.tensor([0, *(1 + y * 8 + x for y in range(2, 5) for x in range(3, 7))])


def chosen(position, tokens, count=WHOLE.tokens):
    return position.take(Subset(tokens, count))


def test_positional_attention_is_over_the_patches_of_the_crop():
    position = build_random(WHOLE, "gpsa")
    part, full = position(CROP)[0].positional, position(WHOLE)[0].positional
    patches = TOKENS[1:]
    seen = full.weights[:, patches][:, :, patches]
    assert_same(part.weights[:, 1:, 1:], seen / seen.sum(-1, keepdim=True), 1e-12)
    assert_same(part.gate, full.gate[:, TOKENS], 1e-12)


@in_turn(
    "encoding",
    [
        *("rope(preset='dinov3')", "rope(coordinates='max')", "rope(coordinates='corners')", "rope(preset='pe')"),
        *("rope(scaling='yarn', ramp=(0.25, 1.0))", "rope(scaling='ntk')", "rope_1d(scaling='yarn')"),
    ],
)
def test_coordinates_and_frequencies_relative_to_a_grid_are_relative_to_the_whole_image(encoding):
    assert laws_of_places(encoding)[-1] == "crop"


def test_a_crop_between_patches_is_evaluated_there():
    grid = Grid(2, 2, crop=Crop((6, 8), (0.5, 1.25, 2, 2)))
    assert grid.coordinates().tolist() == [[0.5, 1.25], [0.5, 2.25], [1.5, 1.25], [1.5, 2.25]]
    table = build_random(Grid(6, 8), "sinusoidal_2d")(grid)[0].added_to_stream
    rate = 10_000 ** (-torch.arange(18, dtype=torch.float64) / 18)
    for row, (y, x) in zip(table, grid.coordinates().tolist(), strict=True):
        expected = torch.cat([torch.stack([(t * rate).sin(), (t * rate).cos()], -1).flatten() for t in (x, y)])
        assert_same(row, expected, 1e-12)


def test_patches_of_twice_the_size_are_twice_as_far_apart():
    large = Grid(3, 4, prefix=1, crop=Crop((6, 8), (0, 0, 6, 8)))
    assert large.coordinates()[0].tolist() == [0.5, 0.5]
    assert_same(large.offsets(), 2 * Grid(3, 4, prefix=1).offsets(), 1e-12)
    rope = build_random(BUILT, "rope")
    every_second = Grid(3, 4, prefix=1, crop=Crop((18, 24), (0, 0, 9, 12)))  # so that centers are at whole patches
    tokens = torch.tensor([0, *(1 + (3 * y + 1) * 24 + 3 * x + 1 for y in range(3) for x in range(4))])
    expected = [chosen(layer, tokens, 1 + 18 * 24) for layer in rope(Grid(18, 24, prefix=1))]
    check_layers(rope(every_second), expected, 13, "every second patch")


def test_a_quadratic_table_is_interpolated_exactly_between_patches():
    position = build_random(Grid(8, 9), "learnable")
    y, x = Grid(8, 9).coordinates().double().unbind(-1)
    with torch.no_grad():
        next(position.parameters())[0] = (y * y - 3 * y * x + 2 * x)[:, None]
    grid = Grid(3, 4, crop=Crop((8, 9), (2.3, 1.75, 3, 4.4)))
    y, x = grid.coordinates().unbind(-1)
    expected = (y * y - 3 * y * x + 2 * x)[:, None].expand(-1, DIM)
    assert_same(position(grid)[0].added_to_stream, expected, 1e-12)


def test_a_bias_table_is_interpolated_between_displacements():
    position = build_random(Grid(6, 8), "relative_bias")
    dy, dx = (layer.double() for layer in Grid(6, 8).displacements())
    with torch.no_grad():
        for table in position.parameters():
            table.copy_((dy[:, None] ** 2 + dx).flatten()[:, None].expand(-1, HEADS))
    grid = Grid(3, 4, crop=Crop((6, 8), (1, 1, 4.5, 6)))  # patches of 1.5
    dy, dx = grid.offsets().unbind(-1)
    assert dy.max() == 3.0
    assert_same(position(grid)[0].bias[0], dy**2 + dx, 1e-12)


@pytest.fixture(scope="module")
def model():
    return vit("learnable + rope")


def vit(encoding, **kwargs):
    torch.manual_seed(0)
    sizes = {"img_size": (32, 40), "embed_dim": DIM, "depth": 2, "num_heads": HEADS, "num_classes": 5, "patch_size": 8}
    return graticule.create_model("vit_tiny_patch16_224", encoding=encoding, **{**sizes, **kwargs}).double().eval()


IMAGES = torch.randn(2, 3, 24, 32, dtype=torch.float64)


@torch.no_grad()
def test_a_model_computes_a_crop_with_the_position_of_that_part(model):
    crop = Crop((6, 8), (2, 3, 3, 4))
    tokens = model.embed(IMAGES)
    positions = [chosen(layer, TOKENS) for layer in model.position(WHOLE)]
    layers = [(block, layer, (Grid(3, 4, prefix=1),)) for block, layer in zip(model.blocks, positions, strict=True)]
    *_, tokens = model.run_blocks(tokens, layers)
    expected = model.forward_head(model.norm(tokens))
    assert_same(model(IMAGES, crop=crop), expected, 1e-12)
    assert not torch.allclose(model(IMAGES), expected, atol=1e-6)
    _, features = model.forward_intermediates(IMAGES, crop=crop)
    assert_same(features[-1].flatten(2).mT, tokens[:, 1:], 1e-12)


@torch.no_grad()
def test_a_crop_of_the_whole_image_is_the_image(model):
    crop = Crop((3, 4), (0, 0, 3, 4))
    assert_same(model(IMAGES, crop=crop), model(IMAGES), 1e-12)


@pytest.mark.slow
def test_a_model_with_crops_compiles_as_one_graph():
    model = vit("learnable + rope", depth=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for crop in (Crop((6, 8), (2, 3, 3, 4)), Crop((6, 8), (1, 2, 3, 4)), Crop((6, 8), (0.5, 0.25, 3, 6))):
        assert_same(compiled(IMAGES, crop=crop), model(IMAGES, crop=crop), 1e-12)


def test_a_pyramid_takes_a_crop():
    sizes = {"img_size": 64, "num_classes": 5, "embed_dims": (8, 8, 16, 16), "depths": (1,) * 4, "num_heads": (1,) * 4}
    pvt = graticule.create_model("pvt_tiny", encoding="sinusoidal_2d", **sizes).eval()
    image = torch.randn(1, 3, 64, 64)
    outputs = pvt(image, crop=Crop((32, 32), (16, 8, 16, 16)))
    assert outputs.shape == (1, 5) and not torch.allclose(outputs, pvt(image))


def test_what_cannot_encode_a_crop_says_so():
    crop = Crop((6, 8), (2, 3, 3, 4))
    refused = [name for name, kind in ENCODINGS.items() if not kind.crops and not issubclass(kind, TokenMixing)]
    assert "peg" in refused
    for encoding in refused:
        if encoding == "none":
            continue
        with pytest.raises(ValueError, match=f"`crop` must be left out with {encoding}|with B"):
            vit(encoding, patch_size=8)(IMAGES, crop=crop)
    sizes = {"img_size": (24, 32), "patch_size": 8, "embed_dim": 8, "num_blocks": 1, "num_classes": 2}
    gmlp = graticule.create_model("gmlp_s16_224", **sizes).double()
    for model, images, part, message in [
        (gmlp, IMAGES, crop, "`crop` must be left out"),
        (vit("relative_bias", joining="lape"), IMAGES, crop, "`crop` must be left out with NormalizedBias"),
        (vit("sinusoidal_1d"), IMAGES, Crop((6, 8), (0.5, 0, 3, 4)), "`crop` must consist of whole patches"),
        (vit("shaw"), IMAGES, Crop((6, 8), (0, 0, 4.5, 4)), "`crop` must not be scaled with shaw"),
        (graticule.fold(vit("rope"), (24, 32)), IMAGES, crop, "folded .* got a crop"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(images, crop=part)


test_a_crop_that_is_not_within_the_whole_image_is_refused = refusals(
    *((((4, 4), box), "`box` must be") for box in ((0, 0, 5, 4), (-1, 0, 2, 2), (0, 0, 0, 2), (0, 0, float("nan"), 2))),
    (((4, 4), (0, 0, 2)), "`box` must have a start and a size for each axis"),
    (((0, 4), (0, 0, 1, 1)), "`shape` must be at least 1"),
    (((4.5, 4), (0, 0, 1, 1)), "`shape` must be a whole number"),
    call=lambda arguments: Crop(*arguments),
    error=(ValueError, TypeError),
)


def test_the_example_of_the_docs_runs():
    page = (Path(__file__).parents[2] / "docs" / "sizes.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python crops\n(.*?)```", page, flags=re.DOTALL)
    namespace = {}
    exec(compile(code, "sizes.md", "exec"), namespace)
    assert namespace["logits"].shape == (2, 1000)
    assert Crop.of_pixels((448, 448), (224, 0, 224, 224), (16, 16)) == Crop((28, 28), (14, 0, 14, 14))
