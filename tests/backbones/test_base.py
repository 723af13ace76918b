"""A user-defined backbone that extends only the base class."""

import pytest
import timm
import timm.optim
import torch
from torch import nn

import graticule
from graticule.layers.block import Block
from graticule.testing.methods import check_backbone


class OwnBackbone(graticule.Backbone):
    """One stage of blocks on patches of 4, without a class token."""

    first_conv = "stem"
    takes = graticule.Backbone.takes | Block.takes

    def __init__(self, position, img_size=16, patch_size=4, in_chans=1, num_classes=5, dim=12, depth=2, heads=3):
        sizes = {"img_size": img_size, "patch_size": patch_size, "embed_dims": (dim,), "depths": (depth,)}
        super().__init__(in_chans=in_chans, num_classes=num_classes, **sizes)
        self.stem = nn.Conv2d(in_chans, dim, patch_size, patch_size)
        self.build_position(position, heads)
        self.blocks = nn.ModuleList(self.block_of(dim, heads) for _ in range(depth))
        self.build_head(nn.LayerNorm)
        self.finish()

    def block_of(self, dim, heads):
        return Block(dim, heads)

    def tokenize(self, x, stage):
        return self.stem(x).flatten(2).mT


class Averages(nn.Module):
    """Adds the mean of all tokens to each; it uses no field of the position but `after_norm`, and that only if told."""

    def __init__(self, dim, inner):
        super().__init__()
        self.norm, self.mlp, self.inner = nn.LayerNorm(dim), nn.Linear(dim, dim), inner

    def forward(self, x, position, grid):
        y = self.norm(x)
        y = position.add_after_norm(y) if self.inner else y
        return x + self.mlp(y).relu() + y.mean(1, keepdim=True)


class Pooling(OwnBackbone):
    takes = graticule.Backbone.takes
    inner = False

    def block_of(self, dim, heads):
        return Averages(dim, self.inner)


class Careless(Pooling):
    takes = graticule.Backbone.takes | {"after_norm", "bias"}
    inner = True


@pytest.fixture(scope="module")
def registered(forgotten):
    graticule.register_backbone("own_tiny", encoding="sinusoidal_2d")(OwnBackbone)
    graticule.register_backbone("own_deep", depth=4)(OwnBackbone)
    graticule.register_backbone("own_pooling")(Pooling)
    graticule.register_backbone("own_careless")(Careless)


@pytest.mark.usefixtures("registered")
def test_it_passes_the_contract():
    check_backbone("own_tiny", compiled=False)
    check_backbone("own_tiny", compiled=False, encoding="learnable + sandwich", joining="lape")


@pytest.mark.usefixtures("registered")
def test_a_backbone_takes_what_the_loop_over_its_blocks_applies():
    for encoding, joining in (("learnable", "shared"), ("peg(places=-1)", "default"), ("peg", "default")):
        graticule.create_model("own_pooling", encoding=encoding, joining=joining)
    for encoding, joining in (("rope", "default"), ("relative_bias", "default"), ("learnable", "lape")):
        with pytest.raises(
            ValueError, match=r"Pooling can use, which gives its layers added_to_stream, map_after, map_before; got"
        ):
            graticule.create_model("own_pooling", encoding=encoding, joining=joining)
    check_backbone("own_pooling", compiled=False)


@pytest.mark.usefixtures("registered")
def test_a_field_that_a_backbone_takes_and_ignores_is_found():
    with pytest.raises(AssertionError, match=r"`takes` must have only fields .* not `bias`, which layer 0 ignores"):
        check_backbone("own_careless", compiled=False)


@pytest.mark.usefixtures("registered")
def test_a_recipe_trains_a_backbone_without_stochastic_depth():
    recipe = graticule.Recipe("own_tiny", img_size=(16, 16), patch_size=4)
    assert graticule.lab.tasks.build_backbone(recipe, 5, 1, (16, 16)).num_classes == 5
    with pytest.raises(ValueError, match=r"`drop_path_rate` must be left out: own_tiny has no such argument, got 0\.1"):
        graticule.lab.tasks.build_backbone(graticule.Recipe("own_tiny", drop_path_rate=0.1), 5, 1, (16, 16))


@pytest.mark.usefixtures("registered")
def test_it_has_names_sizes_and_the_interface_of_timm():
    assert {"own_tiny", "own_deep"} <= set(graticule.list_models())
    model = graticule.create_model("own_deep", num_classes=7)
    assert (model.depths, model.num_classes, len(model.feature_info)) == ((4,), 7, 4)
    assert model.feature_info[3] == {"module": "blocks.3", "num_chs": 12, "reduction": 4}
    assert model.pretrained_cfg["input_size"] == (1, 16, 16) and model.pretrained_cfg["first_conv"] == "stem"
    features = timm.create_model("graticule_own_deep", features_only=True)
    assert [tuple(y.shape) for y in features(torch.randn(2, 1, 8, 12))] == [(2, 12, 2, 3)] * 3
    groups = timm.optim.param_groups_layer_decay(model, 0.1, model.no_weight_decay(), layer_decay=0.5)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
