"""Different encodings per layer, and biases of some heads: the same text in Python, commands and recipes."""

import torch

import graticule
from graticule import Grid, LayerPosition, build_position
from graticule.position.bias import Bias
from graticule.position.position import ENCODINGS
from in_turn import in_turn, refusals
from tiny import assert_same, draw, images

GRID = Grid(2, 3)


def build(encoding, joining="default", depth=4):
    return build_position(GRID, dim=24, depth=depth, num_heads=3, encoding=encoding, joining=joining)


def fields(position):
    return {name for name, value in position._asdict().items() if value is not None}


def test_the_same_encoding_can_have_other_options_in_other_layers():
    position = build("rope(base=100.0, layers=2) + rope(base=5.0, layers=[2, 3])")
    first, _, third, _ = (layer.rotary for layer in position(GRID))
    assert not torch.equal(first.table if hasattr(first, "table") else first[0], third[0])


TABLE = {"added_to_stream"}
LAYERS = [
    ("rope(layers=[0, 1]) + relative_bias(layers=[3])", "default", [{"rotary"}, {"rotary"}, set(), {"bias"}]),
    ("learnable + rope(layers=[3])", "lape(layers=2)", [{"after_norm"}, {"after_norm"}, set(), {"rotary"}]),
    ("learnable(layers=[1, 2])", "shared", [set(), TABLE, TABLE, set()]),
    ("learnable", "shared(layers=[1, 2])", [set(), TABLE, TABLE, set()]),
]


@in_turn(("encoding", "joining", "expected"), LAYERS)
def test_each_layer_has_the_encodings_that_name_it_and_those_of_the_joining(encoding, joining, expected):
    assert [fields(layer) for layer in build(encoding, joining)(GRID)] == expected


OPTIONAL = [
    name
    for name, kind in ENCODINGS.items()
    if "layers" in ENCODINGS.options(name) and kind.has_layers() and kind.joinable_as != "table"
]


@in_turn("encoding", OPTIONAL)
def test_layers_as_an_option_is_layers_of_the_joining(encoding):
    torch.manual_seed(0)
    option = build(f"{encoding}(layers=[0, 2])")
    torch.manual_seed(0)
    joining = build(encoding, "default(layers=[0, 2])")
    queries = torch.randn(2, 3, GRID.tokens, 8)
    for a, b in zip(option(GRID), joining(GRID), strict=True):
        assert fields(a) == fields(b)
        biases = [None if x.bias is None else Bias.of(x.bias).table(queries) for x in (a, b)]
        assert (biases[0] is None and biases[1] is None) or torch.equal(*biases)
    assert [layer != LayerPosition() for layer in option(GRID)] == [True, False, True, False]


def test_the_layers_of_a_gated_mlp_can_mix_in_different_ways():
    encoding = "ggqpe(layers=1) + gsgu(layers=[2]) + token_mlp(layers=[1])"
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_blocks": 3, "groups": 4, "num_classes": 5}
    model = draw(graticule.create_model("gmlp_s16_224", encoding=encoding, **sizes)).double().eval()
    x = images(dtype=torch.float64)
    logits = model(x)
    assert_same(graticule.fold(model)(x), logits, 1e-12)
    graticule.unfold(model)
    names = {name.split(".")[-1] for name, _ in model.position.named_parameters() if ".biases." in name}
    assert names == {"0", "1", "2"}


test_invalid_layers_and_heads_are_refused = refusals(
    ("rope(layers=[0]) + rope(layers=[0, 1])", "must name each encoding once per layer"),
    ("rope + rope(layers=[1])", "must name each encoding once per layer"),
    ("rope(layers=5)", "`layers` must be from 1 to the depth of the model, 4, got 5"),
    ("rope(layers=[1, 4])", "`layers` must be .* different layers from 0 to 3"),
    ("learnable(layers=[1])", "`layers` must be left out with joining 'default' and an absolute"),
    ("none(layers=[1])", "none must not have the option 'layers'"),
    ("shaw(heads=[0])", "shaw must not have the option 'heads'"),
    ("relative_bias(layers='x')", "`layers` of encoding relative_bias must"),
    call=build,
)
