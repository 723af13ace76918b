"""The tables of models by name, which are read without building a model."""

import pytest
import torch

from graticule.backbones.base import Backbone
from graticule.backbones.registry import MODELS, list_models, register_backbone
from tiny import SMALLEST, full_size

names = pytest.mark.parametrize("named", [SMALLEST, pytest.param(list_models(), marks=pytest.mark.slow)])


@names
def test_the_tables_say_what_the_models_are(named):
    for name in named:
        model = full_size(name)
        size = MODELS[name]
        assert size.parameters == sum(p.numel() for p in model.parameters()), name
        assert (size.kind, size.dims, size.depths) == (type(model), model.embed_dims, model.depths), name
        assert size.img_size == model.img_size and size.configuration()["num_classes"] == model.num_classes, name


@names
def test_configurations_name_parameters_and_the_last_grid(named):
    for name in named:
        model = full_size(name)
        cfg, state = model.pretrained_cfg, model.state_dict()
        convolutions = cfg["first_conv"] if isinstance(cfg["first_conv"], tuple) else (cfg["first_conv"],)
        classifiers = cfg["classifier"] if isinstance(cfg["classifier"], tuple) else (cfg["classifier"],)
        for module in (*convolutions, *(classifiers if model.num_classes else ())):
            assert f"{module}.weight" in state, f"{name}: {module}"
        assert all(state[f"{module}.weight"].shape[1] == model.in_chans for module in convolutions), name
        assert cfg["input_size"] == (model.in_chans, *model.img_size), name
        if len(model.depths) > 1:
            assert cfg["pool_size"] == model.position_grids(model.grid)[-1].shape, name


def test_only_backbones_can_be_registered_as_backbones():
    with pytest.raises(TypeError, match="the backbone 'mine' must be a subclass of Backbone, got <class"):
        register_backbone("mine")(torch.nn.Linear)
    with pytest.raises(ValueError, match="`name` of a backbone must be an identifier"):
        register_backbone("not mine")(Backbone)
    assert "mine" not in list_models() and issubclass(MODELS["swin_tiny_patch4_window7_224"].kind, Backbone)
