"""Resizing of models of transformers in place: what it changes, what it leaves, and what is saved.

Reports of models that lost something: facebookresearch/dinov2#553, #245 (checkpointing, frozen parameters);
haotian-liu/LLaVA#1090, mlfoundations/open_clip#985, X-PLUG/mPLUG-DocOwl#86, huggingface/transformers#12167 (towers and
encoders with another size than their configuration); JIA-Lab-research/LISA#163 (tokens of an image in a text).
"""

import copy
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers_models import MODELS, SAM, SMALL, build

import graticule
from evidence.models_page import MERGED, STAGES, configured
from graticule.external.convert.sizes import encoders_of, sizes_of
from graticule.external.images import call
from graticule.external.resize import _callable_parts, _images
from graticule.external.tracer import nested_tensors
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
        return [x for part in parts for x in nested_tensors(call(part, _images(part, size)))]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    pairs = zip(a, b, strict=True)
    return bool(a) and all(torch.allclose(x, y, rtol=0, atol=1e-5, equal_nan=True) for x, y in pairs)


def check_in_place(model: Any, sizes: list[tuple[int, ...]], folder: Any, opens: bool = True, **options: Any) -> None:
    """Check that resizing changes what holds position, and nothing else; that the model opens again."""
    image = sizes_of(encoders_of([model.config])[0])[0]
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
        assert getattr(model.config, "image_seq_length", size[-2] * size[-1] // 64) == size[-2] * size[-1] // 64
        assert {sizes_of(config)[0][-2:] for config in encoders_of([model.config])} == {size[-2:]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of tables that are not square
            model.save_pretrained(folder)
        if size[-1] != size[-2] and not opens:
            with pytest.raises(TypeError, match="unsupported operand"):
                type(model).from_pretrained(folder)
            continue
        opened = graticule.resize(type(model).from_pretrained(folder, **options), size)
        assert same(outputs(opened, size), outputs(model, size))


#: Models whose heads take squares alone, and those whose classes are not built for others, which transformers refuses.
SQUARE, REFUSED = ("SAM", "MAE"), ("CLIP", "SigLIP", "AltCLIP", "LLaVA", "BLIP-2")


@pytest.mark.parametrize("name", ["CLIP", pytest.param("classifier", marks=pytest.mark.slow)])
def test_resizing_leaves_everything_that_holds_no_position(name, tmp_path):
    check_in_place(WHOLE[name](), [(64, 64)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_whole_models_are_resized_in_place(name, tmp_path):
    half = (32, 32) if name == "RF-DETR" else (16, 16)
    check_in_place(
        WHOLE[name](), [(64, 64), half, *([] if name in SQUARE else [(32, 64)])], tmp_path, name not in REFUSED
    )


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


#: A class, the names of its table and of the resampler of its authors; both sides of the new grid differ.
TABLES = [
    ("Dinov2Model", "embeddings.position_embeddings", {}),
    ("ViTModel", "embeddings.position_embeddings", {}),
    ("Dinov2WithRegistersModel", "embeddings.position_embeddings", {"antialias": True}),
    ("CLIPVisionModel", "embeddings.position_embedding.weight", {}),
    ("SiglipVisionModel", "embeddings.position_embedding.weight", {}),
    ("DPTModel", "embeddings.position_embeddings", {"mode": "bilinear"}),
]


@pytest.mark.parametrize(
    ("name", "table", "filter"), [TABLES[0], *(pytest.param(*row, marks=pytest.mark.slow) for row in TABLES[1:])]
)
def test_tables_are_resampled_as_their_class_does_also_where_it_reads_squares(name, table, filter):
    model = build(name, configured(name))
    rows = model.get_parameter(table).detach().view(-1, 32)
    patches = rows[-16:].view(1, 4, 4, 32).permute(0, 3, 1, 2)
    for height, width in ((2, 6), (6, 2), (3, 4), (8, 8)):  # the second has as many rows as the first
        graticule.resize(model, (8 * height, 8 * width))
        patches = torch.nn.functional.interpolate(patches, (height, width), **{"mode": "bicubic", **filter})
        expected = torch.cat([rows[:-16], patches.flatten(2)[0].mT])
        torch.testing.assert_close(model.get_parameter(table).view(-1, 32), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "Dinov2Model",
        *(pytest.param(f"{n}Model", marks=pytest.mark.slow) for n in ("CLIPVision", "SiglipVision", "Hiera")),
    ],
)
def test_a_table_that_is_not_square_is_interpolated_by_its_own_grid(name, tmp_path):
    """facebookresearch/dino#8, facebookresearch/dinov2#333, #506, huggingface/pytorch-image-models#2317."""
    model = build(name, configured(name))
    side = sizes_of(model.config)[0][0]
    wide, other = torch.randn(2, 3, side, 2 * side), torch.randn(1, 3, 2 * side, side)
    with torch.no_grad():
        before = call(model, wide)[0]
        graticule.resize(model, (side, 2 * side))
        torch.testing.assert_close(model(wide)[0], before, rtol=0, atol=1e-5)
        torch.testing.assert_close(model(wide, interpolate_pos_encoding=True)[0], before, rtol=0, atol=1e-5)
        with pytest.warns(UserWarning, match="has a grid that is not square, which transformers alone reads as a"):
            model.save_pretrained(tmp_path)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "is opened as|.*is opened as")
            opened = graticule.load(tmp_path)
        expected = model(other, interpolate_pos_encoding=True)[0]
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for like in copies:
            torch.testing.assert_close(like(other, interpolate_pos_encoding=True)[0], expected, rtol=0, atol=0)
            like.get_parameter(next(n for n, _ in like.named_parameters() if "position" in n)).zero_()
        torch.testing.assert_close(model(other, interpolate_pos_encoding=True)[0], expected, rtol=0, atol=0)
        assert all(like(other, interpolate_pos_encoding=True)[0].ne(expected).any() for like in copies)
        ours = opened.forward_features(other) if hasattr(opened, "forward_features") else call(opened, other)[0]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
        graticule.resize(model, side)
        model(wide, interpolate_pos_encoding=True)
        model.save_pretrained(tmp_path)  # without a warning
        assert type(model).from_pretrained(tmp_path).config.image_size in (side, [side, side])


def test_windows_of_rf_detr_are_rectangles_of_images_that_are_not_square():
    """roboflow/rf-detr#148, #275, #398, #682: windows of the wrong sides mix rows."""
    model = transformers.RfDetrDinov2Backbone(
        transformers.RfDetrDinov2Config(**{**RF_DETR, "out_features": ["stage2"]})
    )
    graticule.resize(model.eval(), (32, 64))
    for name, parameter in model.named_parameters():  # tokens depend on their patch alone
        if name.endswith(("attention.o_proj.weight", "attention.output.dense.weight")):
            parameter.data.zero_()
    x = torch.randn(1, 3, 32, 64)
    changed = x.clone()
    changed[..., 8:16, 40:48] += 1
    with torch.no_grad():
        difference = (model(changed).feature_maps[0] - model(x).feature_maps[0]).abs().sum(1)[0]
    assert difference.nonzero().tolist() == [[1, 5]]


@pytest.mark.parametrize(
    "size",
    [(32, 32), (64, 96), *(pytest.param(size, marks=pytest.mark.slow) for size in ((48, 48), (96, 96), (96, 64)))],
)
def test_sam_3_is_resized_with_global_attention(size, tmp_path):
    """facebookresearch/sam3#251, #361, Sompote/SAM3_LoRA#31: rotations of another size of images."""
    config = {**SMALL, "image_size": 64, "pretrain_image_size": 32, "window_size": 4, "global_attn_indexes": [1]}
    model = build("Sam3ViTModel", config)
    table = model.embeddings.position_embeddings
    graticule.resize(model, size)
    rows, columns = (side // 8 for side in size)
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    expected = torch.stack([x.flatten(), y.flatten()], -1) * (4 / rows)
    torch.testing.assert_close(model.layers[1].position_ids, expected, rtol=0, atol=1e-6)
    assert model.embeddings.position_embeddings is table  # it is tiled
    images = torch.randn(1, 3, *size)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model.save_pretrained(tmp_path)
        opened = graticule.load(tmp_path)
        torch.testing.assert_close(opened(images)[0], model(images)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["SamVisionModel", "Sam3ViTModel", "RfDetrDinov2Backbone"])
def test_a_model_is_saved_with_a_warning_while_its_grid_is_not_square(name, tmp_path):
    model = graticule.resize(build(name, configured(name)), (64, 128))
    with pytest.warns(UserWarning, match="has a grid that is not square"):
        model.save_pretrained(tmp_path)
    graticule.resize(model, 64).save_pretrained(tmp_path)  # without a warning


@pytest.mark.parametrize("name", ["Dinov2Model", "CLIPVisionModel"])
def test_images_that_are_no_multiple_of_the_patch_are_interpolated_as_before(name):
    model = build(name, configured(name))
    images = torch.randn(1, 3, 39, 77)
    graticule.resize(model, (32, 64))
    with torch.no_grad():
        expected = model(images[..., :32, :72], interpolate_pos_encoding=True)[0]
        torch.testing.assert_close(model(images, interpolate_pos_encoding=True)[0], expected, rtol=0, atol=1e-6)


def test_other_patches_and_channels_are_those_of_the_conversion():
    model = build("ViTModel", SMALL)
    ours = graticule.resize(graticule.convert(model), (32, 64), patch_size=16, channels=1)
    weight = model.layers[0].mlp.fc1.weight
    graticule.resize(model, (32, 64), patch_size=16, channels=1)
    x = torch.randn(2, 1, 32, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(x).pooler_output, ours(x), rtol=0, atol=1e-5)
    assert model.layers[0].mlp.fc1.weight is weight
    assert (model.config.patch_size, model.config.num_channels) == (16, 1)


def replaced(rows: int, name: str = "ViTModel") -> Any:
    """Return a model whose table was replaced by hand."""
    model = build(name, SMALL)
    model.embeddings.position_embeddings = nn.Parameter(torch.randn(1, rows, 32))
    return model


def changed(name: str, place: str, key: str, value: Any, **config: Any) -> Any:
    """Return a model in which somebody has changed an attribute of a part."""
    model = build(name, {**configured(name), **config})
    part = model.get_submodule(place)
    setattr(part, key, partial(getattr(type(part), key), part) if value is partial else value)
    return model


def reads_rows(place: str, hook: bool = False, name: str = "ViTModel", **config: Any) -> Any:
    """Return a model with a part whose outputs depend on the number of rows of a table of another part, or its own."""
    model = draw(build(name, {**SMALL, **config}))
    part, forward = model.get_submodule(place), model.get_submodule(place).forward

    def change(x: torch.Tensor) -> torch.Tensor:
        rows = max(len(y[0]) if y.ndim == 3 else len(y) for n, y in model.named_parameters() if "position" in n)
        return x + 0.1 * rows * torch.arange(x.shape[-1])

    if hook:
        part.register_forward_hook(lambda _, __, output: change(output))
    else:
        part.forward = lambda *args, **kwargs: change(forward(*args, **kwargs))
    return model


REFUSED_MODELS: list[tuple[Any, dict[str, Any], str]] = [
    (
        partial(changed, "SwinModel", "encoder.layers.0.blocks.1", "shift_size", 3),
        {"img_size": 64},
        "`model` must be as transformers builds SwinModel wherever this replaces something, but "
        "encoder.layers.0.blocks.1.shift_size is 3, not 2; undo this change first",
    ),
    (
        partial(changed, "CLIPVisionModel", "embeddings", "position_ids", torch.arange(17)[None].flip(1)),
        {"img_size": 64},
        "embeddings.position_ids is a tensor of other values, not what its class computes; undo this change first",
    ),
    (
        partial(changed, "Dinov2Model", "embeddings", "interpolate_pos_encoding", partial),
        {"img_size": (32, 64)},
        "`model` must have the methods of its classes for 32 x 64 pixels, which are not square, but "
        "embeddings.interpolate_pos_encoding is another",
    ),
    (
        partial(changed, "RfDetrDinov2Backbone", "embeddings", "window_partition", partial),
        {"img_size": (64, 128)},
        "window_partition is another; undo this change first",
    ),
    (
        partial(reads_rows, "layers.1"),
        {"img_size": 64},
        "table that it has resampled differ; a change of its class may",
    ),
    (partial(reads_rows, "layers.1.mlp", True), {"img_size": 64}, "cause: layers.1.mlp._forward_hooks is the function"),
    (
        partial(reads_rows, "layers.1.mlp", name="BeitModel", use_relative_position_bias=True),
        {"img_size": 64},
        "cause: layers.1.mlp.forward is the function",
    ),
    (partial(replaced, 37), {"img_size": 64}, "`embeddings.position_embeddings` must be (1, 17, 32), as in the conf"),
    (partial(replaced, 17 + 1), {"img_size": 64}, "got (1, 18, 32); a table of other images needs their size in the"),
    (partial(replaced, 16, "Dinov2Model"), {"img_size": (32, 64)}, "`embeddings.position_embeddings` must be (1, 17"),
    (partial(replaced, 65, "DeiTModel"), {"img_size": 32, "patch_size": 4}, "must be (1, 18, 32), as in the config"),
    (
        WHOLE["MAE"],
        {"img_size": (32, 64)},
        "`img_size` must be square for the constructor of ViTMAEForPreTraining, got 32 x 64.",
    ),
    (WHOLE["CLIP"], {"img_size": 60}, "`img_size` must be a positive multiple of the patch size, got height 60"),
    (WHOLE["CLIP"], {"img_size": 64, "resampler": "fourier"}, "fourier"),
    (WHOLE["CLIP"], {"resampler": "bilinear"}, "`resampler` must come with another `img_size` for CLIPModel, which"),
    (partial(build, "DINOv3ViTModel", SMALL), {"img_size": 64, "resampler": "area"}, "has no table"),
    (partial(build, "SegformerModel", {}), {"img_size": 64}, "one size in its configuration, got none in SegformerMo"),
    (
        partial(build, "Qwen3VLVisionModel", {**MERGED, "num_position_embeddings": 16}),
        {"img_size": (32, 64)},
        "`img_size` must be square for Qwen3VLVisionConfig, which counts patches, got 32 x 64; a model that resamples",
    ),
]


@pytest.mark.parametrize(("build_model", "sizes", "message"), REFUSED_MODELS)
def test_refused_sizes_leave_the_model_and_its_configuration(build_model, sizes, message):
    model = build_model()
    before = [(name, id(value), value.clone()) for name, value in model.named_parameters()]
    config = model.config.to_json_string()
    with pytest.raises(ValueError) as refusal:
        graticule.resize(model, **sizes)
    assert message in str(refusal.value)
    after = dict(model.named_parameters())
    assert all(id(after[name]) == key and torch.equal(after[name], value) for name, key, value in before)
    assert model.config.to_json_string() == config


@pytest.mark.parametrize("size", [(16, 16), (32, 32), (64, 64), (16, 48), (72, 128)])
def test_tables_of_sam_are_resampled_as_in_its_attention(size):
    """facebookresearch/segment-anything#338, #374, #419, hitachinsk/SAMed#28, Qsingle/LearnablePromptSAM#9."""
    model = build("SamVisionModel", {**SAM, "window_size": 2})
    attention = model.vision_encoder.layers[1].attn
    grid = (size[0] // 8, size[1] // 8)
    names = ("rel_pos_h", "rel_pos_w")
    expected = [attention.get_rel_pos(n, n, getattr(attention, name)) for n, name in zip(grid, names, strict=True)]
    local = model.vision_encoder.layers[0].attn.rel_pos_w
    graticule.resize(model, size)
    assert model.vision_encoder.layers[0].attn.rel_pos_w is local
    for n, name, table in zip(grid, names, expected, strict=True):
        assert getattr(attention, name).shape[0] == 2 * n - 1
        actual = attention.get_rel_pos(n, n, getattr(attention, name))
        torch.testing.assert_close(actual, table, rtol=0, atol=1e-6)
    with torch.no_grad():
        assert model(torch.randn(1, 3, *size)).last_hidden_state.shape[2:] == grid


def test_an_optimizer_trains_on_and_attributes_stay_in_types_and_preprocessing():
    model = build("Dinov2Model", SMALL).to(torch.bfloat16).train()
    model.pretrained_cfg = {"input_size": (3, 32, 32), "mean": (0.5,) * 3}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    graticule.resize(model, (32, 64))
    before = model.layernorm.weight.clone()
    model(torch.randn(2, 3, 32, 64, dtype=torch.bfloat16)).pooler_output.square().sum().backward()
    optimizer.step()
    assert (model.layernorm.weight != before).any()
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16} and model.training
    assert model.pretrained_cfg == {"input_size": (3, 32, 64), "mean": (0.5,) * 3}
