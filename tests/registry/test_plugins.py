"""Plugins: encodings, joinings and backbones of a file outside of the package work like those of the package."""

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
import timm
import torch

import graticule
from commands import run_command
from graticule.hub.files import Card, model_card
from graticule.position.position import ENCODINGS
from graticule.position.resampling import build_resampler
from graticule.registry import plugins
from graticule.testing.methods import check_backbone, check_encoding, check_joining
from in_turn import in_turn

FILE = Path(__file__).parents[2] / "docs" / "my_methods.py"


@pytest.fixture(scope="module", autouse=True)
def methods(my_methods):
    """Load the methods for every test of this file."""
    return my_methods


def test_it_is_imported_once(methods):
    assert graticule.load_plugin(str(FILE)) is methods
    assert plugins._registered[FILE.resolve()] == plugins._hash(FILE)
    assert plugins.source_of(methods.RandomFourier) == FILE
    assert plugins.source_of(graticule.AbsoluteEncoding) is None


@pytest.mark.parametrize(
    ("encoding", "joining"),
    [
        *[
            ("random_fourier(frequencies=8)", joining)
            for joining in ("default", "unshared", "lape", "decayed(rate=0.9)")
        ],
        ("distance", "default"),
        ("distance(scale=2.0)", "lape(over='heads')"),
    ],
)
def test_its_encodings_pass_the_contract(encoding, joining):
    """The calls in `python testing` of docs/extending.md."""
    check_encoding(encoding, joining, compiled=encoding == "distance")


def test_its_joining_passes_the_contract_with_every_table():
    for encoding in ("learnable", "sinusoidal_2d"):
        check_joining("decayed(layers=2)", encoding, compiled=False)


def test_its_resampler_is_the_nearest_neighbor_of_pytorch():
    nearest = build_resampler("nearest")
    table = torch.randn(3, 7, 10, dtype=torch.float64)
    for size in ((14, 20), (5, 3), (9, 11)):
        expected = torch.nn.functional.interpolate(table[None], size=size, mode="nearest-exact")[0]
        torch.testing.assert_close(nearest(table, size), expected, rtol=0, atol=1e-12)
    check_encoding("learnable(resampler='nearest')", compiled=False)


def test_its_backbone_passes_the_contract():
    check_backbone("convolutional_vit", encoding="random_fourier+distance", joining="decayed", compiled=False)


def test_the_joining_follows_its_formula():
    model = graticule.create_model(
        "convolutional_vit", encoding="random_fourier", joining="decayed(rate=0.5, layers=2)"
    )
    first, second, third = model.position(model.grid)
    torch.testing.assert_close(second.added_to_stream, first.added_to_stream / 2)
    assert first.added_to_stream.shape == (model.grid.tokens, 48) and third == graticule.LayerPosition()


def test_the_names_are_known_everywhere(capsys):
    assert {"random_fourier", "distance"} <= set(graticule.list_encodings())
    assert "decayed" in graticule.list_joinings() and "convolutional_vit" in graticule.list_models()
    assert type(timm.create_model("graticule_convolutional_vit", num_classes=3)).__name__ == "ConvolutionalVit"
    code, out, _ = run_command(capsys, "models")
    assert code == 0 and "convolutional_vit" in out and "random_fourier" in out and "decayed" in out
    with pytest.raises(ValueError, match=r"must not have the option 'frequency'; did you mean 'frequencies'\?"):
        graticule.create_model("convolutional_vit", encoding="random_fourier(frequency=3)")
    with pytest.raises(ValueError, match="`patches` is not an argument of convolutional_vit"):
        graticule.create_model("convolutional_vit", patches=3)


@in_turn(
    ("text", "message"),
    [
        ("import graticule\n1 / 0\n", "ZeroDivisionError: division by zero, in line 2"),
        ("import sys\n\nsys.exit()\n", "SystemExit: , in line 3"),
        ("raise BaseException('enough')\n", "BaseException: enough, in line 1"),
        ("def broken(:\n", "invalid syntax in line 1"),
        (
            "import graticule\n@graticule.register_encoding('learnable')\n"
            "class Mine(graticule.AbsoluteEncoding):\n    pass\n",
            "`name` must be new, got 'learnable', which is the encoding Learnable",
        ),
        (
            "import graticule\n@graticule.register_encoding('random_fourier')\n"
            "class Fourier2(graticule.AbsoluteEncoding):\n    pass\n",
            r"got 'random_fourier', which is the encoding RandomFourier of .*my_methods.py",
        ),
        (
            "import graticule\n@graticule.register_joining('mine')\nclass Mine:\n    pass\n",
            "must be a subclass of Joining",
        ),
        ("import graticule\n@graticule.register_backbone('my vit')\nclass Mine:\n    pass\n", "must be an identifier"),
        *(
            (
                f"import graticule\n@graticule.register_{kind}\ndef mine():\n    pass\n",
                rf"write @graticule\.register_{kind}\('my_{kind}'\) above it, in line 2",
            )
            for kind in ("encoding", "joining", "resampler", "backbone", "task", "dataset", "recipe")
        ),
        (
            "import graticule\n@graticule.register_encoding('mine')\nclass Mine(graticule.PatchBias):\n    pass\n",
            "TypeError: the encoding 'mine' must define patch_bias, in line 2",
        ),
        ("x = '\0'\n", r"cannot be imported: source code string cannot contain null bytes\.$"),
    ],
)
def test_an_invalid_plugin_is_one_line(text, message, tmp_path, capsys):
    file = tmp_path / "plugin.py"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        graticule.load_plugin(file)
    assert not [name for name in sys.modules if name.startswith("graticule_plugin_plugin")]
    code, out, err = run_command(capsys, "models", "--plugin", file)
    assert code == 1 and out == "" and err.startswith(f"graticule: error: the plugin {file} cannot be imported: ")
    assert err.count("\n") == 1


def test_a_missing_plugin_is_refused(tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match=r"`plugin` must be .*, got .*nowhere.py', which does not exist"):
        graticule.load_plugin(tmp_path / "nowhere.py")
    with pytest.raises(ValueError, match=r"`plugin` must be a Python file .*, which is a folder"):
        graticule.load_plugin(f"{tmp_path}/")
    with pytest.raises(ValueError, match=r"of the group graticule\.plugins, got 'nothing'; none is"):
        graticule.load_plugin("nothing")
    code, _, err = run_command(capsys, "models", "--plugin")
    assert code == 1 and "`--plugin` must be followed by" in err


@pytest.fixture
def write_encoding(monkeypatch):
    """Return a function that writes a plugin with a class, registered as an encoding, and more code; then forget it."""
    monkeypatch.setattr(plugins, "_registered", {})
    monkeypatch.setattr(ENCODINGS, "data", dict(ENCODINGS))

    def write(file, name, cls, more=""):
        file.parent.mkdir(exist_ok=True)
        file.write_text(
            "import graticule\nfrom graticule.position.position import NoEncoding\n"
            f"@graticule.register_encoding('{name}')\nclass {cls}(NoEncoding):\n    pass\n{more}\n"
        )
        return file

    return write


def test_a_corrected_plugin_can_be_loaded_again(tmp_path, write_encoding):
    """In a notebook a file is corrected and imported again: its names are not refused as taken."""
    for version in (1, 2):
        file = write_encoding(tmp_path / "again.py", "again", "Again", f"Again.version = {version}")
        assert graticule.load_plugin(file).Again.version == version
        assert ENCODINGS["again"].version == version
    assert plugins.missing_plugins({"again.py": plugins._hash(file), "other.py": "0"}) == (["other.py"], [])
    assert plugins.missing_plugins({"again.py": "0"}) == ([], ["again.py"])


def test_a_plugin_that_raised_can_be_corrected_and_its_classes_renamed(tmp_path, write_encoding):
    file = write_encoding(tmp_path / "corrected.py", "corrected", "First", "1 / 0")
    with pytest.raises(ValueError, match="division by zero, in line 6"):
        graticule.load_plugin(file)
    for cls in ("First", "Second"):
        write_encoding(file, "corrected", cls)
        assert getattr(graticule.load_plugin(file), cls) is ENCODINGS["corrected"]
    fourth = write_encoding(file, "corrected", "Fourth").read_text()
    write_encoding(file, "corrected", "Third", fourth)
    with pytest.raises(ValueError, match="`name` must be new, got 'corrected', which is the encoding Third of"):
        graticule.load_plugin(file)


def test_plugins_of_one_name_in_two_folders_are_distinguished(tmp_path, write_encoding):
    files = [write_encoding(tmp_path / name / "methods.py", f"of_{name}", "Own") for name in ("left", "right")]
    classes = [graticule.load_plugin(file).Own for file in files]
    digests = [plugins._hash(file) for file in files]
    both = {"left/methods.py": digests[0], "right/methods.py": digests[1]}
    assert plugins.plugins_of(classes) == both and plugins.missing_plugins(both) == ([], [])
    assert [plugins.plugins_of([cls]) for cls in classes] == [{"methods.py": digest} for digest in digests]
    assert plugins.missing_plugins({"methods.py": digests[0]}) == ([], [])  # the later one does not hide it
    assert plugins.missing_plugins({"other/methods.py": "0", "": "0"}) == (["other/methods.py", ""], [])


def test_an_installed_entry_point_is_loaded_only_by_name(monkeypatch):
    point = importlib.metadata.EntryPoint("my_lab", "json", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == plugins.GROUP else [])
    assert graticule.load_plugin("my_lab").__name__ == "json"
    with pytest.raises(ValueError, match="installed are my_lab"):
        graticule.load_plugin("your_lab")
    broken = importlib.metadata.EntryPoint("my_lab", "json:nothing", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [broken])
    with pytest.raises(ValueError, match="the plugin my_lab cannot be imported: AttributeError"):
        graticule.load_plugin("my_lab")


@pytest.mark.parametrize(
    ("line", "named", "left"),
    [
        ("train digits_quick --plugin a.py b.py --seed 1", "a.py b.py", "train digits_quick --seed 1"),
        ("train --plugin a.py b.py digits_quick", "a.py b.py", "train digits_quick"),
        ("train --plugin a.py b.py recipe.py", "a.py b.py", "train recipe.py"),
        ("check --plugin=a.py mine.py --json", "a.py", "check mine.py --json"),
        ("models --plugin a.py b.py --plugin c.py", "a.py b.py c.py", "models"),
        ("evaluate run --plugin a.py other", "a.py", "evaluate run other"),
    ],
)
def test_several_plugins_follow_one_option(monkeypatch, line, named, left):
    loaded = []
    monkeypatch.setattr(plugins, "load_plugin", loaded.append)
    monkeypatch.setattr(plugins, "_named", [])
    assert plugins.load_named_plugins(line.split()) == left.split()
    assert loaded == plugins.named_plugins() == named.split()


def test_several_plugins_of_a_model_are_imported_and_stand_in_its_card(monkeypatch, tmp_path):
    loaded = []
    monkeypatch.setattr(plugins, "load_plugin", loaded.append)
    folder = graticule.create_model("vit_nano_patch4_28").save_pretrained(tmp_path / "published")
    graticule.from_pretrained(folder, plugin=["a.py", Path("b.py")])
    graticule.load(folder, plugin=("c.py",))
    assert loaded == ["a.py", Path("b.py"), "c.py"]
    config = json.loads((folder / "config.json").read_text())
    config["graticule"]["plugins"] = {"a.py": "0", "b.py": "1"}
    card = model_card("mine", config, 1, Card())
    assert 'from_pretrained("OWNER/NAME", plugin=["a.py", "b.py"])' in card
    assert '    graticule.load_plugin("a.py")\n    graticule.load_plugin("b.py")\n' in card
