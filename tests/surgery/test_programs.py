"""Exported programs have the outputs of the model, at every size that they take."""

import math
from importlib import import_module

import onnxruntime
import pytest
import timm
import torch
import transformers
from torch.export import load

import graticule
from graticule import Grid
from graticule.encodings.global_filter import GlobalFilters
from graticule.surgery.export import FORMATS
from graticule.surgery.export import export as export_function
from graticule.surgery.export_program import Exportable, Program, Sizes, trace
from tiny import SIZE, build, draw, images, tiny

EVERY = ("batch", "sides")


@pytest.fixture(scope="module")
def lape():
    torch.manual_seed(0)
    return draw(tiny("learnable", "lape", depth=2)).eval()


def traced(model, *free, size=None):
    subject = Exportable.of(model).plain()
    sizes = Sizes.of(subject, size or subject.size, free)
    return trace(Program(subject.at(sizes)), sizes)


@torch.no_grad()
def assert_same(program, model, *shapes):
    run = program.module()
    for batch, height, width in shapes:
        x = torch.randn(batch, model.in_chans, height, width)
        torch.testing.assert_close(run(x)[0], model(x), rtol=1e-5, atol=1e-5)


# Sizes of a program


FREE_SIDES = [
    # a table and a norm over keys, resampled by different resamplers, and a rotation by ratios of sizes
    ("learnable(resampler='bicubic(antialias=False, offset=0.1)') + relative_bias(resampler='area') + "
    "rope(scaling='yarn')", "lape"),
    # tables that are resampled at every size, repeated, and mirrored
    pytest.param("windowed + mirrored_bias", "default", marks=pytest.mark.slow),
    # a formula, biases that are functions of queries, keys and weights, coordinates relative to the grid
    pytest.param("sinusoidal_2d + irpe(on='qkv') + shaw + rope(coordinates='max') + log_n", "default",
                 marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("encoding", "joining"), FREE_SIDES)
def test_a_program_with_free_sides_is_right_at_every_size(encoding, joining):
    model = draw(tiny(encoding, joining, depth=1)).eval()
    assert_same(traced(model, *EVERY), model, (1, 32, 32), (3, 16, 24), (2, 48, 16))


@pytest.mark.parametrize("encoding", [pytest.param("sgu", marks=pytest.mark.slow), "ggqpe"])
def test_weights_that_mix_tokens_are_made_for_every_size(encoding):
    model = draw(build("gMLP", encoding, num_blocks=1)).eval()
    assert_same(traced(model, "sides"), model, (1, 32, 32), (1, 48, 80))


class OfGrid(torch.nn.Module):
    """Wraps an encoding as a program of images of one pixel per patch."""

    def __init__(self, encoding):
        super().__init__()
        self.encoding = encoding

    def forward(self, image):
        return self.encoding(Grid(*image.shape))


@torch.no_grad()
def test_a_global_filter_is_made_for_every_size():
    model = OfGrid(GlobalFilters(Grid(4, 6), 2))
    sides = {side: torch.export.Dim(name, min=2, max=64) for side, name in enumerate(("height", "width"))}
    program = torch.export.export(model, (torch.zeros(3, 5),), dynamic_shapes=(sides,)).module()
    for size in ((2, 2), (2, 7), (4, 6)):
        torch.testing.assert_close(program(torch.zeros(size)), model(torch.zeros(size)), rtol=0, atol=1e-6)


def test_free_sides_are_multiples_of_whole_windows_in_every_stage_from_the_smallest_size_that_the_model_takes():
    for kernel, least in (("peg(kernel=7, padding='circular')", 3), ("peg", 2)):
        assert Sizes.of(Exportable.of(tiny(kernel, depth=2)), (32, 32), ["sides"]).least == least
    # windows of 4 patches of 8 pixels in the last stage; of 2 patches of 8 there; of 2 patches of 16 in some layers
    for family, step in (("Swin", 32), ("Twins-SVT", 16), ("SAM", 32)):
        sizes = Sizes.of(Exportable.of(build(family)), build(family).img_size, ["sides"])
        assert sizes.step == (step, step), family
        if family == "Swin":
            assert str(sizes).endswith("height 96 to 8192 in steps of 32, width 96 to 8192 in steps of 32")


# Contents of a program


def test_every_operator_of_a_folded_program_depends_on_the_images(lape):
    program = traced(lape, "batch")
    reached = {node for node in program.graph.nodes if node.name == "images"}
    for node in program.graph.nodes:
        if node.op == "call_function":
            assert reached & set(node.all_input_nodes), f"{node.name} is computed from constants"
            reached.add(node)
    norms = [node for node in program.graph.nodes if "layer_norm" in node.name]
    assert len(norms) == 2 * 2 + 1  # of the tokens alone
    assert not any("norms" in name or "pos_embed" in name for name in program.state_dict)


@pytest.mark.slow
def test_an_onnx_file_takes_images_of_any_size(tmp_path):
    """With windows, in one stage and one block, as tracing shifted windows takes about a minute."""
    sizes = {"window_size": 2, "depths": (1,), "num_heads": (1,), "img_size": 16}
    model = draw(build("Swin", "learnable + relative_bias", "lape", **sizes)).eval()
    exported = export_function(model, tmp_path / "model.onnx", dynamic=EVERY)
    assert len({comparison.size for comparison in exported.compared}) > 1
    assert [comparison.batch for comparison in exported.compared] == [1, 2, 3] and exported.error < 1e-5


VIDEO = {"img_size": (4, 16, 32), "patch_size": (2, 8, 8), "embed_dim": 24, "num_heads": 2, "in_chans": 1}


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["learnable", "rope"])
def test_a_video_is_exported_with_fixed_and_with_free_sides(encoding, suffix, tmp_path):
    model = draw(tiny(encoding, depth=1, **VIDEO)).eval()
    fixed = export_function(model, tmp_path / f"fixed.{suffix}")
    assert fixed.takes == "batch 1, depth 4, height 16, width 32" and fixed.error < 1e-5
    free = export_function(model, tmp_path / f"free.{suffix}", dynamic=EVERY)
    assert "depth 4 to" in free.takes and free.error < 1e-5
    assert [comparison.size for comparison in free.compared] == [(4, 16, 32), (4, 16, 24), (6, 16, 16)]


def test_shaw_is_exported_with_as_many_heads_as_rows_of_patches(tmp_path):
    """Otherwise an optimizer takes the heads for the rows."""
    model = draw(tiny("shaw", img_size=(16, 32), patch_size=8, embed_dim=24, num_heads=2, depth=1)).eval()
    assert export_function(model, tmp_path / "model.onnx").error < 1e-5


def test_maps_of_blocks_are_outputs_too(lape, tmp_path):
    export_function(lape, tmp_path / "model.pt2", features=[0])
    x = images(batch=1)
    with torch.no_grad():
        logits, features = load(tmp_path / "model.pt2").module()(x)
        expected = lape.forward_intermediates(x, [0], intermediates_only=True)[0]
    torch.testing.assert_close(features, expected)
    torch.testing.assert_close(logits, lape(x))


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_weights_in_8_bits_halve_the_file_at_least(suffix, tmp_path):
    model = draw(tiny("learnable", depth=1, embed_dim=192)).eval()
    small = export_function(model, tmp_path / f"small.{suffix}", int8=True)
    assert small.size < 2 * sum(value.numel() for value in model.state_dict().values())  # of 4 bytes each
    assert 0 < small.error < 0.1


def test_tables_of_a_program_with_free_sides_stay_exact_in_8_bits(tmp_path):
    model = draw(tiny("learnable + relative_bias", depth=1)).eval()
    assert 0 < export_function(model, tmp_path / "small.onnx", int8=True, dynamic=["sides"]).error < 0.1


@pytest.mark.parametrize("head", ["fcos", pytest.param("retinanet", marks=pytest.mark.slow)])
def test_a_detector_without_its_selection_is_one_program_for_any_size(head, tmp_path):
    sizes = {"img_size": 64, "embed_dim": 24, "num_heads": 3, "depth": 1, "neck": "simple_pyramid(channels=64)"}
    model = draw(graticule.create_detector("vit_tiny_patch16_224", num_classes=3, head=f"{head}(convs=1)", **sizes))
    exported = export_function(model.eval().predictions, tmp_path / "detector.onnx", dynamic=EVERY)
    assert len({comparison.size for comparison in exported.compared}) > 1 and exported.error < 1e-4
    session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == ["boxes", "scores"]


def test_a_model_is_unchanged(lape, tmp_path):
    before, x = {name: value.clone() for name, value in lape.state_dict().items()}, images()
    graticule.fold(lape)
    export_function(lape, tmp_path / "model.pt2", img_size=24)
    assert type(lape.position).__name__ == "FoldedPosition" and lape.img_size == (32, 32)
    graticule.unfold(lape)
    assert all(torch.equal(value, before[name]) for name, value in lape.state_dict().items())
    assert lape(x).shape == (2, 5)


# Refusals


def test_unsupported_models_are_refused_and_nothing_is_written(lape, tmp_path):
    spline, matrix = (tiny(encoding, depth=1) for encoding in ("relative_bias(resampler='geometric')", "liere"))
    cases = [
        (torch.nn.Linear(2, 2), "model.pt2", {}, "`model` must be a backbone of images, a model with one"),
        (lape, "model.bin", {}, "`format` must be given where `path` does not end in .onnx, .pt2"),
        (lape, "", {"format": "onnx"}, "`path` must be a file"),
        (lape, "model.pt2", {"format": "onx"}, "did you mean 'onnx'"),
        (lape, "model.pt2", {"dynamic": ["depth"]}, "`dynamic` must be one of batch, sides"),
        (lape, "model.pt2", {"img_size": 30}, "`img_size` must be a positive multiple of the patch size"),
        (lape, "model.pt2", {"features": [2]}, "`features` must be from 0 to 1, got 2"),
        (matrix, "model.onnx", {"dynamic": ["sides"]}, "`model` must be one whose operators ONNX has, got the error"),
        (spline, "model.pt2", {"dynamic": ["sides"]}, "`resampler` must not be 'geometric' in a program"),
    ]
    for model, file, options, message in cases:
        with pytest.raises(ValueError, match=message):
            export_function(model, tmp_path / file, **options)
    assert not list(tmp_path.iterdir())


def test_a_file_that_differs_is_not_written(lape, tmp_path, monkeypatch):
    monkeypatch.setattr(import_module("graticule.surgery.export"), "TOLERANCE", -1.0)
    with pytest.raises(ValueError, match=r"model.pt2 was not written: at 32 x 32 pixels .* differs from PyTorch by"):
        export_function(lape, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


# Models around a backbone, and attached positions


@pytest.mark.slow
def test_a_segmentation_model_is_one_program_for_images_of_any_size(tmp_path):
    torch.manual_seed(0)
    options = {**SIZE, "depth": 1, "encoding": "learnable", "joining": "lape"}
    del options["num_classes"]
    model = draw(graticule.create_segmenter("vit_tiny_patch16_224", 3, "segmenter_mask(depth=1)", **options)).eval()
    exported = export_function(model, tmp_path / "model.pt2", dynamic=EVERY)
    assert exported.error < 1e-5 and len(exported.compared) == 3
    x = images(24, 40, batch=3)
    with torch.no_grad():
        (logits,) = load(tmp_path / "model.pt2").module()(x)
        torch.testing.assert_close(logits, model(x), rtol=1e-4, atol=1e-4)


def test_a_detector_is_refused_and_its_backbone_with_its_pyramid_is_not(tmp_path):
    options = {**SIZE, "depth": 1}
    del options["num_classes"]
    model = graticule.create_detector("vit_tiny_patch16_224", 3, "fcos", "simple_pyramid(channels=32)", **options)
    with pytest.raises(
        ValueError, match=r"must not be a Fcos: the number of detections .*`model\.features` \(on the command line --m"
    ):
        export_function(model, tmp_path / "model.onnx")
    features = model.eval().features
    exported = export_function(features, tmp_path / "model.pt2")
    assert exported.error < 1e-5
    x = images(batch=1)
    with torch.no_grad():
        for actual, expected in zip(load(tmp_path / "model.pt2").module()(x), features(x).values(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    # the coarsest map has more than one cell, whose axis would be fixed
    assert Exportable.of(features).least == max(features.strides) // features.divisor + 1


def test_an_attached_position_is_exported_with_its_host(tmp_path):
    torch.manual_seed(0)
    host = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=5)
    model = draw(graticule.attach(host, "learnable", "lape_sharing")).eval()
    exported = export_function(model, tmp_path / "model.pt2", dynamic=["batch"])
    nodes = [node.name for node in load(exported.path).graph.nodes]
    assert exported.error < 1e-5 and sum("layer_norm" in name for name in nodes) == 2 + 1  # position is folded
    with pytest.raises(ValueError, match="`dynamic` must be left out or 'batch' with VisionTransformer, which takes"):
        export_function(model, tmp_path / "free.pt2", dynamic=EVERY)
    with pytest.raises(ValueError, match="`features` must be left out with VisionTransformer, which is not a backbone"):
        export_function(model, tmp_path / "features.pt2", features=[0])


def depth_model(kind, backbone, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 16}
    maps = {"out_features": [f"stage{stage}" for stage in (1, 2, 3, 4)], "reshape_hidden_states": False}
    config = getattr(transformers, f"{backbone}Config")(image_size=40, patch_size=8, **sizes, **maps)
    neck = {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "backbone_config": config, **options}
    model = getattr(transformers, f"{kind}ForDepthEstimation")(getattr(transformers, f"{kind}Config")(**neck))
    for name, value in model.named_parameters():
        if "position" in name:
            torch.nn.init.normal_(value)
    return model.eval()


DPT = {"patch_size": 8, "reassemble_hidden_size": 16}
ZOE = {"bottleneck_features": 8, "num_relative_features": 8, "bin_embedding_dim": 8}
DEPTH_MODELS = [
    ("DepthAnything", "Dinov2", {**DPT, "head_hidden_size": 8}, 8),
    ("DPT", "Dinov2", {**DPT, "is_hybrid": False}, 16),  # its neck interpolates maps of odd sides
    ("ZoeDepth", "Beit", {**ZOE, "patch_size": 8}, 16),
]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
@pytest.mark.parametrize(("kind", "backbone", "options", "step"), DEPTH_MODELS)
def test_a_depth_model_is_one_program_for_images_of_any_size(kind, backbone, options, step, suffix, tmp_path):
    model = depth_model(kind, backbone, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch_is_free = (kind, suffix) != ("ZoeDepth", "onnx")
    if not batch_is_free:  # it is split into a number of parts that depends on the batch
        with pytest.raises(ValueError, match=r"`model` must be one whose operators ONNX has, got the error: .*Split"):
            export_function(model, tmp_path / "model.onnx", dynamic=["batch"])
    exported = export_function(model, tmp_path / f"model.{suffix}", dynamic=EVERY if batch_is_free else ["sides"])
    assert exported.takes.endswith(f"in steps of {step}") and exported.error < 1e-4
    run = FORMATS[exported.format].open(exported.path)
    for batch, rows, columns in ((2, 9, 6), (5, 4, 4), (1, 3, 8)):  # none of them compared by `export`
        x = torch.randn(batch if batch_is_free else 1, 3, rows * step, columns * step)
        with torch.no_grad():
            expected = model(x).predicted_depth
        (depth,) = run(x)
        torch.testing.assert_close(depth, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    if suffix == "onnx":
        assert [output.name for output in onnxruntime.InferenceSession(str(exported.path)).get_outputs()] == [
            "predicted_depth"
        ]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "interpolate_pos_encoding" not in vars(model.backbone.embeddings if backbone == "Dinov2" else model)


def test_a_model_of_another_library_is_exported_for_a_size_or_refused(tmp_path):
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    sizes = {**small, "image_size": 16, "patch_size": 8}
    model = transformers.ViTModel(transformers.ViTConfig(**sizes)).eval()
    exported = export_function(model, tmp_path / "model.pt2", img_size=(24, 16), dynamic=["batch"])
    assert exported.takes == "batch of any size, height 24, width 16" and exported.error < 1e-5
    x = torch.randn(4, 3, 24, 16)
    with torch.no_grad():
        tokens, pooled = load(exported.path).module()(x)
        expected = model(x, interpolate_pos_encoding=True)
    torch.testing.assert_close(tokens, expected.last_hidden_state, rtol=0, atol=1e-5)
    torch.testing.assert_close(pooled, expected.pooler_output, rtol=0, atol=1e-5)
    features = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, features_only=True, out_indices=[0])
    assert export_function(features, tmp_path / "features.pt2").takes == "batch 1, height 32, width 32"
    text = transformers.BertModel(transformers.BertConfig(**small))
    both = transformers.CLIPModel(transformers.CLIPConfig(text_config=small, vision_config=sizes))
    fixed = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    for other, options, message in (
        (text, {}, "`model` must have an image size, .* got BertModel"),
        (both, {}, "`model` must run on images of its size, 16 x 16, alone to be exported, got CLIPModel, which"),
        (model, {"img_size": 20}, "`img_size` must be a positive multiple of the patch size"),
        (model, {"features": [0]}, "`features` must be left out with ViTModel"),
        (fixed, {"dynamic": EVERY}, "`dynamic` must be left out or 'batch' with this model, .*; graticule.convert"),
    ):
        with pytest.raises(ValueError, match=message):
            export_function(other, tmp_path / "other.pt2", **options)
    assert not (tmp_path / "other.pt2").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_table_with_registers_is_right_at_every_size_where_the_file_of_torch_is_wrong(tmp_path):
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 112, "patch_size": 8}
    stock = transformers.Dinov2WithRegistersModel(transformers.Dinov2WithRegistersConfig(**small)).eval()
    torch.nn.init.normal_(stock.embeddings.position_embeddings)
    converted = graticule.convert(stock)
    converted.reset_classifier(0, "")  # all tokens
    graticule.export(converted, tmp_path / "ours.onnx", dynamic=list(EVERY))
    sides = {2 + axis: torch.export.Dim(name, min=2, max=64) * 8 for axis, name in enumerate(("rows", "columns"))}

    class Tokens(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = stock

        def forward(self, x):
            return self.model(x).last_hidden_state

    example = torch.randn(1, 3, 64, 80)
    with torch.no_grad():
        free = {"dynamo": True, "dynamic_shapes": {"x": sides}, "verbose": False}
        torch.onnx.export(Tokens().eval(), (example,), tmp_path / "torch.onnx", **free)
    ours, other = (onnxruntime.InferenceSession(tmp_path / f"{name}.onnx") for name in ("ours", "torch"))

    def difference(session, height, width):
        x = torch.randn(1, 3, height, width)
        with torch.no_grad():
            expected = stock(x).last_hidden_state
        (tokens,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        return (torch.from_numpy(tokens) - expected).abs().max()

    for size in ((64, 80), (80, 64), (112, 112), (160, 96), (224, 168)):
        assert difference(ours, *size) < 1e-5, size
    assert difference(other, 64, 80) < 1e-4  # the size that was traced
    try:
        error = difference(other, 80, 64)
    except onnxruntime.capi.onnxruntime_pybind11_state.Fail:  # as at most other sizes
        error = math.inf
    assert error > 0.1
