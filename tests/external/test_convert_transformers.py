"""Models of transformers are converted to ours and back, with equal outputs at any size and equal bits."""

from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from timm_models import assert_same_bits, attribute, changed, within
from torch import nn
from transformers import AttentionInterface, ViTModel
from transformers.activations import ACT2FN
from transformers.models.vit import modeling_vit
from transformers_models import MODELS, SIZES, SMALL, WINDOWS, build, whole_float64

import graticule
from evidence.models_page import configured
from evidence.vector_rotations import in_float64
from graticule.external.convert.parts import CONVERSIONS
from graticule.external.convert.verify import outputs_of
from graticule.external.images import call, image_size
from in_turn import in_turn
from tiny import draw, holds

IDS = [f"{name}-{index}" for index, (name, *_) in enumerate(MODELS)]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def assert_equal(ours, original, *size, tolerance=1e-9):
    """Compare output and tokens for two images of (height, width)."""
    x = torch.randn(2, 3, *size)
    with torch.no_grad():
        expected, tokens = outputs_of(original, x)
        torch.testing.assert_close(ours(x), expected, rtol=tolerance, atol=tolerance)
        if tokens is not None:
            torch.testing.assert_close(ours.forward_features(x), tokens, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "config", "options"), MODELS, ids=IDS)
def test_a_converted_model_computes_the_same_at_any_size_and_goes_back_bit_by_bit(name, config, options):
    with whole_float64():
        original = draw(build(name, config, options))
        ours = graticule.convert(original)
        for size in SIZES.get(name, [(32, 32), (48, 32), (32, 64)]):
            assert_equal(ours, original, *size)
        assert_same_bits(graticule.to_transformers(ours), original)
        unused = [key for key, names in ours.converted_from.names.items() if not names]
        beside = ("mask_token", "predictor.", "merger")
        assert all(any(part in key for part in beside) or not original.get_parameter(key).numel() for key in unused)


def test_each_registered_class_is_tested():
    names = {kind for kind in CONVERSIONS if isinstance(kind, str)}
    assert names == {f"transformers.{name}" for name, *_ in MODELS}


def test_gradients_and_frozen_weights_are_those_of_transformers():
    with in_float64():
        original = draw(build("Dinov2WithRegistersModel", SMALL))
        original.embeddings.requires_grad_(False)
        ours = graticule.convert(original)
        x = torch.randn(2, 3, 32, 48)
        for output in (ours(x), outputs_of(original, x)[0]):
            output.square().sum().backward()
        parameters = dict(ours.named_parameters())
        frozen = {"cls_token", "reg_token", "patch_embed.proj.weight", "patch_embed.proj.bias"}
        assert {key for key, parameter in parameters.items() if not parameter.requires_grad} == {
            *frozen,
            "position.encodings.0.pos_embed",
        }
        there = dict(original.named_parameters())
        names = [key for key, split in ours.converted_from.names.items() if split == ("blocks.1.attn.qkv.weight",)]
        assert [key.split(".")[-2][0] for key in names] == ["q", "k", "v"]
        expected = torch.cat([there[key].grad for key in names])
        torch.testing.assert_close(parameters["blocks.1.attn.qkv.weight"].grad, expected, rtol=1e-10, atol=1e-10)
        back = dict(graticule.to_transformers(ours).named_parameters())
        assert all(back[key].requires_grad == parameter.requires_grad for key, parameter in original.named_parameters())


@pytest.mark.parametrize("name", ["Dinov2Model", "CLIPVisionModel", "DINOv3ViTModel", "ViTForImageClassification"])
def test_other_sizes_and_classes_go_back_with_the_configuration(name, tmp_path):
    ours = graticule.convert(build(name, SMALL))
    ours.set_input_size(48)
    if name.endswith("Classification"):
        ours.reset_classifier(3)
    back = graticule.to_transformers(ours)
    assert back.config.image_size == 48 and (back.config.num_labels == 3) == name.endswith("Classification")
    back.save_pretrained(tmp_path)
    opened = type(back).from_pretrained(tmp_path)
    assert_equal(ours, opened, 48, 48, tolerance=1e-5)


def test_labels_are_those_of_the_configuration():
    named = {"num_labels": 2, "id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}}
    ours = graticule.convert(build("ViTForImageClassification", {**SMALL, **named}))
    assert ours.pretrained_cfg["label_names"] == ["cat", "dog"] and ours.pretrained_cfg["input_size"] == (3, 32, 32)


@pytest.mark.parametrize("name", ["ViTForImageClassification", "Dinov2Model", "SwinModel"])
def test_an_opened_model_goes_back_with_a_model_of_the_same_configuration(name, tmp_path):
    config = WINDOWS if name == "SwinModel" else SMALL
    original = draw(build(name, config))
    opened = graticule.from_pretrained(graticule.convert(original).save_pretrained(tmp_path))
    with pytest.raises(ValueError, match="and opened, `like` gives the model of transformers"):
        graticule.to_transformers(opened)
    like = build(name, config)
    back, state = graticule.to_transformers(opened, like=like), {**original.state_dict()}
    if "embeddings.mask_token" in state:  # which has no counterpart
        state["embeddings.mask_token"] = like.state_dict()["embeddings.mask_token"]
    assert back.state_dict().keys() == state.keys() and holds(back, state)
    deeper = {**config, **({"depths": [1, 3]} if name == "SwinModel" else {"num_hidden_layers": 3})}
    with pytest.raises(ValueError, match=r"`like` must be built as .* another depth"):
        graticule.to_transformers(opened, like=build(name, deeper))
    with pytest.raises(ValueError, match=r"`like` must be a model of timm, got .* of transformers"):
        graticule.to_timm(opened, like=original)


def tie(model):
    model.layers[1].mlp.fc1.weight = model.layers[0].mlp.fc1.weight


class Activation(nn.GELU):
    pass


@contextmanager
def another_activation():
    kind = dict(ACT2FN.items())["gelu"]  # of which an item is an instance
    ACT2FN["gelu"] = Activation
    try:
        yield
    finally:
        ACT2FN["gelu"] = kind


class Longer(ViTModel):
    pass


def scale_frequencies(model):
    model.rope_embeddings.inv_freq.mul_(1.5)


def quantize(model):
    import torchao

    torchao.quantize_(model, torchao.quantization.Int8WeightOnlyConfig())


def of(name, **options):
    return partial(build, name, {**SMALL, **options})


VIT = partial(build, "ViTModel", SMALL)
#: Models that are refused, and part of the error.
REFUSED = [
    # changed models
    (changed(VIT, attribute("layers.0.forward", lambda x: x)), "but layers.0.forward is the function"),
    (changed(VIT, tie), "but layers.1.mlp.fc1.weight is the parameter layers.0.mlp.fc1.weight, not a p"),
    (changed(VIT, attribute("config.num_hidden_layers", 3)), "but layers is in the order 0, 1, not 0, 1, 2"),
    (changed(VIT, attribute("layers.0.mlp", nn.Identity())), "but layers.0.mlp is Identity, not ViTMLP"),
    (
        changed(VIT, lambda m: m.layers[0].mlp.fc1.register_parameter("bias", None)),
        "but layers.0.mlp.fc1.bias is None, not a tensor of shape",
    ),
    (changed(VIT, lambda m: m.layers[0].mlp.to("meta")), "weights in one dtype on one device, got ViTModel with"),
    (
        changed(partial(build, "DINOv3ViTModel", SMALL), scale_frequencies),
        "but rope_embeddings.inv_freq is a tensor of ot",
    ),
    (changed(VIT, quantize), "`model` must have weights in floating point, got a quantized one"),
    (changed(VIT, attribute("config.quantization_config", {"bits": 4})), "`config.quantization_config` of V"),
    (changed(VIT, attribute("config.return_dict", False)), "`config.return_dict` of ViTModel must be True"),
    (
        changed(partial(build, "BeitModel", SMALL), attribute("layers.1.drop_path.drop_prob", 0.5)),
        "but layers.1.drop_path.drop_prob is 0.5, not 0.1; convert",
    ),
    (changed(VIT, attribute("config.hidden_act", "relu")), "not ReLU, which follows from config.hidden_act = 'relu', "),
    (
        within(patch.dict(AttentionInterface._global_mapping, sdpa=tie), VIT),
        "but config._attn_implementation is 'sdpa', the function tie of test_convert_transformers, not its library's",
    ),
    (
        within(patch.object(modeling_vit, "eager_attention_forward", tie), VIT),
        "but transformers.models.vit.modeling_vit.eager_attention_forward is the function tie of test_c",
    ),
    (
        within(another_activation(), VIT),
        "but layers.0.mlp.activation_fn is Activation of test_convert_tr",
    ),
    (
        changed(VIT, attribute("__class__", Longer)),
        "must be a ViTModel itself, got Longer of test_convert_transformers",
    ),
    # configurations without a counterpart
    (of("ViTModel", hidden_act="mish"), "`config.hidden_act` of ViTModel must be one of gelu_pytorch_tanh, "),
    (of("ViTModel", hidden_dropout_prob=0.5), "`config.hidden_dropout_prob` of ViTModel must be 0 "),
    (of("ViTModel", pooler_act="relu"), "`config.pooler_act` of ViTModel must be 'tanh' "),
    (of("DINOv3ViTModel", key_bias=True, query_bias=False), "`key_bias` of DINOv3ViTModel must be as"),
    (of("DINOv3ViTModel", mlp_bias=False), "`config.mlp_bias` of DINOv3ViTModel must be True "),
    (of("Dinov2Model", drop_path_rate=0.1), "`drop_path` of Dinov2Model must grow linearly from 0 "),
    (partial(build, "SwinModel", {**WINDOWS, "hidden_act": "relu"}), "`config.hidden_act` of SwinModel must be 'gelu'"),
    (partial(build, "SegformerModel", {}), "and transformers' BeitForImageClassification, "),
]


@in_turn(("build_model", "message"), REFUSED)
def test_models_without_a_counterpart_are_refused_in_one_sentence(build_model, message):
    with pytest.raises(ValueError) as refusal:
        graticule.convert(build_model())
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


#: Models of videos, and names of the number of frames and of the size in their configurations.
VIDEOS = [
    ("VideoMAEModel", "num_frames", "image_size"),
    ("VivitModel", "num_frames", "image_size"),
    ("VJEPA2Model", "frames_per_clip", "crop_size"),
]


@pytest.mark.parametrize(("name", "frames", "side"), VIDEOS)
def test_a_model_of_videos_is_resized_in_place(name, frames, side, tmp_path):
    model = build(name, dict(next(config for other, config, _ in MODELS if other == name)))
    ours = graticule.convert(model)
    ours.set_input_size((8, 48, 48))
    assert graticule.resize(model, (8, 48, 48)) is model
    assert (getattr(model.config, frames), getattr(model.config, side)) == (8, 48)
    model.save_pretrained(tmp_path)
    video = torch.randn(1, 3, 8, 48, 48)
    with torch.no_grad():
        for other in (model, graticule.to_transformers(ours), type(model).from_pretrained(tmp_path)):
            torch.testing.assert_close(outputs_of(other, video)[1], ours.forward_features(video), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="as the model has volumes, got 48 x 48"):
        graticule.resize(model, (48, 48))
    assert graticule.convert(model).img_size == (8, 48, 48)
    if name == "VJEPA2Model":
        with pytest.raises(ValueError, match=r"`img_size` must be .* VJEPA2Model"):
            graticule.resize(model, (8, 48, 32))
        return
    ours.set_input_size((8, 48, 32))
    with torch.no_grad():
        wide = outputs_of(graticule.resize(model, (8, 48, 32)), video[..., :32])[1]
        torch.testing.assert_close(wide, ours.forward_features(video[..., :32]), rtol=0, atol=1e-5)


#: Models that do not convert, whose tables are square in the first row.
BY_TABLE = ["AltCLIPVisionModel", "DPTModel", "JanusVisionModel", "PixioModel", "SmolVLMVisionTransformer"]


@pytest.mark.parametrize("name", [*BY_TABLE, "Sapiens2Model", "HieraModel", "Sam2HieraDetModel"])
def test_a_model_that_does_not_convert_is_resized_by_the_table_that_it_computes(name, tmp_path):
    model = build(name, configured(name))
    present = image_size(model)
    size = (2 * present[0], 2 * present[1]) if name in BY_TABLE else (present[0], 2 * present[1])
    x = torch.randn(2, 3, *size)
    next(model.parameters()).requires_grad_(False)
    with torch.no_grad():
        before = call(model, x)[0]
        assert graticule.resize(model, size) is model
        torch.testing.assert_close(model(x)[0], before, rtol=0, atol=1e-5)  # without interpolation
        with pytest.warns(match="as a square") if name == "HieraModel" else nullcontext():
            model.save_pretrained(tmp_path)
        opened = graticule.resize(type(model).from_pretrained(tmp_path), size)
        torch.testing.assert_close(opened(x)[0], before, rtol=0, atol=1e-5)
    assert image_size(model) == size and not next(model.parameters()).requires_grad


def test_sizes_that_a_model_cannot_store_are_refused_and_leave_it():
    model = build("HieraModel", configured("HieraModel"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for sizes, message in (
        (
            {"img_size": 72},
            "`img_size` must be multiples of 32 for HieraModel, such as 64 x 64 or 96 x 96, got 72 x 72.",
        ),
        ({"img_size": 70}, "`img_size` must be a positive multiple of the patch size"),
        ({"img_size": (8, 64, 64)}, "`img_size` must be (height, width), got 8 x 64 x 64"),
    ):
        with pytest.raises(ValueError) as refusal:
            graticule.resize(model, **sizes)
        assert message in str(refusal.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.image_size == [64, 64]


@pytest.mark.parametrize("name", ["Dinov2Model", "CLIPVisionModel"])
def test_images_that_are_not_square_go_back_with_the_grid_of_the_table(name):
    ours = graticule.convert(build(name, SMALL))
    ours.set_input_size((32, 48))
    there = graticule.to_transformers(ours)
    for size in ((32, 48), (48, 64)):
        x = torch.randn(2, 3, *size)
        with torch.no_grad():
            torch.testing.assert_close(outputs_of(there, x)[0], ours(x), rtol=0, atol=1e-5)
    assert graticule.convert(there).img_size == (32, 48)
    with pytest.raises(
        ValueError,
        match="`model` must have images and patches that transformers' VJEPA2Model can be built for, got 4 x 3",
    ):
        videos = graticule.convert(build("VJEPA2Model", {**SMALL, "crop_size": 32, "frames_per_clip": 4}))
        videos.set_input_size((4, 32, 48))
        graticule.to_transformers(videos)


@torch.no_grad()
def test_a_swin_whose_last_stage_is_one_window_converts_before_and_after_its_first_pass():
    sizes = {"image_size": 32, "patch_size": 4, "window_size": 4}  # 8 x 8 patches, then 4 x 4
    model = build("SwinModel", {**sizes, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]})
    x = torch.randn(1, 3, 32, 32)
    before = graticule.convert(model)(x)
    model(x)  # sets shifts to 0
    torch.testing.assert_close(graticule.convert(model)(x), before, rtol=0, atol=0)


def outcomes_in_training(call):
    """Return the mean squares that a function returns in many calls, by all draws of stochastic depth."""
    with torch.no_grad():
        return {float(f"{call().double().square().mean().item():.6g}") for _ in range(250)}


@pytest.mark.parametrize("name", ["SwinModel", "Swinv2Model", "BeitModel", "Data2VecVisionModel"])
def test_stochastic_depth_drops_the_same_parts_as_in_training(name):
    """In transformers' Swin it drops the attention of a block alone; in all others the MLP, too."""
    options = {**({**WINDOWS, "depths": [1, 1]} if "Swin" in name else SMALL), "drop_path_rate": 0.5}
    with whole_float64():
        original = draw(build(name, options)).train()
        ours, x = graticule.convert(original), torch.randn(1, 3, *image_size(original))
        expected = outcomes_in_training(lambda: outputs_of(original, x)[0])
        assert len(expected) > 1 and outcomes_in_training(lambda: ours(x)) == expected
