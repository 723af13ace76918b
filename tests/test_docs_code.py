"""The code of the pages in docs/ runs; pages with separate tests are listed here, slow ones run in `make docs`."""

import re
import shlex
from pathlib import Path

import pytest
import torch

import graticule
from graticule.lab.cli import main
from graticule.position.layer import LayerPosition
from graticule.testing.methods import check_encoding, check_joining

pytestmark = pytest.mark.usefixtures("registered_data", "quick_figures")

DOCS = Path(__file__).parents[1] / "docs"
#: Pages whose Python blocks run here, in order in one namespace.
RUN = ("audit", "backbones", "concepts", "convert", "encodings", "fine_tune", "start")
#: Pages of these that build large models and inspect no numbers.
SHAPES = ("backbones", "encodings")
#: Page -> the test that runs its blocks.
ELSEWHERE = {
    "deploy": "../docs/_ext/test_pages.py",
    "dense": "dense/test_models_docs.py",
    "extending": "lab/recipes/test_recipes.py",
}
#: The word after `python` at the start of a block -> the test that runs it.
NAMED = {
    "audit": "../docs/_ext/test_pages.py",
    "attach": "test_docs_code.py",
    "certificate": "surgery/test_fits.py",
    "continue": "test_docs_code.py",
    "crops": "position/test_crops.py",
    "features": "backbones/test_timm_interface.py",
    "identify": "testing/test_identify.py",
    "joining": "test_docs_code.py",
    "load": "external/test_guide.py",
    "own": "test_docs_code.py",
    "pack": "lab/data/test_hugging_face.py",
    "publish": "external/test_publish.py",
    "resize": "test_docs_code.py",
    "rotary": "test_docs_code.py",
    "shard": "position/test_meta_device.py",
    "serve": "../docs/_ext/test_pages.py",
    "start": "test_printed_commands.py",
    "table": "test_docs_code.py",
    "testing": "registry/test_plugins.py",
    "transformers": "test_docs_code.py",
    "vectors": "encodings/test_vectors.py",
}


def page(name):
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def blocks(text, word=""):
    """Return the Python blocks of a page whose first line is "```python WORD"."""
    return re.findall(rf"^```python{' ' + word if word else ''}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", RUN)
def test_the_code_of_a_page_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    code = blocks(page(name))
    assert code
    with torch.device("meta" if name in SHAPES else "cpu"):
        for block in code:
            small = block.replace("Halves(400", "Halves(50")  # in start.md, the images of the training
            exec(compile(small, f"{name}.md", "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "word"),
    [
        *(("convert", word) for word in ("attach", "rotary", "transformers")),
        *(("fine_tune", "transformers"), ("sizes", "resize")),
    ],
)
def test_the_code_for_models_of_others_runs(name, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for block in blocks(page(name), word):
        exec(compile(block, f"{name}.md", "exec"), names)
    assert "graticule" in names
    if word == "resize":
        assert names["logits"].shape == (1, 1000) and names["theirs"].patch_embed.img_size == (280, 280)


def test_every_block_of_python_is_run_by_a_test():
    tests = Path(__file__).parent
    for path in sorted(DOCS.glob("*.md")):
        for word in re.findall(r"^```python *(\S*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            if word:
                test = tests / NAMED.get(word, "")
                assert test.is_file() and re.search(rf'python {word}\b|"{word}"', test.read_text(encoding="utf-8")), (
                    f"{path.name}: no test runs `python {word}`"
                )
            elif path.stem not in RUN:
                assert path.stem in ELSEWHERE, f"{path.name}: no test runs its code"
                assert path.name in (tests / ELSEWHERE[path.stem]).read_text(encoding="utf-8"), path.name


def test_the_text_of_the_drawing_of_a_block_names_every_field_of_a_layer_position():
    (text,) = re.findall(r"!\[([^\]]*)\]\(figures/concepts/layer_position.svg\)", page("concepts"))
    assert set(LayerPosition._fields) <= set(re.findall(r"\w+", text))


def test_the_rule_about_position_has_the_numbers_of_the_pretrained_encoder():
    rule = page("audit").partition("## Is position a problem")[2].partition("\n## ")[0]
    numbers = set(re.findall(r"\d+\.\d+", rule))
    assert len(numbers) > 8 and numbers <= set(re.findall(r"\d+\.\d+", page("pretrained")))


def load_block(word, folder):
    """Load the block of extending.md that starts with `python word` as a plugin."""
    (code,) = blocks(page("extending"), word)
    (folder / "block.py").write_text(code, encoding="utf-8")
    graticule.load_plugin(folder / "block.py")


def test_the_encoding_of_the_guide_is_one_file(my_methods, tmp_path):
    load_block("own", tmp_path)
    model = graticule.create_model("vit_nano_patch4_28", encoding="city_block(slope=0.3)", depth=1)
    bias = model.position(model.grid)[0].bias
    assert bias[0, 1, 1] == 0 and torch.allclose(bias[0, 1, 9], torch.tensor(-0.6))  # one row and one column apart
    check_encoding("city_block", "lape(over='heads')", compiled=False)


def test_the_learned_table_of_the_guide_is_resampled(my_methods, tmp_path):
    load_block("table", tmp_path)
    check_encoding("uniform_table(limit=0.2)", "lape", compiled=False)
    source, larger = (
        graticule.create_model("vit_nano_patch4_28", encoding="uniform_table", depth=1, img_size=side)
        for side in (28, 36)
    )
    larger.load_state_dict(source.state_dict())
    expected = source.grid.resize(source.position(source.grid)[0].added_to_stream, larger.grid)
    torch.testing.assert_close(larger.position(larger.grid)[0].added_to_stream, expected)


def test_the_joining_of_the_guide_is_one_file(my_methods, tmp_path):
    load_block("joining", tmp_path)
    check_joining("gated(start=0.2)")
    model = graticule.create_model("vit_nano_patch4_28", encoding="learnable", joining="gated(layers=[0, 2])", depth=3)
    first, second, third = model.position(model.grid)
    assert second.added_to_stream is None and torch.equal(first.added_to_stream, third.added_to_stream)


def test_a_run_is_continued_as_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    quick = " --limit-train 100 --limit-test 50 --model-kwargs depth=1"
    commands = re.findall(r"^    (graticule train [^#\n]*runs/first[^#\n]*)", page("training"), re.MULTILINE)
    first, resume, second, *others = commands
    for command in (first, resume, second, *others):
        short = re.sub(r"--epochs \d+", "--epochs 1 --warmup-epochs 0", command.replace("--warmup-epochs 0 ", ""))
        short += quick if command == first else ""
        assert main(shlex.split(short)[1:]) == 0, (command, capsys.readouterr().err)
    assert main(["train", "--resume", "runs/first", "--epochs", "13"]) != 0
    assert "`epochs` would change" in capsys.readouterr().err
    (block,) = blocks(page("training"), "continue")
    exec(compile(block.replace("epochs=10", "epochs=1"), "training.md", "exec"), {})
    weights = [graticule.Run.open(f"runs/{name}").model().state_dict() for name in ("second", "third")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
