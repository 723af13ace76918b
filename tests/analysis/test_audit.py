"""The audit: its numbers in constructed cases, the page, and the command on runs and on models by name."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import graticule
import tiny
from commands import refused, run_command
from graticule.analysis.audit import Turns, audit
from graticule.analysis.effect import neighbors_right
from graticule.analysis.position_maps import position_maps, rotary_similarity
from graticule.external.traced_model import view_of
from graticule.lab.data.folder_module import FolderModule
from graticule.lab.data.images import DatasetInfo
from graticule.lab.pages.audit import audit_page
from graticule.position.grid import Grid

pytestmark = pytest.mark.usefixtures("quick_figures")


def audited(model, images, size=(32, 32), **kwargs):
    return audit(model, {size: images}, timed=False, **kwargs)


def test_tokens_that_are_a_sinusoid_have_r2_of_one():
    model = tiny.tiny("sinusoidal_2d", depth=1).double()
    for parameter in (model.patch_embed.proj.weight, model.blocks[0].attn.proj.weight, model.blocks[0].mlp.fc2.weight):
        parameter.data.zero_()
    result = audited(model, tiny.images(batch=10, dtype=torch.float64))
    np.testing.assert_allclose(result.probes[0].mean, 1, atol=1e-6)
    assert (np.abs(result.probe_content.mean) < 1e-6).all()
    removed = next(effect for effect in result.effects if effect.name == "probe's directions removed")
    assert (removed.change > 0).all()


def test_effects_sizes_costs_and_accuracy_are_all_there():
    model = tiny.draw(tiny.tiny("learnable", "lape")).eval()
    images = tiny.images(batch=7)
    with torch.no_grad():
        labels = model(images).argmax(-1)
    labels[0] = (labels[0] + 1) % 5
    both = {(32, 32): images, (48, 40): tiny.images(48, 40, batch=7)}
    result = audit(model, both, labels=labels, batch_size=3)
    names = [effect.name for effect in result.effects]
    assert names == [
        *("position zeroed", "position shuffled", "position of 64 x 64"),
        *("probe's directions removed", "control's directions removed"),
    ]
    assert result.accuracy[0] == pytest.approx(100 * 6 / 7)
    assert all(effect.change.shape == effect.cosine.shape == (3, 7) for effect in result.effects)
    assert all((effect.change > 0).all() for effect in result.effects)
    assert list(result.sizes) == [(48, 40)] and result.sizes[48, 40].change.shape == (3, 7)
    assert result.parameters == tiny.count(model) and sum(result.position.values()) == tiny.count(model.position)
    assert [turns.batch for turns in result.times] == [1, 7]
    assert set(result.times[0].seconds) == {"computed", "folded", "without"}
    assert result.translation.images == 7 and not result.unavailable
    expected = np.stack([attention_map.distances().mean(0) for attention_map in view_of(model).attention(images)])
    np.testing.assert_allclose(result.attention.distance, expected, rtol=1e-5)
    np.testing.assert_allclose(result.attention.prefix, _prefix_shares(model, images), rtol=1e-4)


def test_a_model_without_a_classifier_is_scored_by_leave_one_out_neighbors():
    """Images of a class have one content, which position shuffled or zeroed does not hide."""
    gallery = torch.tensor([[1.0, 0], [1, 0.1], [-1, 0], [-1, 0.1]])
    labels = torch.tensor([0, 0, 1, 1])
    assert neighbors_right(gallery, gallery, labels).all() and not neighbors_right(gallery, -gallery, labels).any()
    model = tiny.draw(tiny.tiny("learnable", num_classes=0))
    contents = 3 * tiny.images(batch=2)
    classes = torch.arange(12) % 2
    result = audited(model, contents[classes] + tiny.images(batch=12), labels=classes)
    assert result.neighbors and result.accuracy[0] == 100
    zeroed = result.effects[0]
    assert zeroed.same is None and zeroed.right_before.all() and zeroed.accuracy[0] <= 0
    assert "leave-one-out neighbors" in audit_page(result, "a").html()
    assert f"accuracy {zeroed.accuracy[0]:+.1f}" in result.record()["summary"]["position zeroed"]


def _prefix_shares(model, images):
    weights = [attention_map.weights for attention_map in view_of(model).attention(images)]
    return np.stack([layer[:, :, 1:, 0].mean((0, 2)) for layer in weights])


def test_attention_that_is_uniform_has_the_largest_entropy_and_the_distance_of_all_pairs():
    model = tiny.tiny("none")
    for block in model.blocks:
        block.attn.qkv.weight.data.zero_()
        block.attn.qkv.bias.data.zero_()
    attention_map = view_of(model).attention(tiny.images())[0]
    np.testing.assert_allclose(attention_map.entropies(), np.log(17), rtol=1e-6)
    np.testing.assert_allclose(attention_map.distances(), attention_map.uniform_distance, rtol=1e-6)
    np.testing.assert_allclose(attention_map.prefix_shares(), 1 / 17, rtol=1e-6)
    assert attention_map.uniform_distance == pytest.approx(float(Grid(4, 4).distances().mean()), rel=1e-6)


def test_similarity_under_rotation_is_the_mean_cosine_of_the_angles():
    model = tiny.tiny("rope", embed_dim=24, num_heads=3)
    result = rotary_similarity(model, (24, 40))
    table = model.position(model.grid_at((24, 40)))[0].rotary.table[..., 1:, :].double()
    sines, cosines = table.chunk(2, -1)
    angle = torch.atan2(sines, cosines)
    expected = (angle[:, None] - angle[None]).cos().mean(-1)
    np.testing.assert_allclose(result.similarity, np.stack([expected.numpy()] * 3), atol=1e-6)
    assert result.sources == ("rotation",) * 3 and rotary_similarity(tiny.tiny("learnable")) is None


def test_maps_of_a_model_of_timm_are_those_of_ours_with_its_weights():
    kwargs = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3, "num_classes": 5}
    stock = tiny.draw(timm.create_model("vit_tiny_patch16_224", **kwargs))
    ours = graticule.create_model("vit_tiny_patch16_224", **kwargs)
    ours.load_state_dict(stock.state_dict())
    (a,), (b,) = position_maps(ours), position_maps(stock)
    np.testing.assert_allclose(a.correlations.similarity, b.correlations.similarity, atol=1e-12)
    np.testing.assert_allclose(a.correlations.initial, b.correlations.initial, atol=1e-12)
    swin = {"img_size": 32, "window_size": 4, "embed_dim": 12, "depths": (2, 1), "num_heads": (1, 2), "num_classes": 5}
    stock = tiny.draw(timm.create_model("swin_tiny_patch4_window7_224", **swin))
    first, second = position_maps(stock)
    assert first.biases.layers == ((0,), (1,)) and second.biases.layers == ((2,),)
    attention = stock.layers[0].blocks[1].attn
    np.testing.assert_allclose(first.biases.bias[1], attention._get_rel_pos_bias()[0].detach().numpy(), rtol=1e-6)
    with pytest.raises(ValueError, match="must have a table, a rotation or a bias of positions"):
        position_maps(timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 8, 8, 8), num_heads=(1,) * 4))


def check_page(text):
    """Check that a page is self-contained."""
    images = re.findall("<img[^>]*>", text)
    assert images and all(' src="data:image/png;base64,' in i and re.search(' alt="[^"]', i) for i in images)
    links = re.findall(r'<(?!img)\w[^>]*? (?:href|src|for|aria-labelledby)="([^"]*)"', text)
    assert all(link.startswith("#") and f'id="{link[1:]}"' in text for link in links)
    assert not re.search(r"<(script|link|iframe)\b|url\(", text)


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory):
    """A folder of ten classes with two images each."""
    folder = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for label in range(10):
        (folder / f"{label}").mkdir()
        for number in range(2):
            pixels = draw.integers(0, 255, (40, 36), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{label}" / f"{number}.png")
    return folder


NANO = ["vit_nano_patch4_28", "--weights", "random", "--encoding", "learnable", "--joining", "lape"]


def test_the_command_writes_a_page_and_numbers_for_a_model_by_name(capsys, image_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--images", image_folder, "--count", 6, "--sizes", 36]
    code, out, err = run_command(capsys, "audit", *NANO, *options)
    assert code == 0, err
    assert "linear probe of row and column (R²)" in out and "position zeroed" in out
    assert re.search(r"as much as \d+ forward passes of one image: about \d+(\.\d)? s", err)
    folder = Path("runs/vit_nano_patch4_28")
    assert f"wrote {folder / 'audit.html'} and {folder / 'audit.json'}" in out
    check_page((folder / "audit.html").read_text())
    result = json.loads((folder / "audit.json").read_text())
    assert result["images"] == 6 and result["accuracy"] is not None and result["sizes"]["(36, 36)"]["name"] == "36 x 36"
    assert "joining lape" in result["model"]


@pytest.mark.slow
def test_the_command_splits_a_size_into_causes_or_says_why_not(capsys, image_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "def swin():\n    import timm\n    return timm.create_model('swin_tiny_patch4_window7_224', **{})\n"
    settings = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 3)}
    Path("pyramid.py").write_text(code.replace("{}", repr(settings)))
    for model, size, line in (
        (NANO, 16, "at 16 x 16, tokens                   change "),
        (["pyramid.py:swin"], 64, "no causes at 64 x 64: its layers have several grids"),
    ):
        options = ["--images", image_folder, "--count", 6, "--sizes", size, "--causes", "--output", str(size)]
        code, out, err = run_command(capsys, "audit", *model, *options)
        assert code == 0 and line in out, err


def test_labels_are_those_of_the_folders_or_of_a_file(image_folder, tmp_path):
    info = DatasetInfo("images", (), 1, None, (0.5,), (0.5,))
    every = FolderModule(image_folder, info, (28, 28), num_classes=10)
    assert every.num_test == 20 and every.labels.tolist() == [label for label in range(10) for _ in range(2)]
    assert FolderModule(image_folder, info, (28, 28), num_classes=9).labels is None  # the folders are other classes
    assert FolderModule(image_folder / "3", info, (28, 28), num_classes=10).labels is None
    named = dataclasses.replace(info, class_names=tuple("9876543210"))
    assert FolderModule(image_folder, named, (28, 28), num_classes=10, count=5).labels.tolist() == [9, 7, 5, 3, 1]
    paths = [path.relative_to(image_folder).as_posix() for path in sorted(image_folder.rglob("*.png"))]
    (tmp_path / "labels.csv").write_text("path,label\n" + "".join(f"{path},{n % 7}\n" for n, path in enumerate(paths)))
    labeled = FolderModule(image_folder, info, (28, 28), num_classes=10, labels=tmp_path / "labels.csv")
    assert labeled.labels.tolist() == [n % 7 for n in range(20)]
    (tmp_path / "labels.csv").write_text(f"{paths[0]},0\n")
    with pytest.raises(ValueError, match="must have a line for each image, got none for 0/1"):
        FolderModule(image_folder, info, (28, 28), num_classes=10, labels=tmp_path / "labels.csv")


def test_unsupported_models_are_named(capsys, image_folder, tmp_path):
    (tmp_path / "few").mkdir()
    Image.new("L", (28, 28)).save(tmp_path / "few" / "a.png")
    (tmp_path / "labels.csv").write_text("a.png,10\n")
    (tmp_path / "w.pth").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "slow.py").write_text("def model():\n    raise ValueError('the model was built')\n")
    nano = ["vit_nano_patch4_28", "--weights", "random"]
    wrong = [
        (["vit_nano_patch4", "--images", image_folder], "there is no such model; did you mean 'vit_nano_patch4_28'"),
        (["timm:vit_tiny_patch16_22", "--images", image_folder], "did you mean 'vit_tiny_patch16_224'"),
        (["./runs/none", "--images", image_folder], "`run` must be the folder of a run"),
        ([tmp_path / "none.pth", "--images", image_folder], "none.pth', which does not exist"),
        ([tmp_path / "w.pth", "--images", image_folder], "whose model is known"),
        ([*nano, "--images", tmp_path / "none"], "`images` must be a folder"),
        ([f"{tmp_path}/slow.py:model", "--images", tmp_path / "empty"], "must have images in it, got none"),
        ([*nano, "--images", tmp_path / "few"], "`images` must be at least 5, got 1"),
        ([*nano, "--images", image_folder, "--count", 4], "`count` must be at least 5"),
        ([*nano, "--images", image_folder, "--sizes", 30], "the nearest sizes are 28 and 32"),
        ([*nano, "--images", image_folder, "--labels", tmp_path / "none.csv"], "none.csv"),
        ([*nano, "--images", tmp_path / "few", "--labels", tmp_path / "labels.csv"], "labels from 0 to 9"),
        (["timm:vit_tiny_patch16_224", "--images", image_folder, "--joining", "lape"], "`joining` must be left out"),
    ]
    for arguments, message in wrong:
        assert message in refused(capsys, "audit", *arguments, "--output", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_resized_model_has_the_parameters_that_it_was_opened_with(capsys, image_folder, tmp_path):
    small = tmp_path / "small model.py"
    kwargs = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3, "num_classes": 10}
    small.write_text(f"import timm\n\ndef model():\n    return timm.create_model('vit_tiny_patch16_224', **{kwargs})\n")
    arguments = [f"{small}:model", "--images", image_folder, "--count", 5, "--img-size", 48, "--sizes", 40]
    code, _, err = run_command(capsys, "audit", *arguments, "--output", tmp_path)
    assert code == 0, err
    result = json.loads((tmp_path / "audit.json").read_text())
    assert result["img_size"] == [48, 48] and result["grids"][0]["shape"] == [6, 6]
    assert result["parameters"] == tiny.count(timm.create_model("vit_tiny_patch16_224", **kwargs))
    assert result["position"] == {"absolute table": 17 * 24}
    assert result["probes"][0]["r2"] and not result["unavailable"]
    assert shlex.split(result["command"]) == ["graticule", "audit", *map(str, arguments), "--output", str(tmp_path)]


def test_shares_of_time_are_between_minus_one_and_one():
    turns = Turns(1, {"computed": np.array([1.0, 1.0, 2.0]), "without": np.array([0.5, 8.0, 8.0])})
    assert turns.share("computed", "without") == (-0.75, -0.8125, -0.125)


OWN = """
import graticule, torch
from torch import nn

class Unsized(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 4, 4)
        self.pos_embed = nn.Parameter(torch.randn(1, 49, 16))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, norm_first=True, batch_first=True) for _ in range(2)
        )

    def forward(self, x):
        x = self.patches(x).flatten(2).mT + self.pos_embed
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)

class Gray(Unsized):
    img_size = 28

def attached():
    model = Gray()
    parts = {"blocks": "layers.*", "norm": "norm1", "example": torch.rand(1, 1, 28, 28)}
    return graticule.attach(model, "learnable(std=1)", "lape", **parts) and model
"""


def test_a_module_of_a_file_needs_its_image_size_only(capsys, image_folder, tmp_path):
    source = tmp_path / "own.py"
    source.write_text(OWN)
    arguments = ["--images", image_folder, "--count", 5, "--output", tmp_path / "out"]
    err = refused(capsys, "audit", f"{source}:Unsized", *arguments, "--img-size", 28)
    assert "`model` must have an attribute img_size, (height, width) in pixels, got Unsized" in err
    code, _, err = run_command(capsys, "audit", f"{source}:Gray", *arguments)
    assert code == 0, err
    code, _, err = run_command(capsys, "audit", f"{source}:attached", *arguments)
    unavailable = json.loads((tmp_path / "out" / "audit.json").read_text())["unavailable"]
    assert code == 0 and "must have no attached position" in unavailable["position maps"], err
