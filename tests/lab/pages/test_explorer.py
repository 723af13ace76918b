"""The explorer: its page contains the maps that the analyses compute, and shows each token its map."""

import base64
import io
import json
import math
import re
import zlib

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import graticule
from commands import run_command
from graticule.analysis.attention import attention_maps
from graticule.analysis.correlation import position_correlations
from graticule.analysis.mixing import mixing_maps
from graticule.analysis.position_maps import bias_maps
from graticule.external.traced_model import view_of
from graticule.lab.data.module import DataModule
from graticule.lab.pages.explorer import NOTHING, STEPS, compute_maps, explorer_page, page_data, quantize
from graticule.lab.pages.explorer_maps import explorer_maps
from graticule.lab.training.run import Run
from short_runs import copied
from tiny import draw, images, tiny

SWIN = {"img_size": 64, "embed_dim": 12, "num_heads": (1, 2, 3, 4), "depths": (2, 2, 1, 1), "window_size": 4}
NORM = {"mean": (0.5,) * 3, "std": (0.25,) * 3}


def explored_at(model, *sizes, batch=1, label="a model"):
    draws = [images(*size, batch=batch) for size in sizes]
    return compute_maps(model, draws, **NORM, label=label), draws


@pytest.fixture(scope="module")
def both():
    """Explore a ViT with a table, a bias and a class token, for two images of two sizes, one not square."""
    torch.manual_seed(0)
    model = draw(tiny("learnable+relative_bias", "lape")).eval()
    return (model, *explored_at(model, (32, 32), (24, 40), batch=2))


def read(about, text):
    """Read the maps of a page like its script: description and values, in the order of models and sizes."""
    data = zlib.decompress(base64.b64decode(text))
    for maps in (maps for model in about["models"] for size in model["sizes"] for maps in size["maps"]):
        rows = [maps["prefix"] + math.prod(maps["queries"]), math.prod(maps["keys"])]
        if maps["displacement"]:
            height, width = maps["queries"]
            rows = [(2 * height - 1) * (2 * width - 1)]
        elif maps["windows"] is not None:
            rows = [maps["windows"][0], *rows]
        shape = (len(maps["heads"]), *rows)
        codes = np.frombuffer(data, np.uint8, np.prod(shape), maps["codes"]).reshape(shape)
        ends = np.frombuffer(data, np.float32, 2 * np.prod(shape[:-1]), maps["ends"]).reshape(*shape[:-1], 2)
        low, high = np.split(ends.astype(float), 2, -1)
        yield maps, np.where(codes == NOTHING, np.nan, low + codes / STEPS * (high - low))


def of(of_size, kind, layer, image=None):
    (maps,) = [maps for maps in of_size.maps if (maps.kind, maps.layer, maps.image) == (kind, layer, image)]
    return maps


def test_a_value_is_off_by_at_most_half_a_percent_of_the_range_of_its_row():
    values = np.random.default_rng(0).normal(size=(3, 4, 50)) * np.array([1e-6, 1, 1e6])[:, None, None]
    values[0, 0] = 2.5  # a row without a range
    values[1, 1, 3:9], values[2, 2] = np.nan, np.nan
    codes, ends = quantize(values)
    low, high = np.split(ends.astype(float), 2, -1)
    again = np.where(codes == NOTHING, np.nan, low + codes / STEPS * (high - low))
    np.testing.assert_array_equal(np.isnan(again), np.isnan(values))
    off = np.abs(again - values)
    assert np.nanmax(off / np.where(high > low, high - low, 1)) <= 0.005 + 1e-6
    assert again[0, 0, 0] == 2.5


def test_the_page_contains_the_values_of_the_analyses(both):
    _, model, _ = both
    about, text, note = page_data([model], 10_000_000)
    pairs = list(zip(read(about, text), [maps for size in model.sizes for maps in size.maps], strict=True))
    assert len(pairs) == 2 * (3 + 3 + 2 * 3 * 2) and not note  # correlation, bias, and attention of two images
    for (described, values), maps in pairs:
        exact = maps.values.reshape(len(maps.heads), -1) if maps.by_displacement else maps.values
        assert (described["kind"], described["layer"], described["image"]) == (maps.kind, maps.layer, maps.image)
        half_step = 0.5 / STEPS * np.ptp(exact, axis=-1, keepdims=True)
        assert (np.abs(values - exact) <= half_step + 1e-6 * np.abs(exact).max()).all()


@pytest.mark.parametrize("at", [0, 1])
def test_maps_are_those_of_the_analyses_at_every_size(both, at):
    model, of_size, draws = both
    of_size, x = of_size.sizes[at], draws[at]
    size = of_size.img_size
    assert of_size.grids == [[(4, 4), (3, 5)][at]] * 3
    correlations = position_correlations(model, size)
    with_position, without = attention_maps(model, x), attention_maps(model, x, without_position=True)
    for layer in range(3):
        np.testing.assert_array_equal(of(of_size, "correlation", layer).values[0], correlations.similarity[layer])
        for kind, maps in (("attention", with_position), ("without", without)):
            for image in (0, 1):
                drawn = of(of_size, kind, layer, image)
                assert drawn.prefix == 1  # the class token is a query, but not a key
                np.testing.assert_array_equal(drawn.values, maps[layer].weights[image, :, :, 1:])


@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
def test_a_bias_of_displacements_is_kept_as_a_table_of_them(size):
    model = draw(tiny("relative_bias")).eval()
    of_size, biases = explorer_maps(view_of(model), images(*size, batch=1)), bias_maps(model, size)
    table = of(of_size, "bias", 1)
    height, width = table.queries
    assert table.by_displacement and table.values.shape == (3, 2 * height - 1, 2 * width - 1)
    for query, key in ((0, 0), (3, height * width - 1), (height * width - 2, 1)):
        down, right = np.subtract(divmod(query, width), divmod(key, width))
        np.testing.assert_array_equal(
            table.values[:, down + height - 1, right + width - 1], biases.bias[1][:, query, key]
        )


def test_a_rotation_and_mixing_weights_are_shown():
    rope = explorer_maps(view_of(draw(tiny("rope")).eval()), images(batch=1))
    assert {layer.kind for layer in rope.maps} == {"rotary", "attention", "without"}
    mlp = graticule.create_model("gmlp_ti16_224", img_size=32, patch_size=8, num_blocks=2, num_classes=5)
    of_size = explorer_maps(view_of(draw(mlp).eval()), images(batch=1))
    assert {layer.kind for layer in of_size.maps} == {"mixing"} and "attention" in of_size.notes[0]
    for query in ((0, 0), (2, 3)):
        for layer in mixing_maps(mlp, query=query):
            row = of(of_size, "mixing", layer.layer).values[:, 4 * query[0] + query[1]]
            np.testing.assert_allclose(row, layer.weights.reshape(len(row), -1))


def blocks_of(model):
    return [block for stage in model.layers for block in stage.blocks]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("size", [64, 96])
def test_the_windows_of_swin_say_where_their_tokens_are(size, layer):
    """Mixing the values of each window's tokens by its weights gives the output of the attention at those tokens."""
    model = draw(graticule.create_model("swin_tiny_patch4_window7_224", num_classes=5, **SWIN)).double().eval()
    attention = blocks_of(model)[layer].attn
    inputs, mixed = [], []
    attention.register_forward_pre_hook(lambda module, args: inputs.append(args))
    attention.register_forward_hook(lambda module, args, output: mixed.append(output))
    (maps,) = attention_maps(model, images(size, size, 1, torch.float64), [layer])
    values = attention.qkv(inputs[-1][0]).chunk(3, -1)[2][0]  # (N, D), one head
    for weights, tokens in zip(torch.from_numpy(maps.weights), maps.windows, strict=True):
        assert (tokens >= 0).all()
        torch.testing.assert_close(attention.proj(weights[0] @ values[tokens]), mixed[-1][0, tokens])


def test_the_windows_of_a_swin_of_timm_are_those_of_ours():
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **SWIN).eval()
    ours = graticule.create_model("swin_tiny_patch4_window7_224", num_classes=5, **SWIN).eval()
    ours.load_state_dict(model.state_dict())
    x = images(64, 64, 1)
    for layer, other in zip(attention_maps(model, x), attention_maps(ours, x), strict=True):
        if layer.windows is None:  # one window is the whole grid
            np.testing.assert_array_equal(other.windows, np.arange(layer.queries.patches)[None])
            np.testing.assert_allclose(layer.weights, other.weights, atol=1e-5)
            continue
        order, there = layer.windows[:, 0].argsort(), other.windows[:, 0].argsort()
        np.testing.assert_array_equal(layer.windows[order], other.windows[there])
        np.testing.assert_allclose(layer.weights[order], other.weights[there], atol=1e-5)


def test_maps_are_averaged_over_their_heads_if_the_page_would_be_too_large(both):
    _, model, _ = both
    length = len(page_data([model], 10_000_000)[1])
    about, text, note = page_data([model], length - 1)
    assert len(text) < length and "the mean over heads" in note
    of_mean = [(maps, values) for maps, values in read(about, text) if maps["heads"] == ("mean over heads",)]
    assert {maps["kind"] for maps, _ in of_mean} == {"bias", "attention", "without"}
    maps, values = next(pair for pair in of_mean if pair[0]["kind"] == "attention")
    exact = of(model.sizes[0], maps["kind"], maps["layer"], maps["image"]).values.mean(0)
    np.testing.assert_allclose(values[0], exact, atol=0.005 * np.ptp(exact))
    with pytest.raises(ValueError, match="give fewer or smaller sizes"):
        page_data([model], 1000)


def test_the_page_has_the_images_as_they_were():
    x = (torch.rand(1, 3, 32, 48) * 255).round() / 255
    model = compute_maps(tiny().eval(), [(x - 0.5) / 0.25], **NORM, label="a")
    pixels = np.asarray(Image.open(io.BytesIO(model.images[0][0])))
    assert pixels.shape == (7 * 32, 7 * 48, 3)  # enlarged, since it is small
    np.testing.assert_array_equal(pixels[::7, ::7], (x[0] * 255).round().permute(1, 2, 0))


def test_the_page_fetches_nothing_and_escapes_what_it_is_given():
    label = '</script><script>alert(1)</script> & "quotes"'
    page = explorer_page([explored_at(tiny().eval(), (32, 32), label=label)[0]], label)
    assert label not in page and "alert(1)" in page
    assert not re.search(r"<script[^>]*src=|<link|@import|<img", page)
    assert "default-src 'none'; script-src 'unsafe-inline'" in page  # so that browsers refuse it, too
    described = json.loads(re.search(r'id="described">(.*?)</script>', page, re.DOTALL)[1])
    assert described["models"][0]["label"] == label
    assert len(page) < 2_500_000


@pytest.fixture(scope="module")
def run(plain_run, tmp_path_factory):
    return copied(plain_run, tmp_path_factory.mktemp("explored") / "run")


def described_in(path):
    return json.loads(re.search(r'id="described">(.*?)</script>', path.read_text(), re.DOTALL)[1])


def test_explore_writes_a_page_of_a_run_and_of_two_models_at_several_sizes(capsys, tmp_path, run):
    code, out, _ = run_command(capsys, "explore", run.folder)
    assert code == 0 and out == f"wrote {run.folder / 'explorer.html'}\n"
    code, *_ = run_command(
        *(capsys, "explore", run.folder, run.weights, "--images", 3, 5, "--sizes", 20, "28x36"),
        *("--output", tmp_path / "a"),
    )
    (first, second) = described_in(tmp_path / "a" / "explorer.html")["models"]
    assert code == 0 and [size["pixels"] for size in first["sizes"]] == [[20, 20], [28, 36]]
    assert all(len(size["images"]) == 2 for size in first["sizes"] + second["sizes"])
    assert first["title"].startswith("vit_nano_patch4_28")


def test_explore_takes_a_model_by_name_with_files_of_images(capsys, tmp_path):
    Image.new("RGB", (50, 40), (200, 100, 50)).save(tmp_path / "a.png")
    code, *_ = run_command(
        *(capsys, "explore", "vit_nano_patch4_28", "--weights", "random", "--images", tmp_path / "a.png"),
        *("--output", tmp_path / "a"),
    )
    assert code == 0 and (tmp_path / "a" / "explorer.html").is_file()
    (tmp_path / "small.py").write_text(
        "import timm\nmodel = timm.create_model('vit_tiny_patch16_224', img_size=32, patch_size=8, depth=1)\n"
    )
    code, _, err = run_command(
        *(capsys, "explore", f"{tmp_path}/small.py:model", "--images", tmp_path / "a.png"),
        *("--sizes", "48", "32", "24x40", "--output", tmp_path / "b" / "c"),
    )
    (described,) = described_in(tmp_path / "b" / "c" / "explorer.html")["models"]
    assert code == 0 and [size["pixels"] for size in described["sizes"]] == [[48, 48], [32, 32], [24, 40]], err
    assert " --sizes 48 32 24x40 " in (tmp_path / "b" / "c" / "explorer.html").read_text()


def test_wrong_arguments_of_explore_are_refused_and_nothing_is_written(capsys, tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "runs" / "rope").mkdir(parents=True)
    (tmp_path / "runs" / "rope" / "recipe.json").write_text("{}")
    before = {path: path.stat().st_mtime for path in run.folder.iterdir()}
    cases = {
        (): "must be given",
        ("RUN", "RUN"): "`models` must differ",
        ("RUN", "RUN/weights.safetensors", "vit_nano_patch4_28"): "`models` must be one or two",
        ("./nowhere",): "does not exist",
        ("RUN", "--images", "20"): "`image` must be from 0 to 19",
        ("RUN", "--images", "there.png"): "'there.png', which does not exist",
        ("RUN", "--images", "."): "got the folder '.'; give FOLDER/*",
        ("RUN", "--images", "text.png"): "cannot be read as one",
        ("RUN", "--sizes", "30"): "28 and 32",
        ("vit_nano_patch4_28", "--weights", "random"): "`images` must be files",
        ("vit_nona_patch4_28", "--images", "text.png"): "did you mean 'vit_nano_patch4_28'",
        ("rop", "--images", "text.png"): "did you mean 'runs/rope'?",
        ("runs/ropes",): "which does not exist; did you mean 'runs/rope'?",
    }
    for words, message in cases.items():
        arguments = [word.replace("RUN", str(run.folder)) for word in words]
        code, _, err = run_command(capsys, "explore", *arguments)
        assert code == (1 if words else 2) and message in err, (words, err)
    assert {path: path.stat().st_mtime for path in run.folder.iterdir()} == before


def test_a_run_keeps_the_images_of_its_data(run):
    data: DataModule = Run.open(run.folder).data()
    x = data.test_images((28, 28), [0])[0]
    (images,) = compute_maps(run.model(), [x], data.info.mean, data.info.std, "a").images
    assert Image.open(io.BytesIO(images[0])).mode == "L"
