"""MViTv2 and CaiT of timm are converted to ours and back, with equal outputs and bits, also at other sizes."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.cait import Cait
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from timm_models import assert_same_bits, difference, in_float64, randomize

import graticule
from tiny import holds, without_memory

#: Arguments of a small model of each form.
FORMS = {
    "plain": {},
    "class token": {"use_cls_token": True},
    "a table beside the biases": {"use_cls_token": True, "use_abs_pos": True},
    "a table alone": {"use_abs_pos": True, "rel_pos_type": ""},
    "no position": {"rel_pos_type": ""},
    "no residual pooling": {"residual_pooling": False, "qkv_bias": False},
    "MLPs that widen": {"expand_attn": False},
    "MLPs that widen, with a class token and a table": {
        "expand_attn": False,
        "use_cls_token": True,
        "use_abs_pos": True,
    },
    "finer keys": {"stride_kv_adaptive": (2, 2)},
    "three stages of two heads": {
        "depths": (2, 1, 2),
        "num_heads": 2,
        "stride_q": ((1, 1), (2, 2), (2, 2)),
        "stride_kv_adaptive": (8, 8),
    },
}


def timms(img_size=64, **form):
    """Build a small MViTv2 of timm with random parameters."""
    config = MultiScaleVitCfg(**{"depths": (1, 2, 3, 2), "embed_dim": 8, "num_heads": 1, **form})
    torch.manual_seed(0)
    return randomize(MultiScaleVit(config, img_size=(img_size, img_size), num_classes=5)).eval()


def caits(**form):
    """Build a small CaiT of timm with random parameters."""
    small = {"img_size": (32, 48), "patch_size": 8, "num_classes": 5, "embed_dim": 24, "depth": 2, "num_heads": 3}
    torch.manual_seed(0)
    return randomize(Cait(**{**small, **form})).eval()


#: Function that builds a model of timm, its options, and the size of its images.
MODELS = [
    *[(timms, form, (64, 64)) for form in FORMS.values()],
    (caits, {}, (32, 48)),
    (caits, {"global_pool": "avg", "qkv_bias": False}, (32, 48)),
    (caits, {"depth_token_only": 3, "mlp_ratio_token_only": 2.0}, (32, 48)),
]


@pytest.mark.parametrize(("build", "form", "size"), MODELS)
def test_outputs_and_bits_of_the_way_back_equal_timm(build, form, size):
    with in_float64():
        theirs = build(**form)
        ours = graticule.convert(theirs)
        assert difference(ours, theirs, *size) < 1e-10
        assert_same_bits(graticule.to_timm(ours), theirs)
        assert graticule.published_state_dict(ours).keys() == theirs.state_dict().keys()


def test_outputs_equal_timm_in_float32():
    theirs, cait = timms(use_cls_token=True), caits()
    assert difference(graticule.convert(theirs), theirs, 64, 64) < 1e-5
    assert difference(graticule.convert(cait), cait, 32, 48) < 1e-5
    assert graticule.convert(cait)(torch.randn(1, 3, 64, 24)).shape == (1, 5)


@torch.no_grad()
def resampled(model, size):
    """Resample timm's tables for another image size, as timm does when loading a checkpoint of another size."""
    model = copy.deepcopy(model)
    grid = [side // 4 for side in size]
    for index, stage in enumerate(model.stages):
        for layer, block in enumerate(stage.blocks):
            halves = bool(index) and not layer
            step = min(2 if halves else 1, block.attn.pool_k.stride[0])
            for name, side in zip(("rel_pos_h", "rel_pos_w"), grid, strict=True):
                table = getattr(block.attn, name)
                rows = 2 * (side // step) - 1
                new = F.interpolate(table.T[None], rows, mode="linear")[0].T
                setattr(block.attn, name, torch.nn.Parameter(new))
            grid = [side // 2 for side in grid] if halves else grid
    return model


@pytest.mark.parametrize("size", [(96, 96), (32, 96)])
def test_at_another_size_the_tables_are_resampled_as_timm_does_it(size):
    with in_float64():
        theirs = timms(use_cls_token=True)
        ours, x = graticule.convert(theirs), torch.randn(2, 3, *size)
        with torch.no_grad():
            expected = resampled(theirs, size)(x)
            torch.testing.assert_close(ours(x), expected, rtol=0, atol=1e-10)
            ours.set_input_size(size)
            torch.testing.assert_close(ours(x), expected, rtol=0, atol=1e-10)


def test_the_models_by_name_have_the_parameters_of_timms():
    for name in ("mvitv2_tiny", "mvitv2_base_cls"):
        with without_memory():
            ours, theirs = graticule.create_model(name), timm.create_model(name)
        shapes = {key: value.shape for key, value in theirs.state_dict().items()}
        found = {key: value.shape for key, value in graticule.published_state_dict(ours).items()}
        if name.endswith("base_cls"):  # published for other classes
            assert {key for key in shapes if shapes[key] != found[key]} <= {"head.fc.weight", "head.fc.bias"}
        assert found.keys() == shapes.keys() and name in graticule.list_models()
        assert sum(map(torch.Size.numel, found.values())) == graticule.backbones.MODELS[name].parameters


def test_weights_under_the_names_of_the_released_code_are_taken():
    theirs = timms(use_cls_token=True)
    ours = graticule.convert(theirs)
    names = {"head.fc": "head.projection", ".shortcut_proj_attn": ".proj"}
    firsts, released = [0, 1, 3, 6], {}
    for key, value in theirs.state_dict().items():
        for mine, other in names.items():
            key = key.replace(mine, other)
        if key.startswith("stages."):
            _, stage, _, block, leaf = key.split(".", 4)
            key = f"blocks.{firsts[int(stage)] + int(block)}.{leaf}"
        released[key] = value
    fresh = graticule.convert(randomize(copy.deepcopy(theirs)))
    fresh.load_state_dict(
        graticule.checkpoints.own_state(fresh, graticule.checkpoints.read_state({"model_state": released}))
    )
    assert holds(ours, fresh.state_dict())


def test_unsupported_models_are_named():
    refused = {
        "`stages.0.blocks.0.attn` of MultiScaleVit must be MultiScaleAttention": timms(pool_first=True),
        "`stages.0.blocks.0.attn.pool_q` of MultiScaleVit must be a convolution": timms(mode="conv_unshared"),
        "`stages.0.blocks.0.attn.pool_q.stride` of MultiScaleVit must be 1 with a kernel of 3": timms(
            kernel_qkv=(5, 5)
        ),
        "`stages.1.blocks.0.attn.num_heads` of MultiScaleVit must be 2": timms(num_heads=(1, 1, 1, 1)),
    }
    for message, model in refused.items():
        with pytest.raises(ValueError, match="to be converted, got") as error:
            graticule.convert(model)
        assert message in str(error.value), str(error.value)


def test_rates_of_dropout_are_kept_and_unsupported_caits_are_refused():
    theirs = caits(drop_path_rate=0.1, proj_drop_rate=0.2, attn_drop_rate=0.3)
    ours = graticule.convert(theirs)
    assert [block.drop_path1.drop_prob for block in ours.blocks] == [0.1, 0.1]
    assert ours.blocks[1].attn.attn_drop == 0.3 and ours.blocks_token_only[0].attn.proj_drop.p == 0.2
    theirs.blocks[1].mlp.act = torch.nn.ReLU()
    with pytest.raises(ValueError, match=r"`blocks \(act\)` of Cait must be the same to be converted"):
        graticule.convert(theirs)
    theirs.blocks_token_only = None
    with pytest.raises(ValueError, match="`blocks_token_only` of Cait must have blocks to be converted"):
        graticule.convert(theirs)
