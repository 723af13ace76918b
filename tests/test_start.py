"""Importing the package and asking for help must not import PyTorch: they have to answer at once."""

import os
import subprocess
import sys

import pytest

import graticule


def run(code: str, **given: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process with only those of OpenMP's variables that are given."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=inherited | given,
    )


HEAVY = "print(sorted({'torch', 'timm', 'lightning', 'torchvision', 'numpy'} & sys.modules.keys()))"


def test_importing_the_package_imports_no_pytorch():
    done = run(f"import sys, graticule; graticule.__version__; {HEAVY}")
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--help"], 0), (["--version"], 0), ([], 2), (["trian"], 1), (["pack", "--help"], 0), (["compare", "--help"], 0)],
)
def test_a_command_that_only_prints_imports_no_pytorch(arguments, code):
    done = run(
        "import sys\nfrom graticule.cli import main\n"
        f"try:\n    code = main({arguments})\nexcept SystemExit as exit:\n    code = exit.code or 0\n"
        f"{HEAVY}; print(code)"
    )
    assert done.stdout.splitlines()[-2:] == ["[]", str(code)], done.stderr


def test_every_public_name_is_there_and_listed():
    assert set(graticule.__all__) <= set(dir(graticule))
    assert all(getattr(graticule, name) is not None for name in graticule.__all__)
    with pytest.raises(AttributeError, match="no attribute 'creat_model'"):
        graticule.creat_model  # noqa: B018


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_waiting_threads_spin_briefly_unless_the_user_chose_otherwise(given, found):
    done = run(
        "import os; from graticule.cli import main; main(['trian']); print(os.environ.get('GOMP_SPINCOUNT'))",
        PATH="",
        **given,
    )
    assert done.stdout.strip() == found, done.stderr


def test_nothing_of_lightnings_own_is_on_the_screen(tmp_path):
    command = ["train", "digits_quick", "--quick", "--joining", "lape(layers=99)", "--output", str(tmp_path / "run")]
    done = run(f"from graticule.cli import main; raise SystemExit(main({command}))")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "graticule: error: `layers` must be from 1 to the depth of the model, 6, got 99.\n"
