"""With the same weights, outputs equal timm's, up to the last digits of float64."""

import pytest
import timm
import torch

import graticule
from in_turn import in_turn
from tiny import SIZE, assert_same, draw, images

MODELS = ["deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"]
VITS = ["vit_tiny_patch16_224", "vit_small_patch32_224", "vit_base_patch8_224"]


def both(name, **kwargs):
    kwargs = {**SIZE, **kwargs}
    reference = draw(timm.create_model(name, **kwargs)).double().eval()
    ours = graticule.create_model(name, **kwargs).double().eval()
    ours.load_state_dict(reference.state_dict(), strict=True)
    return ours, reference


@in_turn("name", MODELS + VITS)
@in_turn("size", [(32, 32), (24, 40)])
def test_the_logits_are_timms(name, size):
    ours, reference = both(name, img_size=size)
    x = images(*size, dtype=torch.float64)
    assert_same(ours(x), reference(x))
    assert_same(ours.forward_features(x), reference.forward_features(x))


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_at_another_size_are_those_of_timm_set_to_it(name):
    ours, reference = both(name)
    reference.set_input_size((24, 40))
    x = images(24, 40, dtype=torch.float64)
    # timm resamples in float32 whatever the dtype of the table
    assert_same(ours(x), reference(x), 1e-5)
    ours.set_input_size((24, 40))
    assert_same(ours(x), reference(x), 1e-5)


@in_turn(
    "kwargs",
    [
        *({"global_pool": pool, "class_token": True} for pool in ("avg", "max", "")),
        *({"global_pool": pool, "class_token": False} for pool in ("avg", "avgmax")),
        *({"global_pool": "avg", "class_token": True, "fc_norm": False}, {"global_pool": "token", "fc_norm": True}),
        *({"reg_tokens": 3}, {"num_classes": 0}, {"qkv_bias": False, "mlp_ratio": 2.0}),
        {"patch_size": (8, 4), "in_chans": 1},
    ],
)
def test_every_way_to_pool_and_to_build_is_timms(kwargs):
    ours, reference = both("vit_tiny_patch16_224", **kwargs)
    x = torch.randn(2, kwargs.get("in_chans", 3), 32, 32, dtype=torch.float64)
    assert ours.num_prefix_tokens == reference.num_prefix_tokens
    assert_same(ours(x), reference(x))
    pooled = [model.forward_head(model.forward_features(x), pre_logits=True) for model in (ours, reference)]
    assert_same(*pooled)


@in_turn("name", MODELS)
@in_turn(
    "options",
    [
        *({}, {"indices": 2}, {"indices": [0, 2], "norm": True}, {"indices": [0, -2], "stop_early": True}),
        *({"indices": 2, "return_prefix_tokens": True}, {"output_dict": True}),
        {"indices": 1, "output_fmt": "NLC", "intermediates_only": True},
        {"return_prefix_tokens": True, "intermediates_only": True, "norm": True},
        {"output_dict": True, "return_prefix_tokens": True, "intermediates_only": True, "output_fmt": "NLC"},
    ],
)
def test_intermediates_are_timms(name, options):
    ours, reference = both(name, img_size=(24, 40))
    x = images(24, 40, dtype=torch.float64)
    assert_same(ours.forward_intermediates(x, **options), reference.forward_intermediates(x, **options))


@pytest.mark.parametrize("options", [{}, {"out_indices": (0, 2)}, {"out_indices": [-1]}])
def test_features_only_is_timms(options):
    kwargs = {**SIZE, "depth": 4, "img_size": (24, 40), "features_only": True, **options}
    reference = draw(timm.create_model("deit_tiny_patch16_224", **kwargs)).double().eval()
    ours = graticule.create_model("deit_tiny_patch16_224", **kwargs).double().eval()
    ours.model.load_state_dict(reference.model.state_dict(), strict=True)
    x = images(24, 40, dtype=torch.float64)
    assert_same(ours(x), reference(x))
    assert ours.feature_info.channels() == reference.feature_info.channels()
    assert ours.feature_info.reduction() == reference.feature_info.reduction()
    assert ours.feature_info.module_name() == reference.feature_info.module_name()


@in_turn("name", MODELS)
@in_turn(("prune_norm", "prune_head"), [(False, True), (True, True), (False, False)])
def test_pruning_keeps_what_timms_keeps(name, prune_norm, prune_head):
    ours, reference = both(name)
    indices = [model.prune_intermediate_layers([0, 1], prune_norm, prune_head) for model in (ours, reference)]
    assert indices[0] == indices[1] and len(ours.blocks) == 2 and ours.num_classes == reference.num_classes
    x = images(dtype=torch.float64)
    assert_same(ours(x), reference(x))
    assert_same(ours.forward_intermediates(x, indices=[0, 1]), reference.forward_intermediates(x, indices=[0, 1]))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_timms(name):
    ours, reference = both(name)
    x = images(dtype=torch.float64)
    for model in (ours, reference):
        model(x).square().sum().backward()
    renamed = {"position.encodings.0.pos_embed": "pos_embed"}
    expected = {key: parameter.grad for key, parameter in reference.named_parameters()}
    for key, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[renamed.get(key, key)], rtol=0, atol=1e-10, msg=key)


def test_a_distilled_model_in_training_returns_both_logits_as_timms():
    ours, reference = both("deit_tiny_distilled_patch16_224")
    x = images(dtype=torch.float64)
    for model in (ours.train(), reference.train()):
        model.set_distilled_training()
    assert_same(ours(x), reference(x))
    for model in (ours, reference):
        model.set_distilled_training(False)
    assert_same(ours(x), reference(x))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_grouped_as_timms(name):
    ours, timms = both(name)
    for coarse in (False, True):
        groups = [
            timm.models.group_parameters(model, model.group_matcher(coarse), reverse=True) for model in (ours, timms)
        ]
        groups[0]["pos_embed"] = groups[0].pop("position.encodings.0.pos_embed")
        assert groups[0] == groups[1]


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "twins_svt_small"])
def test_the_rates_of_stochastic_depth_are_timms_to_the_last_bit(name):
    """They are rounded to float32 in both, so a model in training drops the same paths for the same random numbers."""
    with torch.device("meta"):
        ours, reference = (create(name, drop_path_rate=0.1) for create in (graticule.create_model, timm.create_model))
    ours, reference = ([m.drop_prob for m in model.modules() if hasattr(m, "drop_prob")] for model in (ours, reference))
    assert ours == reference and max(ours) == float(torch.tensor(0.1))
