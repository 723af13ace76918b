"""A user-defined backbone that extends only the base class."""

import pytest
import timm
import timm.optim
import torch
from torch import nn

import graticule
from graticule.layers import Block
from graticule.testing import check_backbone


class OwnBackbone(graticule.Backbone):
    """One stage of blocks on patches of 4, without a class token."""

    first_conv = "stem"

    def __init__(self, position, img_size=16, patch_size=4, in_chans=1, num_classes=5, dim=12, depth=2, heads=3):
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            embed_dims=(dim,),
            depths=(depth,),
        )
        self.stem = nn.Conv2d(in_chans, dim, patch_size, patch_size)
        self.build_position(position, heads)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.build_head(nn.LayerNorm)
        self.finish()

    def tokenize(self, x, stage):
        return self.stem(x).flatten(2).mT


@pytest.fixture(scope="module")
def registered(forgotten):
    """Register the backbone for the tests of this module."""
    graticule.register_backbone("own_tiny", encoding="sinusoidal_2d")(OwnBackbone)
    graticule.register_backbone("own_deep", depth=4)(OwnBackbone)


@pytest.mark.usefixtures("registered")
def test_it_passes_the_contract():
    check_backbone("own_tiny", compiled=False)
    check_backbone("own_tiny", compiled=False, encoding="learnable + sandwich", joining="lape")


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


def test_what_is_missing_is_said_by_python():
    class Empty(graticule.Backbone):
        pass

    with pytest.raises(TypeError, match=r"abstract method '?tokenize"):
        Empty(img_size=8, patch_size=4, in_chans=1, num_classes=1, embed_dims=(4,), depths=(1,))
