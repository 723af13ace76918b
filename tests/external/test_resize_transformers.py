"""Resizing of models of transformers in place: what it changes, what it leaves, and what is saved."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers_models import MODELS, SAM, SMALL, build

import graticule
from evidence.models_page import STAGES
from graticule.external.convert.transformers import sizes_of
from graticule.external.images import call
from graticule.external.resize import _callable_parts, _encoders, _images, _tensors
from tiny import draw

TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 99}
TEXT |= {"eos_token_id": 98, "bos_token_id": 1, "pad_token_id": 0}
MAPS = {**SMALL, "num_hidden_layers": 4, "out_features": [f"stage{n}" for n in (1, 2, 3, 4)]}
NECK = {"neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8}
PROMPTS = {"hidden_size": 8, "image_size": 32, "patch_size": 8, "mask_input_channels": 4}
MASKS = {"hidden_size": 8, "mlp_dim": 16, "num_attention_heads": 1, "iou_head_hidden_dim": 8, "num_hidden_layers": 1}
RF_DETR = {**SMALL, "model_type": "rf_detr_dinov2", "image_size": 64, "num_windows": 2, "out_features": ["stage2"]}


def whole(name: str, **config: Any) -> Any:
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config)).eval()


#: Models that have an encoder of images within them.
WHOLE = {
    "CLIP": partial(whole, "CLIPModel", vision_config=SMALL, text_config=TEXT, projection_dim=16),
    "SigLIP": partial(whole, "SiglipModel", vision_config=SMALL, text_config=TEXT),
    "AltCLIP": partial(whole, "AltCLIPModel", vision_config=SMALL, text_config={**TEXT, "project_dim": 16}),
    "LLaVA": partial(
        whole,
        "LlavaForConditionalGeneration",
        vision_config={**SMALL, "model_type": "clip_vision_model"},
        text_config={**TEXT, "model_type": "llama", "num_key_value_heads": 2},
        image_seq_length=16,
    ),
    "BLIP-2": partial(
        whole,
        "Blip2Model",
        vision_config=SMALL,
        qformer_config={**SMALL, "encoder_hidden_size": 32},
        text_config={**TEXT, "model_type": "opt", "word_embed_proj_dim": 32, "ffn_dim": 48},
    ),
    "SAM": partial(
        whole,
        "SamModel",
        vision_config={**SAM, "window_size": 2, "num_pos_feats": 4},
        prompt_encoder_config=PROMPTS,
        mask_decoder_config=MASKS,
    ),
    "Depth Anything": partial(
        whole,
        "DepthAnythingForDepthEstimation",
        backbone_config={**MAPS, "model_type": "dinov2", "reshape_hidden_states": False},
        **{**NECK, "patch_size": 8, "reassemble_hidden_size": 32, "head_hidden_size": 8},
    ),
    "DPT": partial(
        whole,
        "DPTForDepthEstimation",
        backbone_config={**MAPS, "model_type": "dinov2", "reshape_hidden_states": False},
        **NECK,
    ),
    "RF-DETR": partial(
        whole,
        "RfDetrForObjectDetection",
        backbone_config=RF_DETR,
        **dict.fromkeys(("d_model", "decoder_ffn_dim", "encoder_ffn_dim"), 32),
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
        **dict.fromkeys(("decoder_attention_heads", "decoder_cross_attention_heads", "encoder_attention_heads"), 2),
        num_queries=5,
    ),
    "UperNet": partial(
        whole,
        "UperNetForSemanticSegmentation",
        backbone_config={**STAGES, "model_type": "swin", "out_features": ["stage1", "stage2"]},
        **{"hidden_size": 16, "use_auxiliary_head": False, "pool_scales": [1, 2]},
    ),
    "classifier": partial(whole, "Dinov2ForImageClassification", **SMALL, num_labels=5),
    "MAE": partial(
        whole,
        "ViTMAEForPreTraining",
        **SMALL,
        **{"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2},
    ),
    **{
        f"{name}Backbone": partial(whole, f"{name}Backbone", **MAPS)
        for name in ("Dinov2", "Dinov2WithRegisters", "DINOv3ViT", "Beit", "Pixio", "VitDet")
    },
    "SwinBackbone": partial(whole, "SwinBackbone", **STAGES, out_features=["stage2"]),
}


def outputs(model: Any, size: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the outputs of the encoders of a model for random images."""
    parts = _callable_parts(model, size)
    with torch.no_grad():
        return [x for part in parts for x in _tensors(call(part, _images(part, size)))]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    pairs = zip(a, b, strict=True)
    return bool(a) and all(torch.allclose(x, y, rtol=0, atol=1e-5, equal_nan=True) for x, y in pairs)


def check_in_place(model: Any, sizes: list[tuple[int, ...]], folder: Any, **options: Any) -> None:
    """Check that resizing changes what holds position, and nothing else; that the model opens again."""
    image = sizes_of(_encoders([model.config])[0])[0]
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 > 0)
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
    calls: list[nn.Module] = []
    model.register_forward_hook(lambda module, *_: calls.append(module))
    modules = dict(model.named_modules())
    hooks = {name: list(module._forward_hooks) for name, module in modules.items()}
    configs = {name: module.config for name, module in modules.items() if hasattr(module, "config")}
    flags_of = ("training", "gradient_checkpointing")
    modes = {name: [vars(module).get(flag) for flag in flags_of] for name, module in modules.items()}
    for size in [*((*image[:-2], *size) for size in sizes), image]:
        before = dict(model.named_parameters())
        flags = {name: value.requires_grad for name, value in before.items()}
        assert graticule.resize(model, size) is model
        after = dict(model.named_parameters())
        changed = {name for name in before if after[name] is not before[name]}
        assert before.keys() == after.keys()
        assert all(after[name].shape != before[name].shape or "position" in name for name in changed)
        assert flags == {name: value.requires_grad for name, value in after.items()}
        assert {name: id(part) for name, part in model.named_modules()} == {n: id(part) for n, part in modules.items()}
        assert hooks == {name: list(module._forward_hooks) for name, module in modules.items()}
        assert all(modules[name].config is config for name, config in configs.items())
        assert modes == {name: [vars(module).get(flag) for flag in flags_of] for name, module in modules.items()}
        assert {sizes_of(config)[0][-2:] for config in _encoders([model.config])} == {size[-2:]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of tables that are not square
            model.save_pretrained(folder)
        opened = graticule.resize(type(model).from_pretrained(folder, **options), size)
        assert same(outputs(opened, size), outputs(model, size))


#: Models whose heads or classes take squares alone.
SQUARE = ("CLIP", "SigLIP", "AltCLIP", "LLaVA", "BLIP-2", "SAM", "MAE")


@pytest.mark.parametrize("name", ["CLIP", "classifier", "BeitBackbone"])
def test_resizing_leaves_everything_that_holds_no_position(name, tmp_path):
    check_in_place(WHOLE[name](), [(64, 64)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_whole_models_are_resized_in_place(name, tmp_path):
    half = (32, 32) if name == "RF-DETR" else (16, 16)
    check_in_place(WHOLE[name](), [(64, 64), half, *([] if name in SQUARE else [(32, 64)])], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config", "options"), [row for row in MODELS if not row[0].startswith("Qwen2")])
def test_encoders_are_resized_in_place(name, config, options, tmp_path):
    check_in_place(build(name, dict(config), options), [(64, 64), (16, 16)], tmp_path, **options)


def test_tables_of_absolute_offsets_are_resized_after_a_pass_that_keeps_their_biases():
    """facebookresearch/LeViT#25: 448 pixels instead of 224; its classes keep the biases of an evaluation."""
    ones = [1, 1, 1]
    config = {"hidden_sizes": [32, 48, 64], "key_dim": [8, 8, 8], "num_attention_heads": ones, "depths": ones}
    model = draw(whole("LevitModel", image_size=64, **config))
    before = model.encoder.stages[0].layers[0].module.attention_biases.detach().view(1, 1, 4, 4)
    call(model, _images(model, (64, 64)))
    assert graticule.resize(model, 128) is model and model.config.image_size == 128
    table = model.encoder.stages[0].layers[0].module.attention_biases
    expected = nn.functional.interpolate(before, (8, 8), mode="bicubic", antialias=True)
    torch.testing.assert_close(table.view(1, 1, 8, 8), expected, rtol=0, atol=1e-5)
    other = whole("LevitModel", image_size=128, **config)
    other.load_state_dict(model.state_dict())
    assert same(outputs(model, (128, 128)), outputs(other, (128, 128)))
