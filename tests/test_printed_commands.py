"""Every shell command of README and docs is run, as printed or small, or says beside it what it costs or needs.

`make test` parses the options of all of them; `make test-slow` runs them, page by page in one folder, as a reader would
in a clone.
"""

import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
from PIL import Image
from safetensors.torch import save_file

import graticule
from graticule.backbones import registry
from graticule.lab.cli import main
from graticule.lab.commands import options
from text_commands import write_text

TOP = Path(__file__).parents[1]
_COMMAND = r"(?:graticule|python|pip|make|git|torchrun|srun|pytest) \S"
#: What a page says beside a command that is long, or that no test runs.
MARK = re.compile(r"minute|second|hour|costs?\b|not run|needs?\b|how long|download", re.IGNORECASE)
#: Commands that no test of this file runs, and why.
NOT_RUN = {
    r"(pip|git|make|python -m (venv|pip|sigstore|twine|build|pytest)|pytest) ": "installs, publishes, tests",
    r"python (-m evidence|evidence/upstream|benchmarks|tests|vectors)\b": "a program, which has its own tests",
    r"(torchrun|srun) ": "several machines",
    r"python train\.py ": "timm's script, which its package does not have",
    r".* imagenet/val ": "data",
    r".* (--data-root |data_root=)(IMAGENET|COCO|ADE|CIFAR100?|FASHION_MNIST)\b": "data",
    r".* --(real|push|devices)\b": "labels of ImageNet, the hub, devices",
}
#: Commands that train.
TRAINS = re.compile(r"graticule (train|compare|adapt|demo)\b")
#: Subcommand -> options that make it small.
SMALL = {
    "adapt": "--quick",
    "audit": "--count 5 --batch-size 5",
    "check": "--skip export",
    "check city_block.py": "",
    "check my_encoding.py": "",
    "compare": "--quick",
    "explore": "--no-open",
    "train": "--quick",
}
#: Options of commands that are small without more.
IS_SMALL = {"--help", "--help-all", "--list", "--resume", "--skip", "--count", "--quick"}
#: Words of the pages -> the files, folders and small values that stand for them.
STANDS = {
    "--data-root FOLDER": "--data-root IMAGES",
    "--model FOLDER": "--model ./FOLDER2",
    "--images 0 5 --sizes 224 288": "--images 0 5 --sizes 28 36",
    "--sizes 160 192 224 288": "--sizes 20 28",
    "--sizes 160 192 288 --mode canvas": "--sizes 20 24 32 --mode canvas",
    "--sizes 160 224 384 448 512": "--sizes 20 28 36",
    "--sizes 224 384": "--sizes 28 36",
    "--sizes 336 448x672": "--sizes 20 20x40",
    "--layers 1 2 --heads 1 2": "--layers 0 1 --heads 1 2",
    "--window 512 --stride 341": "--window 96 --stride 60",
    "identify FILE.py:NAME": "identify rotation.py:code",
    "...": "",
    "DETECTOR_RUN": "./DETECTOR_RUN",
    "FILE": "FILE.safetensors",
    "FILE.py:NAME": "vit.py:build",
    "FOLDER": "./FOLDER",
    "FOLDER2": "./FOLDER2",
    "IMAGE...": "photo.jpg",
    "MODEL": "vit_nano_patch4_28",
    "NAME": "rope",
    "OTHER_RUN": "./OTHER_RUN",
    "RECIPE": "digits_quick",
    "hf:facebook/dinov2-small": "./FOLDER2",
    "hf:facebook/dinov2-with-registers-small": "./FOLDER2",
    "--on local:4": "",
    "weights.pth": "FILE.safetensors",
}


def printed(path):
    """Return (command, text around it, whether it has a line of its own) for each command of a page, in order."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    commands = re.finditer(rf"^    (?P<line>{_COMMAND}.*)$|`(?P<inline>{_COMMAND}[^`]*)`", text, flags=re.MULTILINE)
    return [
        (" ".join((match[1] or match[2]).split()), text[max(0, match.start() - 500) : match.end() + 500], match[1])
        for match in commands
    ]


PAGES = {
    path.relative_to(TOP).with_suffix("").as_posix(): commands
    for path in (TOP / "README.md", TOP / "CONTRIBUTING.md", *sorted((TOP / "docs").rglob("*.md")))
    if not {"_build", "gallery", "api", "commands"} & set(path.parts) and (commands := printed(path))
}
ALL = [(page, *command) for page, commands in PAGES.items() for command in commands]


def is_run(command):
    return not any(re.match(pattern, command) for pattern in NOT_RUN)


def small(command, run="./RUN", new="runs/new"):
    """Return the arguments of a printed command with few steps; `run` stands for RUN, `new` where it writes."""
    text = re.sub(r"(--output|publish \S+) (?:RUN|FOLDER)\b", rf"\1 {new}", f" {command} ")
    for word, stand in sorted({**STANDS, "RUN": run}.items(), key=lambda pair: -len(pair[0])):
        text = re.sub(rf"(?<=\s){re.escape(word)}(?=\s)", stand, text)
    words = shlex.split(text, comments=True)[1:]
    if len(words) == 1 + (words[0] == "analyze") and not words[0].startswith("-"):
        return [*words, "--help"]  # the name of a command
    if words[0] in ("train", "adapt") and not {"--output", "--resume", "--help", "--help-all"} & set(words):
        words += ["--output", new]
    if "city_block" in command and "--plugin" not in words and words[0] == "train":
        words += ["--plugin", "city_block.py"]  # in CONTRIBUTING.md it is a file of the library
    if IS_SMALL & set(words):
        return words
    kind = f"{words[0]} {words[1].partition('/')[0]}"
    return [*words, *SMALL.get(kind, SMALL.get(words[0], "")).split()]


def test_a_long_command_or_one_that_is_not_run_has_its_cost_or_need_beside_it():
    silent = [
        (page, command)
        for page, command, around, alone in ALL
        if alone and (TRAINS.match(command) or not is_run(command)) and not MARK.search(around)
    ]
    assert silent == []


def test_a_run_that_a_command_reads_was_written_above_it_on_the_page():
    missing, runs = [], re.compile(r"(?:--output |publish \S+ )?(?:\./)?((?:runs|published)/[\w-]+)")
    for page, commands in PAGES.items():
        written = set()
        for command, _, alone in commands:
            written |= {match[1] for match in runs.finditer(command) if match[0].startswith(("--", "publish"))}
            missing += [(page, name) for name in runs.findall(command) if alone and name not in written]
    assert missing == []


def test_most_commands_are_run():
    lines = [command for _, command, _, alone in ALL if alone]
    assert len(lines) > 100 and sum(map(is_run, lines)) > 0.7 * len(lines)


def test_every_command_has_valid_options(capsys, monkeypatch, tmp_path):
    """The commands stop when their options have been read; those that need a file which is not here stop before."""

    class Parsed(BaseException):
        pass

    def read(*arguments, **defaults):
        read_changes(*arguments, **defaults)
        raise Parsed

    read_changes = options.read_changes
    monkeypatch.setattr(options, "read_changes", read)
    (tmp_path / "docs").mkdir()
    for name in ("docs/my_methods.py", "FILE.py", "city_block.py"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    commands = sorted({command for _, command, _, _ in ALL if command.startswith("graticule ")})
    wrong, read = [], 0
    for command in commands:
        try:
            code = main(small(command))
        except Parsed:
            read += 1
        except SystemExit as exit:  # after --help
            read += exit.code == 0
        else:
            errors = capsys.readouterr().err
            if code and not re.search(r"does not exist|got '(slant_digits|fourier_digits)'", errors):
                wrong.append((command, errors))
    assert not wrong and read > 0.7 * len(commands), (wrong, read, len(commands))


# The stand-ins


def tiny(create):
    """Return a function that creates a small model instead of a large one, never with published weights."""

    def create_tiny(name, pretrained=False, **kwargs):
        small = {"depth": 1, "embed_dim": 48, "num_heads": 2, "num_classes": 2} if "patch16_224" in name else {}
        small = {**small, "img_size": 56, "depth": 2, "embed_dim": 48, "num_heads": 2} if "dinov2" in name else small
        return create(name, **{**small, **kwargs})

    return create_tiny


def image(seed, values=256):
    """Return an image of random pixels below `values`."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, values, (40, 56, 3), np.uint8))


def block(page, word):
    """Return the Python block of a page that starts with "```python WORD"."""
    text = (TOP / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return re.search(rf"^```python {word}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]


@pytest.fixture(scope="module")
def clone(tmp_path_factory, lape_run, forgotten):
    """Make a folder with everything that the pages name, in which the commands of all pages are run in turn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("clone"))
        patch.setattr(timm, "create_model", tiny(timm.create_model))
        patch.setattr(registry, "create_model", tiny(registry.create_model))
        for name in ("docs", "evidence"):
            shutil.copytree(TOP / name, name, ignore=shutil.ignore_patterns("figures", "_*"))
        for name in ("RUN", "OTHER_RUN", "RUNS/a"):
            shutil.copytree(lape_run.folder, name)
        labels = []
        for number in range(20):
            file = Path("FOLDER") / ("cat", "dog")[number % 2] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            image(number).save(file)
            labels.append(f"{file.relative_to('FOLDER')},{number % 2}\n")
        Path("labels.csv").write_text("".join(labels))
        for split in ("train", "val"):
            shutil.copytree("FOLDER", Path("IMAGES", split))
        for name in ("photo.jpg", "street.png"):
            image(0).save(name)
        for split in ("train", "val"):
            for kind in ("images", "annotations"):
                Path("CAMVID", kind, split).mkdir(parents=True)
            for number in range(8):
                image(number).save(f"CAMVID/images/{split}/{number}.jpg")
                image(number, 11).convert("L").save(f"CAMVID/annotations/{split}/{number}.png")
        Path("CAMVID/classes.txt").write_text("\n".join("abcdefghijk"))
        write_text(Path("FILE.txt"))
        graticule.convert(timm.create_model("vit_small_patch14_dinov2")).save_pretrained("FOLDER2")
        save_file(registry.create_model("deit_tiny_patch16_224").state_dict(), "FILE.safetensors")
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3, "depth": 1}
        graticule.save_pretrained(graticule.create_segmenter("vit_tiny_patch16_224", 3, **sizes), "DETECTOR_RUN")
        Path("city_block.py").write_text(block("extending", "own"))
        Path("vit.py").write_text(
            "import timm\n\n\ndef build():\n    return timm.create_model('vit_tiny_patch16_224')\n"
        )
        Path("rotation.py").write_text(
            "from graticule.testing import RotationCode\n\ncode = RotationCode.of('rope', 16)\n"
        )
        exec(block("audit", "audit"), {})
        assert main(["new", "dataset", "halves"]) == 0
        shutil.copy("halves.py", "FILE.py")
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("clone", "quick_figures")
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page, capsys):
    run, failed = "./RUN", {}
    for number, (command, _, _) in enumerate(PAGES[page]):
        if not is_run(command):
            continue
        new, before = f"runs/{page}-{number}", {"runs", *os.listdir()}
        arguments = small(command, "./RUN" if command.startswith("graticule explore") else run, new)
        if "RUN RUN" in command:  # two runs
            arguments[arguments.index(run) + 1] = shutil.copytree(run, f"{run}-2", dirs_exist_ok=True)
        try:
            code = main(arguments)
        except SystemExit as exit:  # after --help
            code = exit.code
        errors = capsys.readouterr().err
        if code:
            failed[command] = f"{code}: {shlex.join(arguments)}: {errors[-1000:]}"
        elif arguments[0] != "new" and (left := [name for name in {*os.listdir()} - before if name not in command]):
            failed[command] = f"leaves {left} in the folder where one stands"
        elif arguments[0] in ("train", "adapt") and "--output" in arguments:
            run = f"./{arguments[arguments.index('--output') + 1]}"  # RUN in the next commands of the page
    assert failed == {}
    if page == "docs/start":
        exec(block("start", "start"), {})
        assert "(6, 7, 7)" in capsys.readouterr().out
