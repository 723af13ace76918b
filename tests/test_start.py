"""Importing the package and printing help do not import PyTorch, so they are fast."""

import json
import os
import subprocess
import sys

import pytest

import graticule
from forked import forked
from graticule.lab.cli import COMMANDS, main


def run(code: str, **given: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process with only the given variables of OpenMP."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=inherited | given,
    )


HEAVY = "print(sorted({'torch', 'timm', 'lightning', 'torchvision', 'numpy', 'matplotlib'} & sys.modules.keys()))"


def test_importing_the_package_imports_no_pytorch():
    done = run(f"import sys, graticule; graticule.__version__; {HEAVY}")
    assert (done.stdout, done.stderr) == ("[]\n", "")


#: Exit code -> command lines.
LIGHT = {
    0: ["--help", "--version", "runs runs", "runs --help", "models", "models lm_*"]
    + [f"{name} --help" for name in COMMANDS]
    + ["train digits_quick --help", "train digits_sizes --quick --help-all", "help plot", "--completion bash"],
    1: ["trian", "runs nowhere", "runs --srot name", "plot a --metrik b", "train digts"]
    + [f"{name} ./nowhere" for name in ("attention", "correlations", "evaluate", "mixing", "plot", "translation")],
    2: ["", "train digits_quick --epochs many", "runs --sort size", "compare digits_quick --choises a"],
}


def test_commands_that_need_no_model_import_no_pytorch(tmp_path):
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    metric = {"key": "top1", "label": "top-1", "unit": "%", "highest": True, "decimals": 2}
    (folder / "recipe.json").write_text(json.dumps({"recipe": {"epochs": 2, "model": "vit"}, "metric": metric}))
    (folder / "metrics.csv").write_text("epoch,val_top1\n1,50\n")
    done = run(
        f"import os, sys\nfrom graticule.lab.cli import main\nos.chdir({str(tmp_path)!r})\n"
        f"for expected, lines in {LIGHT}.items():\n"
        "    for line in lines:\n"
        "        try:\n            code = main(line.split())\n"
        "        except SystemExit as exit:\n            code = exit.code or 0\n"
        "        heavy = {'torch', 'timm', 'lightning', 'torchvision', 'numpy', 'matplotlib'} & sys.modules.keys()\n"
        "        assert (code, heavy) == (expected, set()), (line, code, heavy)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "50.00 (1)" in done.stdout


ALONE = """
import sys, tempfile, timm, torch

LAB = {"lightning", "torchmetrics", "bokeh", "matplotlib", "pyarrow", "pycocotools", "tensorboard", "tyro", "shtab"}


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in LAB:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
import graticule, graticule.dense, graticule.testing
from graticule.analysis import attention_maps, bias_maps, position_correlations, translation_error

model = graticule.create_model("vit_nano_patch4_28", joining="lape")
graticule.resize(graticule.unfold(graticule.fold(model)), 36)
graticule.create_segmenter("vit_nano_patch4_28", 3)
host = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=(32, 48))
ours, images = graticule.convert(host), torch.randn(2, 3, 32, 48)
graticule.to_timm(ours)
position_correlations(ours), attention_maps(ours, images), translation_error(ours, images)
graticule.testing.check_model(host, skip=["export"])
graticule.attach(host, "peg", remove=())
with tempfile.TemporaryDirectory() as folder:
    ours.save_pretrained(folder)
    graticule.from_pretrained(folder)
print([name for name in sys.modules if name.startswith("graticule.lab")], LAB & sys.modules.keys())
"""


@pytest.mark.slow
def test_the_library_runs_without_the_packages_of_the_lab():
    done = run(ALONE)
    assert (done.returncode, done.stdout) == (0, "[] set()\n"), done.stderr


def test_a_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "graticule.lab.commands.pack", raising=False)
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["pack", "a", "b"]) == 1
    said = capsys.readouterr().err
    assert 'pip install "graticule[lab]"' in said and said.count("\n") == 1


def test_every_public_name_is_there_and_listed():
    assert set(graticule.__all__) <= set(dir(graticule))
    assert all(getattr(graticule, name) is not None for name in graticule.__all__)
    with pytest.raises(AttributeError, match="No graticule attribute creat_model"):
        graticule.creat_model  # noqa: B018


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_waiting_threads_spin_briefly_unless_the_user_chose_otherwise(given, found):
    done = run(
        "import os; from graticule.lab.cli import main; main(['trian']); print(os.environ.get('GOMP_SPINCOUNT'))",
        PATH="",
        **given,
    )
    assert done.stdout.strip() == found, done.stderr


def test_nothing_of_lightnings_own_is_on_the_screen(tmp_path, capfd):
    command = ["train", "digits_quick", "--quick", "--joining", "lape(layers=99)", "--output", str(tmp_path / "run")]
    process = forked(lambda: sys.exit(main(command)))
    process.join(60)
    out, err = capfd.readouterr()
    assert (process.exitcode, out) == (1, "")
    assert err == "graticule: error: `layers` must be from 1 to the depth of the model, 6, got 99.\n"
