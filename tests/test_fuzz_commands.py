"""Commands with any options and files: they end with a result or one line; no traceback, no hang, nothing lost."""

import contextlib
import functools
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from commands import command_options
from fuzz import fuzzed
from graticule.lab.arguments import options_of
from graticule.lab.cli import COMMANDS, main

pytestmark = [pytest.mark.usefixtures("quick_figures"), pytest.mark.slow]

SHORT = "--limit-train 20 --limit-test 10 --batch-size 10 --epochs 1 --warmup-epochs 0 --accelerator cpu"
TINY = "--model-kwargs depth=1 embed_dim=12 num_heads=3"
IMAGES = f"digits_quick {SHORT} {TINY}"
SCENES = "--quick --patch-size 16 --model-kwargs depth=1 embed_dim=24 num_heads=3"
#: Name of a run -> its options.
RUNS = {
    "image": IMAGES,
    "mixer": f"digits_gmlp {SHORT} --model-kwargs num_blocks=1",
    "text": "pydoc_quick --model lm_nano --quick --context 32 --accelerator cpu",
}
#: Command -> its targets and options that keep it quick, one of each to choose from.
CALLS = {
    "train": [IMAGES, "--resume ./image", f"scenes_segmentation {SCENES}"],
    "adapt": ["./published --dataset digits --encoding factorized --img-size 28 28 --stages position --quick"],
    "models": ["", "deit*"],
    "new": ["encoding Mine --output mine", "task Other --output mine"],
    "runs": [".", "./image ./text", "./image --json"],
    "evaluate": ["./image", "./published --images ./images", "./text", "./image --sizes 20"],
    "predict": ["./image ./images/val/0/0.png"],
    "analyze": [
        *("correlations ./image", "correlations ./published", "mixing ./mixer"),
        *("translation ./image --count 2", "translation ./published --images ./images --count 2"),
        *("attention ./image --layers 0", "attention ./published --layers 0 --images ./images"),
    ],
    "explore": ["./image --no-open"],
    "identify": ["rotation.py:code", "rotation.py:code --json"],
    "check": ["./published", "vit_nano_patch4_28 --img-size 28"],
    "export": ["./image --output image.pt2"],
    "publish": ["./image again"],
    "resize": ["./image 56 --output resized"],
    "debias": ["./image --images ./images --output clean"],
    "compare": [f"{IMAGES.split()[0]} --list --choices joining=default joining=lape"],
}
#: Options that let a command work for long, start processes, or import files.
LONG = {
    *("epochs", "devices", "nodes", "workers", "plugin", "on", "seeds", "steps", "untrained", "compile"),
    "accelerator",
}
WORDS = ["nan", "inf", "1e300", "9" * 400, "-1", "0", "1", "2", "0.5", "1e-300", "18446744073709551616", "16777216"]
TEXTS = [
    *("", " ", "a\nb", "\x1b[31m", "image", "images", "nothing", "learnable", "lape", "digits", "x=1", "1x1", "1/2")
]
VALUES = st.one_of(st.sampled_from(WORDS), st.sampled_from(TEXTS), st.text("0123456789.-+e,x=()[]'", max_size=8))


@functools.cache
def options(command: str) -> list[tuple[str, bool]]:
    """Return the options of a command and whether they take values."""
    return [
        (f"--{option.name}", bool(option.word))
        for option in options_of(command_options(command))
        if not option.positional and option.name not in LONG
    ] or [("--output", True)]


@st.composite
def lines(draw) -> list[str]:
    """Draw the words of a command line: a call with up to two further options and any values."""
    command = draw(st.sampled_from([*sorted(CALLS), *["train"] * 12]))
    words = draw(st.sampled_from(CALLS[command])).split()
    for _ in range(draw(st.integers(0, 2))):
        option, valued = draw(st.sampled_from(options(command)))
        words += [option, *draw(st.lists(VALUES, min_size=int(valued), max_size=2 * valued))]
    if draw(st.integers(0, 9)) == 0:
        words.insert(draw(st.integers(0, len(words))), draw(st.sampled_from(TEXTS)))
    return [command, *words]


def call(arguments: list[str]) -> int:
    """Run a command, which must print no traceback; returns its exit code."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
    assert "Traceback" not in printed.getvalue(), printed.getvalue()[-1000:]
    assert code == 0 or "graticule: error:" in printed.getvalue() or arguments[0] == "check", printed.getvalue()[-1000:]
    return code


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with runs, a published model and a folder of images."""
    root = tmp_path_factory.mktemp("place")
    for command in CALLS:
        options(command)  # imports, which may draw random numbers, before inputs are drawn
    for index, name in enumerate(f"{split}/{label}/0" for split in ("train", "val") for label in range(10)):
        (root / "images" / name).parent.mkdir(parents=True)
        values = np.roll(np.arange(1024, dtype=np.uint8), index).reshape(32, 32)
        Image.fromarray(values).save(root / "images" / f"{name}.png")
    (root / "rotation.py").write_text(
        "from graticule.testing import RotationCode\n\ncode = RotationCode.of('rope', 16)\n"
    )
    with contextlib.chdir(root):
        for name, given in RUNS.items():
            assert call(["train", *given.split(), "--output", name]) == 0
        assert call(["publish", "./image", "published"]) == 0
    return root


@pytest.fixture
def here(place, monkeypatch, tmp_path_factory):
    """Work in a copy of the folder, several folders deep, since values name the folders above."""
    copied = tmp_path_factory.mktemp("here") / "deep" / "down"
    shutil.copytree(place, copied)
    monkeypatch.chdir(copied)
    return copied


@contextlib.contextmanager
def restored(place: Path, here: Path) -> Iterator[None]:
    """Restore the folder after the block."""
    try:
        yield
    finally:
        shutil.rmtree(here)
        shutil.copytree(place, here)
        os.chdir(here)


@fuzzed(40, arguments=lines())
def test_any_options_give_a_result_or_one_line(place, here, arguments):
    with restored(place, here):
        assert call(arguments) in (0, 1, 2)


@pytest.mark.slow
def test_every_call_that_is_changed_works_unchanged(place, here):
    for line in [f"{command} {words}" for command, several in CALLS.items() for words in several]:
        with restored(place, here):
            assert call(line.split()) == 0 or line.startswith("check"), line


def test_every_command_is_called():
    assert set(COMMANDS) - set(CALLS) == {"audit", "demo"}  # these take seconds
