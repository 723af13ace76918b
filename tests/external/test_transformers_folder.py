"""Folders of transformers and names on the hub are opened as backbones, with the preprocessing of their images."""

import json
import shutil
from contextlib import nullcontext
from random import Random

import pytest
import timm
import torch
import transformers
from PIL import Image
from transformers_models import MERGED, SMALL, build

import graticule
from commands import run_command
from evidence.models_page import configured
from graticule.external.convert.verify import outputs_of
from graticule.external.images import call, image_size
from graticule.lab.data.transforms import evaluation_transform
from graticule.lab.training.opening import open_model
from in_turn import in_turn

PREPROCESSOR = {
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.2, 0.3, 0.4],
    "resample": 3,
    "size": {"shortest_edge": 40},
    "crop_size": {"height": 32, "width": 32},
    "do_center_crop": True,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "dino"
    model = build("Dinov2Model", SMALL)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return model, folder


def test_a_folder_is_opened_by_every_opener(saved):
    original, folder = saved
    x = torch.randn(1, 3, 32, 48)
    with torch.no_grad():
        expected = outputs_of(original, x)[0]
        for ours in (
            graticule.load(folder),
            graticule.load(f"hf:{folder}"),
            graticule.from_pretrained(folder),
            open_model(str(folder)).model,
            open_model(f"hf:{folder}").model,
            open_model(f"hf:{folder}", converted=True).model,
        ):
            assert not ours.training
            torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-5)


def test_preprocessing_is_that_of_the_folder(saved):
    resolved = timm.data.resolve_model_data_config(graticule.load(saved[1]))
    assert resolved["mean"] == (0.5, 0.4, 0.3) and resolved["std"] == (0.2, 0.3, 0.4)
    assert resolved["crop_pct"] == 0.8 and resolved["crop_mode"] == "center" and resolved["interpolation"] == "bicubic"
    opened = open_model(str(saved[1]))
    assert opened.img_size == (32, 32) and opened.images.mean == (0.5, 0.4, 0.3)


@pytest.mark.filterwarnings("ignore:.*makes images of 32 x 48 pixels, and the model is for 32 x 32")
@pytest.mark.parametrize(
    "entries",
    [
        PREPROCESSOR,
        {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}},
        {"image_processor_type": "ViTImageProcessor", "size": 32, "do_normalize": False},
        {"image_processor_type": "ViTImageProcessor", "size": 32, "do_rescale": False, "image_std": [9.0, 8.0, 7.0]},
        {"image_processor_type": "ViTImageProcessor", "size": 32, "rescale_factor": 1 / 127.5, "resample": 3},
        {"image_processor_type": "ViTImageProcessor", "size": 32, "image_mean": [0.1, 0.2, 0.3], "resample": 0},
        {"image_processor_type": "DeiTImageProcessor", "size": 40, "crop_size": 32},
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 32}, "crop_size": 32},
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 37}, "crop_size": 32},
        {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 48}},
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 32}},
    ],
    ids=str,
)
def test_images_are_prepared_as_by_the_image_processor(saved, tmp_path, entries):
    folder = shutil.copytree(saved[1], tmp_path / "model")
    (folder / "preprocessor_config.json").write_text(json.dumps(entries))
    opened = open_model(str(folder))
    size = opened.size if entries.get("size") != {"height": 32, "width": 48} else (32, 48)
    ours = evaluation_transform(opened.images, size, opened.augmentation)
    original = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    for shape in ((160, 64), (64, 160), (96, 96)):
        image = Image.frombytes("RGB", shape, Random(1).randbytes(3 * shape[0] * shape[1]))
        expected = torch.as_tensor(original(image, return_tensors="pt")["pixel_values"][0])
        torch.testing.assert_close(ours(image), expected, rtol=1e-5, atol=1e-5)


def test_the_encoder_of_a_larger_model_is_opened(tmp_path):
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.CLIPConfig(
        text_config={**text, "vocab_size": 10}, vision_config={**SMALL, "projection_dim": 7}, projection_dim=7
    )
    original = transformers.CLIPModel(config).eval()
    original.save_pretrained(tmp_path)
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = original.get_image_features(pixel_values=x).pooler_output
        with pytest.warns(UserWarning, match="22 tensors outside of the CLIPVisionModelWithProjection.*: logit_scale"):
            opened = graticule.load(tmp_path)
        torch.testing.assert_close(opened(x), expected, rtol=1e-5, atol=1e-5)


#: Class -> its options, and the first name that the opened encoder lacks: transformers#38788, #37817 and their kind.
HEADS = {
    "Dinov2ForImageClassification": ({"num_labels": 7}, "2 .*: classifier.bias, classifier.weight"),
    "Dinov2WithRegistersForImageClassification": ({"num_labels": 7}, "2 .*: classifier.bias"),
    "VJEPA2ForVideoClassification": (
        {"crop_size": 32, "frames_per_clip": 4, "mlp_ratio": 2.0},
        "65 .*: classifier.bias",
    ),
    "ViTMAEForPreTraining": ({"decoder_num_hidden_layers": 1}, "24 .*: decoder.decoder_embed.bias"),
    "ViTForMaskedImageModeling": ({"encoder_stride": 8}, "3 .*: decoder.0.bias"),
    "BeitForMaskedImageModeling": ({"vocab_size": 11, "use_mask_token": True}, "4 .*: layernorm.bias"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (i > 0)) for i, n in enumerate(HEADS)])
def test_a_head_that_an_encoder_lacks_is_said(name, tmp_path):
    options, names = HEADS[name]
    build(name, {**SMALL, **options}).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=f"has {names}"):
        graticule.load(tmp_path)


#: Changes of config.json, or of the tensors, and part of the error.
OWN_CODE = {"AutoModel": "own.MyModel", "AutoConfig": "own.MyConfig"}
DAMAGED = [
    ({"architectures": ["MyModel"], "auto_map": {"AutoModel": "my.MyModel"}}, {}, "got MyModel; code of a repository"),
    # transformers' own class, but with code of the repository beside it, which is not run
    ({"architectures": ["MyModel"], "auto_map": OWN_CODE}, {}, "MyModel;"),
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, {}, "floating-point weights, got a quantized one"),
    ({"num_hidden_layers": 10**9}, {}, "`num_hidden_layers` must be at most 1,000, got 1000000000"),
    ({"text": {"depths": [1, 10**9]}}, {}, "`depths` must be at most 1,000, got 1000000000"),
    (
        {"num_labels": 9},
        {"classifier.weight": torch.ones(7, 64)},
        "got 9 in its config.json and 7 in classifier.weight",
    ),
    ({"num_hidden_layers": 3}, {}, "must have all weights of Dinov2Model, but lacks "),
    ({"image_size": 64}, {}, "but has in another shape than by its config embeddings.position_embeddings"),
    ({"hidden_size": 2**20}, {}, "more than the file has bytes"),
    ({"hidden_size": "many"}, {}, "cannot be opened as Dinov2Model: "),
    ({"model_type": None}, {}, "describes no model of graticule or transformers"),
    ({}, {"layernorm.weight": None}, "must have all weights of Dinov2Model, but lacks layernorm.weight"),
    ({}, {"layernorm.weight": torch.ones(31)}, "but has in another shape than by its config layernorm.weight"),
    ({}, {"encoder.layer.0.mlp.fc1.weight": None}, "but lacks encoder.layer.0.mlp.fc1.weight"),
    ({}, {"layernorm.weight": torch.ones(32).to(torch.int8)}, "floating-point weights, got I8 of layernorm.weight"),
    ({"architectures": ["BertModel"]}, {}, "one of transformers' classes of models of images, got BertModel"),
    ({"architectures": ["Dinov2Config"]}, {}, "classes of models of images, got Dinov2Config; code"),
    ({"patch_size": 4}, {}, "but has in another shape than by its config embeddings."),
]


def test_damaged_folders_are_refused_in_one_sentence(saved, tmp_path, capfd):
    from safetensors.torch import load_file, save_file

    (tmp_path / "own.py").write_text("import pathlib\npathlib.Path(__file__).with_name('was_run').touch()\n")
    config, state = json.loads((saved[1] / "config.json").read_text()), load_file(saved[1] / "model.safetensors")
    for entries, tensors, message in DAMAGED:
        (tmp_path / "config.json").write_text(json.dumps({**config, **entries}))
        tensors_left = {name: value for name, value in {**state, **tensors}.items() if value is not None}
        save_file(tensors_left, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError) as refusal:
            graticule.load(tmp_path)
        assert message in str(refusal.value) and "\n" not in str(refusal.value), message
    assert not capfd.readouterr().err and not (tmp_path / "was_run").exists()


@pytest.mark.filterwarnings("ignore:.*makes images of 32 x 32 pixels")
@pytest.mark.parametrize("name", [pytest.param("HieraModel", marks=pytest.mark.slow), "PixioModel"])
def test_a_model_that_does_not_convert_is_opened_as_it_is_by_every_command(name, tmp_path, capsys):
    original, folder, image_folder = build(name, configured(name)).float(), tmp_path / "model", tmp_path / "images"
    original.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    side = image_size(original)[0]
    image_folder.mkdir()
    for index in range(5):
        Image.new("RGB", (side, side), (40 * index, 90, 200 - 30 * index)).save(image_folder / f"{index}.png")
    x = torch.randn(1, 3, side, side)
    source = f"hf:{folder}"
    with pytest.warns(UserWarning, match=f"is opened as {name} of its library, which does not convert; it can be"):
        opened = graticule.load(source)
    with torch.no_grad():
        assert torch.equal(call(opened, x)[0], call(original, x)[0])
    assert timm.data.resolve_model_data_config(opened)["mean"] == (0.5, 0.4, 0.3)
    for command in (
        ("audit", source, "--images", image_folder, "--output", tmp_path),
        ("explore", source, "--images", image_folder / "0.png", "--output", tmp_path, "--no-open"),
        ("check", source, "--skip", "export", "crop", "caches"),
        ("export", source, "--output", tmp_path / "model.pt2"),
    ):
        with pytest.warns(UserWarning, match="does not convert"):
            status, _, error_text = run_command(capsys, *command)
        assert status == 0, error_text
    assert json.loads((tmp_path / "audit.json").read_text())["effects"] and (tmp_path / "explorer.html").is_file()
    graticule.resize(opened, 2 * side)
    opened.save_pretrained(folder)
    with pytest.warns(UserWarning, match="does not convert"):
        again = graticule.load(folder)
    sizes = {timm.data.resolve_model_data_config(part)["input_size"] for part in (opened, again)}
    assert image_size(again) == (2 * side, 2 * side) and sizes == {(3, 2 * side, 2 * side)}


def test_code_of_a_repository_is_not_run_where_the_class_is_one_of_transformers(saved, tmp_path):
    config = json.loads((saved[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "own.Dinov2Model"}}))
    (tmp_path / "model.safetensors").write_bytes((saved[1] / "model.safetensors").read_bytes())
    (tmp_path / "own.py").write_text("import pathlib\npathlib.Path(__file__).with_name('was_run').touch()\n")
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(graticule.load(tmp_path)(x), graticule.load(saved[1])(x))
    assert not (tmp_path / "was_run").exists()


def test_names_that_cannot_be_downloaded_are_refused(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="facebook/none is not a folder, and could not be downloaded"):
        graticule.load("hf:facebook/none")
    with pytest.raises(
        ValueError, match=r"`source` must be one of .* names; got 'timm:vit_smal'; did you mean 'timm:.*vit_small'"
    ):
        graticule.load("timm:vit_smal")
    with pytest.raises(ValueError, match="with published weights, got 'timm:vit_tiny_patch16_224': "):
        graticule.load("timm:vit_tiny_patch16_224")
    with pytest.raises(ValueError, match="`checkpoint` must be left out for a published model"):
        graticule.load("hf:facebook/none", checkpoint="last")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A language model of Qwen with an encoder of images, whose weights are in several files."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 99}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
    encoder = {**MERGED, "embed_dim": 32, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(vision_config=encoder, text_config={**sizes, **heads, **rope})
    folder = tmp_path_factory.mktemp("models") / "qwen"
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    model.save_pretrained(folder, max_shard_size="30KB")
    return model.model.visual, folder


def test_an_index_names_only_files_in_its_folder(sharded, tmp_path):
    for file in sharded[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    place = tmp_path / "model.safetensors.index.json"
    index = json.loads(place.read_text())
    outside = ("../outside.safetensors", "/etc/outside.safetensors", "a/b.safetensors")
    for name in (*outside, "pickled.bin", ".safetensors"):
        place.write_text(json.dumps({**index, "weight_map": {**index["weight_map"], "lm_head.weight": name}}))
        with pytest.raises(ValueError, match="must name files in its folder that end in"):
            graticule.load(tmp_path)
    place.write_text(json.dumps(index))
    min(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(FileNotFoundError, match="no model-00001-of-"):
        graticule.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"graticule": {"kind": "backbone"}}))
    (tmp_path / min(index["weight_map"].values())).touch()
    with pytest.raises(ValueError, match="must be of a model whose weights are in"):
        graticule.load(tmp_path)


#: File, entries that it gets, and what is said of them when a model for 32 pixels is opened; None for nothing.
SAID = [
    ("config.json", {"out_features": ["stage2"], "out_indices": [2]}, None),
    ("config.json", {"out_features": ["stem", "stage1"], "out_indices": [0, 1]}, "`out_features` stem, stage1, which"),
    ("preprocessor_config.json", {"crop_size": {"height": 32, "width": 32}}, None),
    ("preprocessor_config.json", {"crop_size": {"height": 24, "width": 24}}, "of 24 x 24 pixels, .* for 32 x 32"),
]


@in_turn(("file", "entries", "said"), SAID)
def test_entries_that_the_opened_model_does_not_follow_are_said(saved, tmp_path, file, entries, said):
    folder = shutil.copytree(saved[1], tmp_path / "model", dirs_exist_ok=True)
    (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **entries}))
    with nullcontext() if said is None else pytest.warns(UserWarning, match=said):
        opened = graticule.load(folder)
    assert opened.img_size == (32, 32)
    if "stem" in entries.get("out_features", ()):  # the warning names the call that returns them
        theirs = transformers.Dinov2Backbone.from_pretrained(folder).eval()
        x = torch.randn(1, 3, 32, 32)
        ours = opened.forward_intermediates(x, indices=[0], norm=True, intermediates_only=True)
        torch.testing.assert_close(ours[0], theirs(x).feature_maps[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "entries",
    [
        {"image_processor_type": "SamImageProcessor"},
        {"image_processor_type": "NoSuchProcessor"},
        {"image_processor_type": "ViTImageProcessor", "do_resize": False},
        {"image_processor_type": "ViTImageProcessor", "image_std": [0.5, 0.5, float("nan")]},
        {"image_processor_type": "ViTImageProcessor", "size": "large"},
    ],
    ids=str,
)
def test_preprocessing_that_cannot_be_read_is_a_warning(saved, tmp_path, entries):
    folder = shutil.copytree(saved[1], tmp_path / "model")
    (folder / "preprocessor_config.json").write_text(json.dumps(entries))
    with pytest.warns(UserWarning, match="the preprocessing of .*preprocessor_config.json is not known"):
        graticule.load(folder)
