"""The certificate of a change of size says what changes, what is kept, what it costs, and how to repeat it."""

import copy
import json

import pytest
import timm
import torch
import transformers
from torch import nn

import graticule
from graticule.analysis import certify_resize
from graticule.analysis.effect import resize_images
from graticule.lab.training.cost import count_multiply_adds
from tiny import SIZE, draw, tiny

OLD, NEW = (32, 32), (32, 56)


def dinov2():
    config = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
    return transformers.Dinov2Model(transformers.Dinov2Config(**config))


#: Model -> the tensors that a change of size changes, an entry of its configuration, and whether the outputs at the old
#: size are equal, are not (the table is resampled there and back), or are refused.
CASES = {
    "computed": (lambda: tiny("rope"), {"position.encoding.table"}, "pretrained_cfg.input_size", "equal"),
    "table": (lambda: tiny("learnable"), {"position.encodings.0.pos_embed"}, "pretrained_cfg.input_size", "apart"),
    "none": (lambda: tiny("none"), set(), "pretrained_cfg.input_size", "equal"),
    "timm": (lambda: timm.create_model("vit_tiny_patch16_224", **SIZE), {"pos_embed"}, None, "refused"),
    "transformers": (dinov2, {"embeddings.position_embeddings"}, "config.image_size", "apart"),
}


@pytest.mark.parametrize("case", [*list(CASES)[:4], pytest.param("transformers", marks=pytest.mark.slow)])
def test_it_says_what_changes_and_its_line_repeats_it(case):
    make, tensors, entry, outputs = CASES[case]
    torch.manual_seed(0)
    model = draw(make()).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    images = torch.randn(5, 3, *OLD)
    report = certify_resize(model, NEW)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    same = eval(report.line, {"graticule": graticule, "model": copy.deepcopy(model)})
    parameters = [dict([*one.named_parameters(), *one.named_buffers()]) for one in (model, same)]
    assert tensors == {name for name in report.changes if name in parameters[0]}
    for name in tensors:
        shapes = ["x".join(map(str, values[name].shape)) for values in parameters]
        assert report.changes[name] == tuple(shapes)
    assert entry is None or entry in report.changes
    small, large = images, resize_images(images, NEW)
    if outputs != "refused":
        with torch.no_grad():
            pairs = [getattr(y, "last_hidden_state", y) for y in (model(small), same(small))]
        assert torch.equal(*pairs) == (report.difference == 0) == (outputs == "equal")
    assert (report.difference is None) == (outputs == "refused") and outputs in str(report)
    assert report.cost["tokens"] == pytest.approx(29 / 17)
    counts = [count_multiply_adds(one, x[:1]) for one, x in ((model, small), (same, large))]
    assert report.cost["multiply-adds"] == pytest.approx(counts[1] / counts[0], rel=1e-3)
    assert len(str(report).splitlines()) <= 20 and json.loads(report.to_json())["line"] == report.line


@pytest.mark.slow
@pytest.mark.parametrize("windows", [1, 2])
def test_a_detector_with_windows_has_no_known_tokens(windows):
    sizes = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 3, "image_size": 64, "patch_size": 8}
    config = transformers.RfDetrDinov2Config(**sizes, num_windows=windows, out_features=["stage2", "stage4"])
    model = transformers.RfDetrDinov2Backbone(config).eval()
    report = certify_resize(model, (64, 96))
    assert "embeddings.position_embeddings" in report.changes and report.cost["multiply-adds"] > 1.4
    assert ("tokens" in report.cost) == (windows == 1)


def test_options_are_those_of_resize_and_are_repeated():
    assert certify_resize(tiny(), 48, patch_size=4).line == "graticule.resize(model, 48, patch_size=4)"
    with pytest.raises(ValueError, match="`img_size`"):
        certify_resize(tiny(), 33)
    with torch.device("meta"), pytest.raises(ValueError, match="must have values, got cls_token on the meta device"):
        certify_resize(tiny(), 48)


def test_volumes_and_weights_of_integers_are_taken():
    model = graticule.create_model("vit_nano_patch4_28", depth=2, img_size=(4, 8, 8), patch_size=(2, 4, 4)).eval()
    scale = nn.Parameter(torch.ones(1, dtype=torch.int8), requires_grad=False)
    model._parameters = {"scale": scale, **model._parameters}  # as of weights of 8 bits
    report = certify_resize(model, (4, 8, 12))
    assert report.cost["tokens"] == 13 / 9
    assert report.changes["position.encodings.0.pos_embed"] == ("1x9x64", "1x13x64")


@pytest.mark.slow
def test_a_model_of_images_and_texts_is_refused():
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3}
    vision, text = {**sizes, "image_size": 64, "patch_size": 16}, {**sizes, "bos_token_id": 1, "eos_token_id": 2}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config={**text, "vocab_size": 9}, vision_config=vision))
    with pytest.raises(ValueError, match=r"images of 64 x 64 alone, .* got CLIPModel, .* such as model.vision_model"):
        certify_resize(model, (64, 96))
    assert "config.image_size" in certify_resize(model.vision_model, (64, 96)).changes
