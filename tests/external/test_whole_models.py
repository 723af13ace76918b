"""Whole models at other sizes of images: every number that follows from the size, what is saved, and what is refused.

Reports of models that lost something: SY-Ch/Vireo#4, facebookresearch/sam2#138, #332, microsoft/unilm#1433, #1665,
#1668, haotian-liu/LLaVA#940, #1090, huggingface/pytorch-image-models#2242, qubvel/segmentation_models.pytorch#1004,
pytorch/vision#5025, roboflow/rf-detr#948, #1023.
"""

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import nn
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

import graticule
from tiny import draw

VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 8}
TEXT = {**VIT, "num_hidden_layers": 1, "num_key_value_heads": 2, "vocab_size": 99, "eos_token_id": 97}
TEXT |= {"bos_token_id": 1, "pad_token_id": 0}
MASKS = {"hidden_size": 32, "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "iou_head_hidden_dim": 32}
LAYERS = {"hidden_size": 32, "num_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def whole(name: str, **config: Any) -> Any:
    kind = getattr(transformers, name)
    return draw(kind(kind.config_class(**config))).eval()


def maps(size: Any, *steps: int) -> list[list[int]]:
    """Return the sizes of maps of features at some strides."""
    return [
        [side // step for side in (size, size)[:2]] if isinstance(size, int) else [s // step for s in size]
        for step in steps
    ]


def prompts(size: Any, patch: int) -> dict[str, Any]:
    return {"hidden_size": 32, "image_size": size, "patch_size": patch, "mask_input_channels": 4}


def sam(size: Any) -> Any:
    vision = {**VIT, "image_size": size, "output_channels": 32, "window_size": 2, "global_attn_indexes": [1]}
    vision |= {"num_pos_feats": 16, "mlp_dim": 32}
    return whole("SamModel", vision_config=vision, prompt_encoder_config=prompts(size, 8), mask_decoder_config=MASKS)


def sam_2(size: Any) -> Any:
    hiera = {
        **{"hidden_size": 16, "image_size": [size, size], "blocks_per_stage": [1, 1, 2, 1]},
        **{"embed_dim_per_stage": [16, 32, 64, 128], "num_attention_heads_per_stage": [1, 1, 2, 4]},
        **{"window_size_per_stage": [8, 4, 4, 4], "global_attention_blocks": [3]},
        "model_type": "sam2_hiera_det_model",
    }
    vision = {"backbone_config": hiera, "fpn_hidden_size": 32, "backbone_channel_list": [128, 64, 32, 16]}
    vision |= {"backbone_feature_sizes": maps(size, 4, 8, 16), "model_type": "sam2_vision_model"}
    return whole("Sam2Model", vision_config=vision, prompt_encoder_config=prompts(size, 16), mask_decoder_config=MASKS)


def sam_3_vision(size: Any) -> dict[str, Any]:
    vit = {**VIT, "image_size": size, "pretrain_image_size": 16, "window_size": 2, "global_attn_indexes": [1]}
    vision = {"backbone_config": {**vit, "model_type": "sam3_vit_model"}, "fpn_hidden_size": 32}
    return {**vision, "backbone_feature_sizes": maps(size, 2, 4, 8), "model_type": "sam3_vision_model"}


def sam_3(size: Any) -> Any:
    return whole(
        "Sam3Model",
        vision_config=sam_3_vision(size),
        text_config={**TEXT, "model_type": "clip_text_model", "projection_dim": 32, "max_position_embeddings": 8},
        **dict.fromkeys(("geometry_encoder_config", "detr_encoder_config"), LAYERS),
        detr_decoder_config={**LAYERS, "num_queries": 4},
        mask_decoder_config={"hidden_size": 32, "num_attention_heads": 2},
    )


def tracker(size: Any) -> Any:
    """Return SAM 3 with prompts of points."""
    return whole(
        "Sam3TrackerModel",
        vision_config=sam_3_vision(size),
        prompt_encoder_config=prompts(size, 8),
        mask_decoder_config=MASKS,
    )


def depth_anything(name: str, size: Any, patch: int) -> Any:
    backbone = {**VIT, "num_hidden_layers": 4, "image_size": size, "patch_size": patch, "out_indices": [1, 2, 3, 4]}
    backbone |= {"model_type": "dinov2", "reshape_hidden_states": False}
    neck = {"neck_hidden_sizes": [16] * 4, "fusion_hidden_size": 16, "head_hidden_size": 8}
    return whole(name, backbone_config=backbone, patch_size=patch, reassemble_hidden_size=32, **neck)


def of_language(name: str, size: Any, tower: str, text: str, count: int | None = None, **config: Any) -> Any:
    vision = {**VIT, "image_size": size, "model_type": tower, **config.pop("vision", {})}
    config |= {} if count is None else {"image_seq_length": count}
    token = "image_token_index" if name.startswith("Llava") else "image_token_id"
    language = {**TEXT, "model_type": text, "head_dim": 16}
    return whole(name, vision_config=vision, text_config=language, **{token: 98}, **config)


def llava(size: Any, count: int = 16, strategy: str = "default") -> Any:
    name, options = "LlavaForConditionalGeneration", {"vision_feature_select_strategy": strategy}
    return of_language(name, size, "clip_vision_model", "llama", count, **options)


def internvl(size: Any, count: int = 4) -> Any:
    vision = {"vision": {"image_size": [size, size], "patch_size": [8, 8]}}
    return of_language("InternVLForConditionalGeneration", size, "internvl_vision", "llama", count, **vision)


def got_ocr(size: Any, count: int = 1) -> Any:
    vision = {"output_channels": 16, "global_attn_indexes": [1], "window_size": 2, "mlp_dim": 64, "model_type": ""}
    return of_language("GotOcr2ForConditionalGeneration", size, "", "qwen2", count, vision=vision)


def paligemma(size: Any) -> Any:
    options = {"vision": {"vision_use_head": False}, "projection_dim": 32, "hidden_size": 32}
    return of_language("PaliGemmaForConditionalGeneration", size, "siglip_vision_model", "gemma", **options)


def dual(size: Any) -> Any:
    vit, bert = transformers.ViTConfig(**VIT, image_size=size), transformers.BertConfig(**TEXT)
    kind = transformers.VisionTextDualEncoderConfig
    return draw(
        transformers.VisionTextDualEncoderModel(kind.from_vision_text_configs(vit, bert, projection_dim=16))
    ).eval()


def trocr(size: Any) -> Any:
    text = {"vocab_size": 99, "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}
    return draw(
        transformers.VisionEncoderDecoderModel(
            encoder=transformers.ViTModel(transformers.ViTConfig(**VIT, image_size=size), add_pooling_layer=False),
            decoder=transformers.TrOCRForCausalLM(transformers.TrOCRConfig(**text, cross_attention_hidden_size=32)),
        )
    ).eval()


IMAGE, TOKENS, POINTS = "pixel_values", "input_ids", "input_points"


def inputs(size: tuple[int, int], **others: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return {IMAGE: torch.randn(1, 3, *size), **{name: torch.tensor(value) for name, value in others.items()}}


def text(count: int) -> dict[str, Any]:
    return {TOKENS: [[98] * count + [1, 97]]}


POINT = {POINTS: [[[[20.0, 30.0]]]]}


def same(model: Any, other: Any, values: dict[str, Any]) -> bool:
    """Return whether a model has the keys, the configuration and the outputs of another."""
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        a, b = model(**values), other(**values)
    pairs = [(a[name], b[name]) for name in a if isinstance(a[name], torch.Tensor)]
    return bool(pairs) and all(torch.allclose(x, y, rtol=0, atol=1e-5) for x, y in pairs)


#: A model of 32 or 128 pixels, the new size, a model that transformers builds for that, and inputs of both.
BUILT: list[tuple[Any, Any, dict[str, Any], Any]] = [
    (partial(sam, 32), 48, POINT, partial(sam, 48)),
    (partial(sam_2, 128), 192, POINT, partial(sam_2, 192)),
    (partial(sam_2, 128), 64, POINT, partial(sam_2, 64)),
    (partial(sam_3, 32), 64, {TOKENS: [[1, 2, 97]]}, partial(sam_3, 64)),
    (partial(tracker, 32), 64, POINT, partial(tracker, 64)),
    (partial(llava, 32), 64, text(64), partial(llava, 64, 64)),
    (partial(llava, 32, 17, "full"), 64, text(65), partial(llava, 64, 65, "full")),
    (partial(internvl, 32), 64, text(16), partial(internvl, 64, 16)),
    (partial(got_ocr, 32), 64, text(4), partial(got_ocr, 64, 4)),
    (partial(paligemma, 32), 64, text(64), partial(paligemma, 64)),
    (partial(dual, 32), 64, {TOKENS: [[1, 2]]}, partial(dual, 64)),
    (partial(trocr, 32), 64, {"decoder_input_ids": [[1, 2]]}, partial(trocr, 64)),
]


@pytest.mark.parametrize(("build", "size", "others", "build_other"), BUILT)
def test_a_whole_model_has_keys_numbers_and_outputs_of_one_that_is_built_for_the_size(build, size, others, build_other):
    model, other = build(), build_other()
    assert graticule.resize(model, size) is model
    assert {**model.config.to_dict(), "vision_config": None} == {**other.config.to_dict(), "vision_config": None}
    vision = [getattr(part.config, "vision_config", part.config) for part in (model, other)]
    assert vision[0].to_dict() == vision[1].to_dict()
    assert same(model, other, inputs((size, size), **others))


@pytest.mark.parametrize("name", ["DepthAnythingForDepthEstimation", "PromptDepthAnythingForDepthEstimation"])
def test_the_head_of_a_depth_model_has_the_patches_of_its_encoder(name):
    model, other = depth_anything(name, 70, 14), depth_anything(name, 80, 16)
    graticule.resize(model, 80, patch_size=16)
    assert model.config.patch_size == 16 and same(model, other, inputs((80, 80)))
    graticule.resize(model, (96, 128))
    with torch.no_grad():
        assert model(**inputs((96, 128))).predicted_depth.shape == (1, 96, 128)


@pytest.mark.parametrize("name", ["BeitModel", "Data2VecVisionModel"])
@pytest.mark.filterwarnings("ignore:.*has a grid that is not square")
def test_tables_that_transformers_reads_as_width_by_height_give_its_own_biases(name, tmp_path):
    model = whole(name, **VIT, image_size=32, use_relative_position_bias=True, use_mean_pooling=False)
    for size in ((32, 64), (64, 32), (16, 48)):
        images = torch.randn(1, 3, *size)
        with torch.no_grad():
            expected = model(images)[0]  # by the table of the last size, which it resamples itself
            torch.testing.assert_close(graticule.resize(model, size)(images)[0], expected, rtol=0, atol=1e-5)
        model.save_pretrained(tmp_path)
        actual = graticule.load(tmp_path)(images)  # converted: tokens, or the class token
        torch.testing.assert_close(actual, expected if actual.ndim == 3 else expected[:, 0], rtol=0, atol=1e-5)


def test_sam_3_takes_images_that_are_not_square():
    model = graticule.resize(sam_3(32), (32, 64))
    assert model.config.vision_config.backbone_feature_sizes == [[16, 32], [8, 16], [4, 8]]
    with torch.no_grad():
        assert model(**inputs((32, 64), input_ids=[[1, 2, 97]])).pred_masks.shape[-2:] == (16, 32)


#: A model and inputs at 32 x 64 pixels, which is saved and opened.
SAVED = [
    (partial(llava, 32), text(32)),
    (partial(dual, 32), {TOKENS: [[1, 2]]}),
    (partial(trocr, 32), {"decoder_input_ids": [[1, 2]]}),
    (partial(paligemma, 32), text(32)),
    (partial(sam_3, 32), {TOKENS: [[1, 2, 97]]}),
    (partial(depth_anything, "DepthAnythingForDepthEstimation", 32, 8), {}),
]


@pytest.mark.parametrize(("build", "others"), SAVED)
def test_the_way_back_that_the_warning_names_opens_a_model_that_is_not_square(build, others, tmp_path):
    model = build()
    for size in ((32, 32), (32, 64)):
        if size != (32, 32):
            graticule.resize(model, size)
        values = inputs(
            size,
            **{
                name: [[98] * 16 + [1, 97]] if size == (32, 32) and 98 in value[0] else value
                for name, value in others.items()
            },
        )
        with torch.no_grad():
            expected = model(**values)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model.save_pretrained(tmp_path)
        assert any("graticule.load(folder) reads it right" in str(w.message) for w in said) == (size != (32, 32))
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", ".*is opened as")
            opened = graticule.load(tmp_path)(**values)
        name = next(name for name in expected if isinstance(expected[name], torch.Tensor))
        torch.testing.assert_close(opened[name], expected[name], rtol=0, atol=1e-5)


VITS = {"img_size": 64, "embed_dim": 48, "num_heads": 3, "depth": 2}
SWINS = {"img_size": 64, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}
FEATURES = [
    ("vit_tiny_patch16_224", VITS, (96, 128)),
    ("beit_base_patch16_224", VITS, (96, 128)),
    ("swin_tiny_patch4_window7_224", {**SWINS, "img_size": 56}, (56, 112)),
    ("swinv2_tiny_window8_256", SWINS, (64, 128)),
    ("swinv2_cr_tiny_224", SWINS, (64, 128)),
    ("levit_128s", {"img_size": 64}, (128, 64)),
]


@pytest.mark.parametrize(("name", "options", "size"), FEATURES)
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # of timm
def test_models_that_return_features_are_resized_as_the_model_itself(name, options, size, within):
    model = draw(timm.create_model(name, features_only=True, out_indices=(0, 1), **options)).eval()
    other = timm.create_model(name, **options).eval()
    values = {key.removeprefix("model.").replace("s_", "s.", "_" in key): x for key, x in model.state_dict().items()}
    own = other.state_dict()
    names = {key.replace(".", "_"): key for key in own}
    other.load_state_dict({names[key.replace(".", "_")]: x for key, x in values.items()}, strict=False)
    parts = list(model.modules())
    graticule.resize(nn.Sequential(model) if within else model, size)
    graticule.resize(other, size)
    assert list(map(id, model.modules())) == list(map(id, parts))
    images = torch.randn(1, 3, *size)
    with torch.no_grad():
        expected = other.forward_intermediates(images, indices=[0, 1], intermediates_only=True)
        for a, b in zip(model(images), expected, strict=True):
            torch.testing.assert_close(a if a.shape == b.shape else a.permute(0, 3, 1, 2), b, rtol=0, atol=1e-5)


def test_vit_and_swin_of_torchvision_are_those_that_are_built_for_the_size():
    small = {"patch_size": 16, "num_layers": 2, "num_heads": 3, "hidden_dim": 48, "mlp_dim": 96, "num_classes": 5}
    model, other = draw(VisionTransformer(64, **small)).eval(), VisionTransformer(96, **small).eval()
    other.load_state_dict(interpolate_embeddings(96, 16, dict(model.state_dict())))
    weight, images = model.conv_proj.weight, torch.randn(1, 3, 96, 96)
    with torch.no_grad():
        assert graticule.resize(model, 96) is model and model.conv_proj.weight is weight
        torch.testing.assert_close(model(images), other(images), rtol=0, atol=1e-5)
        assert (model.image_size, model.seq_length) == (other.image_size, other.seq_length)
        swin = draw(SwinTransformer([4, 4], 24, [2, 2], [2, 4], [7, 7], num_classes=5)).eval()
        before = swin(images)
        torch.testing.assert_close(graticule.resize(swin, 96)(images), before, rtol=0, atol=0)


class Segmenter(nn.Module):
    """A model of one's own around some of transformers."""

    def __init__(self, *encoders: nn.Module) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [encoder(x)[0] for encoder in self.encoders]


class OwnDinov2(transformers.Dinov2Model):
    """A subclass of a user."""

    def forward(self, x: torch.Tensor) -> Any:
        return 2 * super().forward(x)[0]


class OwnViT(transformers.ViTModel):
    """A subclass whose constructor has another argument."""

    def __init__(self, config: Any, extra: int) -> None:
        super().__init__(config)
        self.extra = nn.Linear(2, extra)


def test_a_block_that_a_model_has_twice_is_resized_once():
    model = whole("BeitModel", **VIT, image_size=32, use_relative_position_bias=True)
    other = copy.deepcopy(model)
    model.layers[1] = model.layers[0]
    other.layers[1].load_state_dict(other.layers[0].state_dict())
    images = torch.randn(1, 3, 64, 32)
    with torch.no_grad():
        outputs = [graticule.resize(part, (64, 32))(images)[0] for part in (model, other)]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    assert model.layers[1] is model.layers[0]


def test_subclasses_of_transformers_models_are_resized_or_refused():
    config, images = transformers.Dinov2Config(**VIT, image_size=32), torch.randn(1, 3, 32, 64)
    model = draw(OwnDinov2(config)).eval()
    with torch.no_grad():
        before = model(images)
        torch.testing.assert_close(graticule.resize(model, (32, 64))(images), before)
    with pytest.raises(
        ValueError, match=r"`model` must be of a class that .* alone builds, got OwnViT, which raises Ty"
    ):
        graticule.resize(OwnViT(transformers.ViTConfig(**VIT, image_size=32), 3).eval(), (32, 64))


def test_models_of_transformers_in_a_module_are_resized():
    encoders = [whole(name, **VIT, image_size=32) for name in ("ViTModel", "Dinov2Model")]
    model, images = Segmenter(*encoders), torch.randn(1, 3, 32, 64)
    with torch.no_grad():
        expected = [
            encoder(images, **options)[0]
            for encoder, options in zip(encoders, ({"interpolate_pos_encoding": True}, {}), strict=True)
        ]
        assert graticule.resize(model, (32, 64)) is model
        for actual, before in zip(model(images), expected, strict=True):
            torch.testing.assert_close(actual, before, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="must have models of one library, got Segmenter with some of timm and of"):
        graticule.resize(Segmenter(encoders[0], timm.create_model("vit_tiny_patch16_224", img_size=32)), 64)
    assert encoders[0].config.image_size == [32, 64]


IDEFICS = {"text_config": {**TEXT, "model_type": "llama"}, "image_token_id": 98, "scale_factor": 2}


def rf_detr() -> Any:
    return whole("RfDetrDinov2Backbone", **VIT, image_size=32, num_windows=2, out_features=["stage1"])


def hidden_count() -> Any:
    """Return a model whose number of tokens no image has."""
    return llava(32, 7)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (rf_detr, {"img_size": 40}, "multiples of 16 for RfDetrDinov2Backbone, such as 32 x 32 or 48 x 48, got 40 x 40"),
    (rf_detr, {"img_size": (40, 80)}, "`img_size` must be multiples of 16 for RfDetrDinov2Backbone, such as 32 x 80"),
    (partial(sam, 32), {"img_size": (32, 64)}, "`img_size` must be square for SamModel, got 32 x 64."),
    (partial(sam_2, 128), {"img_size": (128, 64)}, "`img_size` must be square for the constructor of Sam2Model"),
    (partial(internvl, 32), {"img_size": (16, 64)}, "must be square for InternVLForConditionalGeneration, got 16 x 64"),
    (partial(internvl, 32), {"img_size": 40}, "multiples of 16 for InternVLForConditionalGeneration, such as 32 x 32"),
    (
        lambda: whole("Idefics3ForConditionalGeneration", vision_config={**VIT, "image_size": 32}, **IDEFICS),
        {"img_size": (32, 64)},
        "`img_size` must be square for Idefics3ForConditionalGeneration, got 32 x 64.",
    ),
    (
        lambda: whole("ViltModel", **VIT, image_size=32, vocab_size=99),
        {"img_size": (32, 64)},
        "`img_size` must be square for ViltModel, got 32 x 64.",
    ),
    (hidden_count, {"img_size": 64}, "`image_seq_length` of LlavaConfig must be 16, the number of tokens of an image"),
    (
        lambda: sam_2(128).vision_encoder,
        {"img_size": 8},
        "`img_size` must give maps of whole sizes, as `Sam2VisionConfig.backbone_feature_sizes` [8, 8] of 128 x 128",
    ),
    (
        lambda: timm.create_model("maxvit_tiny_tf_224", img_size=64, embed_dim=(64, 64), depths=(1, 1)),
        {"img_size": 100},
        "`img_size` must be multiples of 32 for MaxxVit, such as 96 x 96 or 128 x 128, got 100 x 100.",
    ),
    (
        lambda: timm.create_model(
            "maxvit_tiny_tf_224", img_size=64, embed_dim=(64, 64), depths=(1, 1), features_only=True, out_indices=(0, 1)
        ),
        {"img_size": 128},
        "`model` must be made by timm.create_model(name, features_only=True, feature_cls='getter') to be resized",
    ),
    (
        lambda: VisionTransformer(64, 16, 1, 3, 48, 96),
        {"img_size": (64, 96)},
        "`img_size` must be square for torchvision's VisionTransformer, got 64 x 96.",
    ),
]


@pytest.mark.parametrize(("build", "sizes", "message"), REFUSED)
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # of timm
def test_refusals_say_the_rule_and_not_the_error_of_pytorch(build, sizes, message):
    model = build()
    before = {name: (id(value), tuple(value.shape)) for name, value in model.named_parameters()}
    with pytest.raises(ValueError) as refusal:
        graticule.resize(model, **sizes)
    assert message in str(refusal.value) and "Error" not in str(refusal.value)
    assert before == {name: (id(value), tuple(value.shape)) for name, value in model.named_parameters()}
