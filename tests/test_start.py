"""Importing the package and listing commands or recipes do not import PyTorch, so they are fast."""

import contextlib
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

import graticule
from forked import forked
from graticule.lab.cli import main


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)


#: Exit code -> command lines that must not import PyTorch.
LIGHT = {
    0: [
        *("--help", "--version", "train --help", "audit --help", "models --help", "analyze correlations --help"),
        *("new --help-all", "runs FOLDER", "train digits_quick --help", "train camvid_pvt --help", "compare --help"),
        *("adapt --help", "evaluate --help"),
    ],
    1: ["trian", "train digts", "analyze correlation", "runs nowhere", "compare digts --choices lr=1 lr=2"],
    2: [
        *("", "audit --imags FOLDER", "check", "train digits_quick --epoch 3", "compare digits_quick --epoch 3"),
        *("compare digits_quick --choices encodin=rope", "evaluate FOLDER --coun 3", "adapt FOLDER --epoch 3"),
    ],
}


def test_importing_the_package_and_printing_help_imports_no_pytorch(tmp_path, monkeypatch):
    metric = {"key": "top1", "label": "top-1", "unit": "%", "highest": True}
    (tmp_path / "recipe.json").write_text(json.dumps({"recipe": {"epochs": 2}, "metric": metric}))
    (tmp_path / "metrics.csv").write_text("epoch,val_top1\n1,50\n")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    calls = [
        ([str(tmp_path) if word == "FOLDER" else word for word in line.split()], code)
        for code, lines in LIGHT.items()
        for line in lines
    ]
    heavy = "{'torch', 'timm', 'lightning_fabric', 'numpy', 'scipy', 'pandas', 'matplotlib'} & sys.modules.keys()"
    done = run(
        f"import sys, graticule\ngraticule.__version__\nprint({heavy})\nfrom commands import code_of\n"
        f"print([[words for words, code in {calls} if code_of(words) != code], {heavy}])"
    )
    assert done.stdout.startswith("set()\n"), done.stdout  # before, nothing is printed
    assert done.stdout.endswith("\n[[], set()]\n"), done.stdout + done.stderr


def test_a_model_is_opened_by_the_first_call_of_a_process_and_by_commands_without_fabric(tmp_path):
    graticule.create_model("vit_nano_patch4_28", depth=1).save_pretrained(tmp_path / "published")
    opened = f"import graticule\nprint(type(graticule.from_pretrained({str(tmp_path / 'published')!r})).__name__)\n"
    commands = "from graticule.lab.commands import analyze, check, identify, predict\n"
    done = run(f"{opened}{commands}import sys\nprint('lightning_fabric' in sys.modules)")
    assert done.stdout.split() == ["VisionTransformer", "False"], done.stderr


#: Runs in a process in which the packages of the lab cannot be imported.
ALONE = """
import importlib, pkgutil, sys, tempfile
from importlib.machinery import PathFinder


class Library(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in LAB else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Library

import timm, torch
import graticule
from graticule import analysis, testing

for name in graticule.__all__:
    try:
        getattr(graticule, name)
    except ModuleNotFoundError as error:  # of names of the lab
        assert error.name in LAB and '-e ".[lab]"' in error.__notes__[0], name
for module in pkgutil.walk_packages(graticule.__path__, "graticule."):
    if not module.name.startswith("graticule.lab") and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in [name for name in sys.modules if name.startswith("graticule.lab")]:
    del sys.modules[name]

model, images = graticule.create_model("vit_nano_patch4_28", joining="lape"), torch.randn(8, 1, 28, 28)
graticule.resize(graticule.unfold(graticule.fold(model)), 28)
graticule.create_segmenter("vit_nano_patch4_28", 3)
analysis.position_correlations(model), analysis.attention_maps(model, images)
analysis.translation_error(model, images), analysis.audit(model, {(28, 28): images}, timed=False)
analysis.bias_maps(graticule.create_model("vit_nano_patch4_28", encoding="relative_bias"))
analysis.mixing_maps(graticule.create_model("gmlp_ti16_224", num_blocks=1))
testing.check_encoding("peg", compiled=False, without_effect=["fill"])
host = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=(32, 48))
testing.check_model(host, skip=["export"])
for host in (host, timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1), img_size=56)):
    graticule.to_timm(ours := graticule.convert(host))
    with tempfile.TemporaryDirectory() as folder:
        ours.save_pretrained(folder)
        graticule.from_pretrained(folder)
graticule.attach(timm.create_model("vit_tiny_patch16_224", depth=2), "peg", remove=())
tops = {name.partition(".")[0] for name in sys.modules}
print([name for name in sys.modules if name.startswith("graticule.lab")], LAB & tops)
"""


def outside_the_library() -> set[str]:
    """Return the modules of all installed packages but those that the library needs, directly or indirectly."""
    needed, left = set(), ["graticule"]
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name not in needed:
            needed.add(name)
            with contextlib.suppress(PackageNotFoundError):
                left += [re.match(r"[\w.-]+", text)[0] for text in requires(name) or () if "extra ==" not in text]
    modules = packages_distributions().items()
    known = {module for module, names in modules if {re.sub(r"[-_.]+", "-", name).lower() for name in names} & needed}
    return {module for module, _ in modules} - known - sys.stdlib_module_names


@pytest.mark.slow
def test_the_library_runs_without_the_packages_of_the_lab():
    lab = outside_the_library()
    assert {"lightning_fabric", "matplotlib"} <= lab and not {"torch", "timm", "jinja2"} & lab
    done = run(f"LAB = {lab}\n{ALONE}")
    assert (done.returncode, done.stdout) == (0, "[] set()\n"), done.stderr


def test_a_command_says_what_to_install(monkeypatch, capsys, tmp_path):
    import_module("graticule.lab.pages")
    rooms = ("graticule.lab.pages.", "graticule.lab.commands.demo")  # imported by other tests
    for name in [name for name in sys.modules if name.startswith(rooms)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(vars(sys.modules["graticule.lab.pages"]), "run_page", raising=False)  # set by other tests
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["demo", "--quick", "--output", str(tmp_path / "demo")]) == 1
    errors = capsys.readouterr().err
    assert 'pip install -e ".[lab]"' in errors and errors.count("\n") == 1


def test_every_public_name_is_there_and_listed():
    assert set(graticule.__all__) <= set(dir(graticule))
    assert all(getattr(graticule, name) is not None for name in graticule.__all__)
    root = Path(graticule.__file__).parent
    for stub in root.rglob("__init__.pyi"):  # each name of each room
        room = import_module(".".join(("graticule", *stub.parent.relative_to(root).parts)))
        assert all(getattr(room, name) is not None for name in room.__all__), room
    with pytest.raises(AttributeError, match="No graticule attribute creat_model"):
        graticule.creat_model  # noqa: B018


@pytest.mark.parametrize(
    ("variables", "count"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)]
)
def test_waiting_threads_spin_briefly_unless_the_user_chose_otherwise(monkeypatch, variables, count):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["trian"]) == 1 and os.environ.get("GOMP_SPINCOUNT") == count


def test_nothing_of_fabrics_own_is_on_the_screen(tmp_path, capfd):
    command = ["train", "digits_quick", "--quick", "--joining", "lape(layers=99)", "--output", str(tmp_path / "run")]
    process = forked(lambda: sys.exit(main(command)))
    process.join(600)
    out, err = capfd.readouterr()
    assert (process.exitcode, out) == (1, "")
    assert err == "graticule: error: `layers` must be from 1 to the depth of the model, 6, got 99.\n"
