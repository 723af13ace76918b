"""Converted models, attached positions and dense models are published as names and options, and opened again."""

import json
import re
import shutil
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from safetensors.torch import load_file, save_file
from timm_models import build

import graticule
from graticule.backbones.base import Backbone
from graticule.hub.kinds import KINDS
from graticule.lab.training.opening import open_model
from tiny import SIZE, draw, images

GUIDE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
SMALL = {"img_size": 64, "num_classes": 5}
#: timm's name -> arguments of a small model.
CONVERTED = {
    "vit_small_patch16_dinov3": None,
    "vit_base_patch16_siglip_224": None,
    "deit_tiny_distilled_patch16_224": None,
    "beit_base_patch16_224": None,
    "swinv2_tiny_window8_256": {"window_size": 2, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)},
    "twins_pcpvt_small": {"embed_dims": (8, 16), "num_heads": (1, 2), "mlp_ratios": (2, 2), "depths": (1, 1)}
    | {"sr_ratios": (2, 1)},
}


def timms(name):
    torch.manual_seed(0)
    small = CONVERTED[name]
    return build(name) if small is None else draw(timm.create_model(name, **SMALL, **small)).eval()


@torch.no_grad()
def assert_same(model, other, x):
    torch.testing.assert_close(model(x), other(x), rtol=0, atol=0)


def assert_refused(folder, cases, tmp_path):
    """Assert that copies of a published folder with other entries in their config.json are refused."""
    for name, values, message in cases:
        shutil.copytree(folder, copy := tmp_path / f"with another {name}")
        config = json.loads((copy / "config.json").read_text())
        for key, value in values.items():
            config[key] = {**config[key], **value} if isinstance(value, dict) else value
        (copy / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=re.escape(message)):
            graticule.from_pretrained(copy)


# Converted models


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_model_is_published_and_opened(name, tmp_path):
    host = timms(name)
    ours = graticule.convert(host)
    ours.save_pretrained(tmp_path / "published")
    x = images(*ours.img_size)
    again = graticule.from_pretrained(tmp_path / "published")
    assert_same(again, ours, x)
    assert_same(timm.create_model(f"local-dir:{tmp_path / 'published'}", pretrained=True).eval(), ours, x)
    assert type(again) is type(ours) and again.pretrained_cfg["mean"] == host.pretrained_cfg["mean"]
    # also at another size: the resampler is kept
    assert_same(again, ours, images(*(2 * side for side in ours.img_size)))


def test_a_model_of_a_file_is_converted_unless_a_position_is_attached_to_it(tmp_path):
    file, tiny = tmp_path / "models.py", 'timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)'
    file.write_text(f"import graticule, timm\n\nown = {tiny}\nattached = graticule.attach({tiny}, remove=())\n")
    for name in ("own", "attached"):
        model = open_model(f"{file}:{name}", converted=True).model
        assert isinstance(model, Backbone) == (name == "own")


# Attached positions


@pytest.fixture(scope="module")
def attached():
    torch.manual_seed(0)
    host = timm.create_model("vit_tiny_patch16_224", img_size=(32, 48), depth=2, num_classes=5)
    return draw(graticule.attach(host, "learnable + peg(places=[0])", "lape")).eval()


HOST = "timm:vit_tiny_patch16_224(img_size=(32, 48), depth=2, num_classes=5)"


@pytest.fixture(scope="module")
def published(attached, tmp_path_factory):
    return graticule.save_pretrained(attached, tmp_path_factory.mktemp("attached") / "published", host=HOST)


def test_an_attached_position_is_published_and_opened_with_its_host(attached, published):
    again = graticule.from_pretrained(published)
    assert_same(again, attached, images(32, 48))
    assert [removed.name for removed in again.graticule.removed] == ["pos_embed"]
    assert again.pretrained_cfg["mean"] == attached.pretrained_cfg["mean"]
    assert type(graticule.detach(again)) is timm.models.VisionTransformer


RESIZED = "timm:vit_tiny_patch16_224(img_size=(32, 64), depth=1)"


def test_a_resized_model_with_an_attached_position_is_published_in_its_size(tmp_path):
    host = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    model = draw(graticule.attach(host, "learnable", "lape_sharing")).eval()
    graticule.resize(model, (32, 64))
    again = graticule.from_pretrained(graticule.save_pretrained(model, tmp_path / "resized", host=RESIZED))
    assert again.graticule.grid.shape == (2, 4)
    assert_same(again, model, images(32, 64))


def test_a_host_of_torchvision_is_built_by_its_name(tmp_path, monkeypatch):
    def vit_b_16(**options):
        small = {"patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 16}
        return torchvision.models.VisionTransformer(32, **small, **options)

    def get_model(name, weights, **options):
        assert name == "vit_b_16" and weights is None
        return vit_b_16(**options)

    monkeypatch.setattr("torchvision.models.get_model", get_model)
    monkeypatch.setattr("torchvision.models.vit_b_16", vit_b_16)
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```python publish\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)
    names = {"graticule": graticule}
    exec(compile(block, "deploy.md", "exec"), names)
    assert_same(graticule.from_pretrained("published/vit_b_16"), names["model"].eval(), images(32, 32))


def test_a_module_that_names_cannot_rebuild_is_refused_with_the_reason(attached, published, tmp_path):
    own = graticule.attach(
        torchvision.models.VisionTransformer(32, 8, 1, 2, 16, 16), blocks="encoder.layers.*", norm="ln_1"
    )
    quick = timm.create_model("vit_tiny_patch16_224", img_size=(32, 48), depth=2, num_classes=5, act_layer="relu")
    draw(graticule.attach(quick))
    cases = [
        (own, None, "A module of your own cannot be built again from a file"),
        (attached, None, "vit_tiny_patch16_224(img_size=(32, 48), num_classes=5)', with which it lacks blocks.10"),
        (quick, HOST, "which computes something else with the same weights"),
        (attached, "timm:vit_tiny_patch16_225", "did you mean 'vit_tiny_patch16_224'"),
        (attached, "timm:vit_tiny_patch16_224(detph=2)", "unexpected keyword argument 'detph'"),
        (attached, "timm:vit_tiny_patch16_224(checkpoint_path='x')", "must have options that name no files"),
        (attached, "os:system", "`host` must be one of timm, torchvision; got 'os'"),
        (graticule.create_model("vit_nano_patch4_28"), HOST, "`host` must be left out with a model of this library"),
        (torch.nn.Linear(2, 2), None, "`model` must be a backbone or a dense model of this library"),
    ]
    for model, host, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            graticule.save_pretrained(model, tmp_path / "new", host=host)
    assert not (tmp_path / "new").exists()


def test_a_hostile_config_of_an_attached_position_is_refused(published, tmp_path):
    cases = [
        ("library", {"graticule": {"model": "os:system"}}, "`host` must be one of timm, torchvision"),
        ("hub", {"graticule": {"model": "timm:hf-hub:me/model"}}, "`host` must be a name"),
        ("file", {"graticule": {"model": "timm:vit_tiny_patch16_224(checkpoint_path='x')"}}, "name no files"),
        ("weights", {"graticule": {"model": "torchvision:vit_b_16(weights='DEFAULT')"}}, "name no files"),
        ("size", {"graticule": {"model": HOST.replace("(32, 48)", "1048576")}}, "describes no model"),
        ("depth", {"graticule": {"model": "timm:vit_tiny_patch16_224(depth=100000)"}}, "`depth` must be at most 1,000"),
        ("depths", {"graticule": {"model": "timm:pit_ti_224(depths=[2, 9999])"}}, "`depths` must be at most 1,000"),
        ("blocks", {"attached": {"blocks": "nothing.*"}}, "`blocks` must match"),
        ("remove", {"attached": {"remove": ["weights.pth"]}}, "`remove` must be one of"),
        ("image", {"attached": {"image": [0, 48]}}, "is damaged"),
        ("encoding", {"graticule": {"encoding": "learnabel"}}, "did you mean 'learnable'"),
        ("preparation", {"pretrained_cfg": {"mean": "x"}}, "is damaged"),
    ]
    assert_refused(published, cases, tmp_path)


# Dense models


def dense(kind):
    torch.manual_seed(0)
    options = {**SIZE, "depth": 1, "img_size": (32, 64)}
    del options["num_classes"]
    if kind == "segmenter":
        arguments = {"decoder": "uperhead(channels=4)", "auxiliary": "fcn(channels=4)", "joining": "lape", **options}
        return draw(graticule.create_segmenter("vit_tiny_patch16_224", 3, **arguments)).eval()
    head = "fcos(score=0.0)" if kind == "detector" else kind
    neck = "simple_pyramid(channels=32)"
    return draw(graticule.create_detector("vit_tiny_patch16_224", 3, head, neck, encoding="rope", **options)).eval()


@pytest.mark.parametrize("kind", ["segmenter", "detector"])
def test_a_dense_model_is_published_and_opened(kind, tmp_path):
    model = dense(kind)
    again = graticule.from_pretrained(model.save_pretrained(tmp_path / "published"))
    assert type(again) is type(model) and set(KINDS) >= {kind}
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    if kind == "segmenter":
        assert_same(again, model, images(40, 70))
        assert torch.equal(again.all_logits(images(32, 32) * 0)[1], model.all_logits(images(32, 32) * 0)[1])
    else:
        x = torch.rand(3, 40, 70)
        (detections,), (expected,) = again([x]), model([x])
        assert all(torch.equal(value, detections[name]) for name, value in expected.items())
    card = (tmp_path / "published" / "README.md").read_text()
    assert "pipeline_tag: image-classification" not in card and "timm.create_model" not in card


def test_a_hostile_config_of_a_dense_model_is_refused(tmp_path):
    folder = dense("segmenter").save_pretrained(tmp_path / "published")
    backbone = json.loads((folder / "config.json").read_text())["backbone"]
    cases = [
        ("decoder", {"parts": {"decoder": "os.system"}}, "describes no model"),
        ("part", {"parts": {"path": "x"}}, "describes no model"),
        ("pretrained", {"parts": {"pretrained": "True"}}, "describes no model"),
        ("classes", {"num_classes": 0}, "is damaged"),
        ("many classes", {"num_classes": 1 << 40}, "is damaged"),
        ("class", {"backbone": {**backbone, "architecture": "vit_tiny_patch16_224"}}, "`architecture` must be one of"),
        ("file", {"backbone": {**backbone, "model_args": {"checkpoint_path": "x"}}}, "must not set `checkpoint_path`"),
    ]
    assert_refused(folder, cases, tmp_path)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.startswith("decoder"))
    save_file({**weights, name: torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors does not fit SegmentationModel"):
        graticule.from_pretrained(folder)
