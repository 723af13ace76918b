"""Models in folders and on the hub: written models can be opened, and no code in a file is executed."""

import copy
import json
import pickle
import shutil
import socket
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import nn

import graticule
from graticule.backbones.swin import SwinTransformer
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.hub.files import Card
from in_turn import in_turn
from tiny import SMALL, assert_same, draw, images, tiny


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    encoding = "learnable(std=0.5, resampler='bilinear') + relative_bias(layers=[0, 2])"
    return draw(tiny(encoding, "lape(layers=2)", img_size=(24, 40), global_pool="avg", class_token=False)).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return model.save_pretrained(tmp_path_factory.mktemp("published") / "tiny", preprocessing={"mean": [0.1, 0.2, 0.3]})


@pytest.fixture
def changed(folder, tmp_path):
    """Return a copy of the folder, and a function that changes its config.json."""
    copied = shutil.copytree(folder, tmp_path / "copy")

    def change(**values):
        config = json.loads((folder / "config.json").read_text())
        for key, value in values.items():
            config[key] = {**config[key], **value} if isinstance(value, dict) else value
        (copied / "config.json").write_text(json.dumps(config))
        return copied

    return change


@in_turn(
    ("preprocessing", "message"),
    [
        ({"mean": "x"}, "`preprocessing`: `mean` must be a valid list"),
        ({"mean": [0.5]}, "`preprocessing` must have 3 values of `mean`"),
        ({"std": [0.2, 0.2, float("nan")]}, r"`std\[2\]` must be"),
        ({"std": [0.2, 0.2, 0.0]}, r"`std\[2\]` must be greater than 0"),
        ({"crop_pct": 7.0}, "`crop_pct` must be at most 2"),
        ({"crop_pct": 0.001}, "`crop_pct` must be at least 0.1"),
        ({"crop_mode": "middle"}, "`crop_mode` must be 'center'"),
        ({"label_names": ["a"]}, "values of `label_names`, as the model, got 1"),
    ],
)
def test_preprocessing_that_does_not_fit_is_refused_in_writing_and_reading(
    model, changed, tmp_path, preprocessing, message
):
    with pytest.raises(ValueError, match=message):
        model.save_pretrained(tmp_path / "new", preprocessing=preprocessing)
    assert not (tmp_path / "new").exists()
    if preprocessing != {"mean": [0.5]}:  # one mean is for every channel, when a file is read
        with pytest.raises(ValueError, match=r"config\.json is damaged"):
            graticule.from_pretrained(changed(pretrained_cfg=preprocessing))


@torch.no_grad()
def assert_same_outputs(model, other, *size):
    x = images(*(size or (24, 40)))
    assert_same(other.eval()(x), model.eval()(x), atol=0)


# Round trips


def test_a_saved_model_round_trips_with_its_position_and_its_sizes(model, folder):
    again = graticule.from_pretrained(folder)
    assert_same_outputs(again, model)
    assert not again.training and again.img_size == (24, 40) and again.num_classes == 5
    assert type(VisionTransformer.from_pretrained(folder)) is VisionTransformer
    config = json.loads((folder / "config.json").read_text())
    assert config["graticule"]["encoding"] == "learnable(std=0.5, resampler='bilinear') + relative_bias(layers=(0, 2))"
    assert config["graticule"]["joining"] == "lape(layers=2)"
    assert config["graticule"]["resamplers"] == ["bicubic", "bilinear"]
    assert config["pretrained_cfg"]["mean"] == [0.1, 0.2, 0.3] and config["pretrained_cfg"]["input_size"] == [3, 24, 40]


def test_timm_opens_the_folder(model, folder):
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert_same_outputs(again, model)
    assert timm.data.resolve_model_data_config(again)["mean"] == [0.1, 0.2, 0.3]
    other = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=7)
    assert other.head.weight.shape[0] == 7
    torch.testing.assert_close(other.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)


def test_changes_after_building_are_saved(tmp_path):
    model = tiny("learnable", depth=1)
    model.set_input_size((16, 48))
    model.reset_classifier(3)
    graticule.fold(graticule.surgery.change_position(model, "rope(base=10)"))
    again = graticule.from_pretrained(model.save_pretrained(tmp_path / "changed"))
    with torch.no_grad():
        torch.testing.assert_close(again(x := images(16, 48)), model.eval()(x))
    assert again.created["arguments"]["encoding"] == "rope(base=10.0)"


def test_models_with_stages_and_windows_round_trip(tmp_path):
    name, sizes = SMALL["Swin"]
    model = graticule.create_model(name, **sizes, num_classes=2).eval()
    model.set_input_size((32, 64), window_size=2)
    again = SwinTransformer.from_pretrained(model.save_pretrained(tmp_path / "swin"))
    assert_same_outputs(again, model, 32, 64)
    assert again.windows == model.windows


def test_the_card_has_the_measurements_and_names_are_escaped(model, tmp_path):
    card = Card("digits", [("top-1 (%)", "97.5"), ("a|b", "<script>")], "Measured here.", [("sheet.png", "A sheet")])
    text = (model.save_pretrained(tmp_path / "named", card=card) / "README.md").read_text()
    assert "# named" in text and "| top-1 (%) | 97.5 |" in text and "![A sheet](sheet.png)" in text
    assert "<script>" not in text and "| a/b |" in text
    assert f"| parameters | {sum(p.numel() for p in model.parameters()):,} |" in text
    assert text.startswith("---\nlibrary_name: graticule\n")


# On the hub


class Hub:
    """Replaces the used functions of huggingface_hub, with folders as repositories."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def download(self, repo_id, name, *, library_name, revision, token, cache_dir, local_files_only):
        path = self.root / repo_id / name
        if not path.is_file():
            raise EntryNotFoundError(f"no {name}")
        return str(path)

    def api(self, token, library_name):
        return self

    def create_repo(self, repo_id, private, exist_ok):
        assert exist_ok
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload_folder(self, repo_id, folder_path, revision, commit_message):
        shutil.copytree(folder_path, self.root / repo_id)
        return f"https://huggingface.co/{repo_id}/commit/1"


def test_a_pushed_model_is_opened_by_its_name(model, tmp_path, monkeypatch):
    hub = Hub(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi", hub.api)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub.download)
    monkeypatch.setattr("graticule.hub.files.can_connect", lambda address: True)
    assert model.push_to_hub("me/tiny", private=True).endswith("me/tiny/commit/1")
    assert "# tiny" in (tmp_path / "me" / "tiny" / "README.md").read_text()
    assert_same_outputs(graticule.from_pretrained("me/tiny"), model)
    with pytest.raises(FileNotFoundError, match=r"me/other on the hub has no config\.json"):
        graticule.from_pretrained("me/other")
    with pytest.raises(ValueError, match=r"`repo_id` must be OWNER/NAME, got 'a/\.\.'"):
        model.push_to_hub("a/..")


def test_a_hub_that_cannot_be_reached_is_not_waited_for(tmp_path, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # it does not listen
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with pytest.raises(FileNotFoundError, match=r"me/tiny is not a folder, .*does not answer within 3 s"):
            graticule.from_pretrained("me/tiny", cache_dir=tmp_path)
        with pytest.raises(ConnectionError, match="the file is not in the cache"):
            graticule.create_model("deit_tiny_patch16_224", pretrained=True, depth=1, cache_dir=tmp_path)
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


# Refusals


BUILT = "describes no model that can be built"
#: Entries of config.json, and part of the error.
INVALID = [
    ({"architecture": "vit_tiny_patch16_224"}, "`architecture` must be "),
    ({"model_args": {"encoding": "learnabel"}}, "did you mean 'learnable'"),
    ({"model_args": {"encoding": "learnable(std=__import__('os'))"}}, BUILT),
    ({"model_args": {"encoding": "learnable"}}, "must name one encoding, got 'learnable' in"),
    ({"graticule": {"joining": "shared"}}, "must name one joining, got "),
    ({"model_args": {"checkpoint_path": "../../x.pth"}}, "`model_args` must not set `checkpoint_path`"),
    ({"model_args": {"norm_layer": "os.system"}}, "os.system is not a name"),
    ({"model_args": {"embed_layer": "os.system"}}, "`model_args` must not set `embed_layer`"),
    ({"graticule": {"kind": "pickle"}}, "`kind` must be one of"),
    ({"model_args": {"depth": {"a": 1}}}, "`model_args` must hold plain values, got depth"),
    ({"num_classes": 9}, "must have one `num_classes`, got 5 of the model and 9"),
    ({"global_pool": "max"}, "must have one `global_pool`, got 'avg' of the model and 'max'"),
    ({"model_args": {"num_classes": 9}, "num_classes": 9}, "config.json says num_classes=9 and global_pool='avg'"),
    ({"model_args": {"num_classes": 9}}, "got 9 of the model and 5"),
    ({"model_args": {"detph": 3}}, "did you mean `depth`"),
    ({"model_args": {"depth": "3"}}, BUILT),
    ({"model_args": {"embed_dim": 1 << 24, "depth": 1000}}, BUILT),
    ({"model_args": {"num_classes": 2**24}}, "must fit its weights, of 16,777,216 values at most, got"),
    (
        {"model_args": {"encoding": "learnable + sandwich(channels=1000000000)"}},
        "of encoding sandwich must be at most",
    ),
    ({"model_args": {"patch_size": [4, 10**400]}}, "`patch_size` must be at most 65,536, got 10000"),
    ({"graticule": 1}, "is damaged: `graticule` must be a valid dictionary"),
    ({"graticule": {"plugins": {"mine.py": "0" * 64}}}, "pass plugin='mine.py', or --plugin mine.py"),
]


@in_turn(("values", "message"), INVALID)
def test_invalid_entries_of_a_config_are_refused(changed, values, message):
    with pytest.raises(ValueError) as refusal:
        graticule.from_pretrained(changed(**values))
    assert message in str(refusal.value)


class Hostile:
    def __reduce__(self):
        return Path("executed").touch, ()


def test_a_pickle_is_not_read(changed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = changed()
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile()))
    graticule.from_pretrained(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"no model.safetensors; pytorch_model.bin, which can hold code, is not"
    ):
        graticule.from_pretrained(copy)
    (copy / "model.safetensors").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(ValueError, match=r"model\.safetensors is not a checkpoint"):
        graticule.from_pretrained(copy)
    assert not (tmp_path / "executed").exists()


def test_weights_of_another_shape_are_refused(changed):
    copy = changed()
    weights = load_file(copy / "model.safetensors")
    save_file({**weights, "head.weight": torch.zeros(5, 23)}, copy / "model.safetensors")
    with pytest.raises(ValueError, match=r"head\.weight"):
        graticule.from_pretrained(copy)


def test_a_folder_without_a_model_is_refused(model, tmp_path):
    (tmp_path / "empty").mkdir()
    for source, message in [
        (tmp_path / "empty", "no config.json"),
        (tmp_path / "nothing" / "there", "which does not exist"),
        ("../up", "which does not exist"),
    ]:
        with pytest.raises(FileNotFoundError, match=message):
            graticule.from_pretrained(source)
    direct = VisionTransformer(lambda grid, **site: graticule.build_position(grid, **site), img_size=32, patch_size=8)
    with pytest.raises(ValueError, match="`model` must be built by create_model"):
        direct.save_pretrained(tmp_path / "direct")
    with pytest.raises(ValueError, match="`folder` must be a folder"):
        (tmp_path / "file").touch()
        model.save_pretrained(tmp_path / "file")


def of(path, key, value):
    return lambda model: setattr(model.get_submodule(path), key, value)


#: Changes of a model that its arguments do not say, and the difference that the error names.
LOST = [
    (of("blocks.1.mlp", "act", nn.ReLU()), "but blocks.1.mlp.act is ReLU, not GELU"),
    (of("blocks.1.attn", "scale", 0.7), "but blocks.1.attn.scale is 0.7, not 0.35"),
    (of("blocks.1.norm1", "eps", 0.1), "but blocks.1.norm1.eps is 0.1, not 1e-06"),
    (of("blocks.1", "norm2", nn.Identity()), "but blocks.1.norm2 is Identity, not LayerNorm"),
    (
        of("", "fc_norm", nn.LayerNorm(24, elementwise_affine=False)),
        "but fc_norm.bias is None, not a tensor of shape (24,)",
    ),
    (of("", "head", nn.Linear(24, 9)), "but head.bias is of shape (9,), not (5,)"),
    (of("", "head", nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 5))), "but head is Sequential, not Linear"),
    (of("patch_embed.proj", "padding", (1, 0)), "but patch_embed.proj.padding is (1, 0), not (0, 0)"),
    (lambda model: model.blocks.__delitem__(1), "but blocks is in the order 0, 1, not 0, 1, 2"),
    (
        lambda model: of("", "blocks", nn.Sequential(*[model.blocks[0]] * 3))(model),
        "is the parameter blocks.0.norm1.weight",
    ),
]


@in_turn(("change", "difference"), LOST)
def test_a_model_that_its_arguments_do_not_build_is_not_saved_over_another_one(model, folder, change, difference):
    other, files = copy.deepcopy(model), {path: path.read_bytes() for path in folder.iterdir()}
    change(other)
    with pytest.raises(ValueError) as refusal:
        other.save_pretrained(folder)
    assert difference in str(refusal.value)
    assert {path: path.read_bytes() for path in folder.iterdir()} == files


def test_functions_and_rates_of_training_are_not_saved_with_a_warning(model, tmp_path):
    other = copy.deepcopy(model)
    other.forward = other.forward_features
    other.blocks[1].attn.proj_drop.p = 0.5
    with pytest.warns(UserWarning, match=r"^forward, blocks.1.attn.proj_drop.p of VisionTransformer are not saved: "):
        other.save_pretrained(tmp_path / "changed")
    block = type(model.blocks[0])
    with (
        mock.patch.object(block, "forward", lambda part, x, *args: x),
        pytest.warns(
            UserWarning, match=rf"^{block.__module__}.{block.__name__}.forward of VisionTransformer is not saved"
        ),
    ):
        model.save_pretrained(tmp_path / "patched")
    other = copy.deepcopy(model).bfloat16()
    with pytest.warns(UserWarning, match=r"\.dtype and \d+ more of .* not saved: the opened model is in torch.float32"):
        other.save_pretrained(tmp_path / "narrow")
    other = copy.deepcopy(model)
    other.fc_norm.weight.requires_grad_(False)
    with pytest.warns(
        UserWarning, match="^fc_norm.weight.requires_grad of .* is not saved: the opened model trains these"
    ):
        other.save_pretrained(tmp_path / "frozen")
    for part in ("narrow", "frozen"):
        values = [*graticule.from_pretrained(tmp_path / part).parameters()]
        assert all(value.requires_grad and value.dtype == torch.float32 for value in values)


def test_a_pruned_model_is_not_published_as_the_whole_one(tmp_path):
    model = graticule.create_model("vit_nano_patch4_28", depth=2)
    model.prune_intermediate_layers([0])
    with pytest.raises(ValueError, match="`model` must be built by create_model"):
        model.save_pretrained(tmp_path / "pruned")
    segmenter = graticule.create_segmenter("vit_nano_patch4_28", 3, "segmenter_mask(depth=1)", depth=2)
    segmenter.save_pretrained(tmp_path / "whole")  # whose backbone has no classifier
    segmenter.features.backbone.prune_intermediate_layers([0])
    with pytest.raises(ValueError, match="with all of its blocks, got a VisionTransformer that lacks some"):
        segmenter.save_pretrained(tmp_path / "pruned")
    assert not (tmp_path / "pruned").exists()


@pytest.mark.parametrize("content", ['{"architectures": ["ViTModel"]}', "[1]"])
def test_a_folder_with_the_config_of_another_program_is_refused(model, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"`folder` must be new or contain a published model of this library, got .*"):
        model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == content


def test_a_file_of_a_folder_without_a_model_is_not_replaced(model, tmp_path):
    for name in ("README.md", "model.safetensors"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("mine")
        with pytest.raises(ValueError, match=f"`folder` must be new .* whose {name} would be replaced"):
            model.save_pretrained(folder)
        assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(name, "mine")]


def test_a_link_that_leads_nowhere_is_named_as_such(model, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for folder in (tmp_path / "link", tmp_path / "link" / "model"):
        with pytest.raises(ValueError, match=r"link must be a folder, got a link that leads nowhere, to .*nowhere"):
            model.save_pretrained(folder)
