"""Every benchmark explains itself, ends in seconds with --quick, and is named by pages only if it exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
BENCHMARKS = TOP / "benchmarks"
#: A module without a command, which the benchmarks import.
HELPER = "turns"
MOST = 8
COMMANDS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem != HELPER)


def run(*arguments, folder):
    """Run a benchmark in `folder` as its page prints it, on one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, BENCHMARKS / arguments[0], *arguments[1:]]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def state(folder):
    """Return the size and time of every file of `folder`."""
    files = (path for path in folder.rglob("*") if "_build" not in path.parts and path.is_file())
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def test_there_are_at_most_eight_benchmarks():
    assert len(list(BENCHMARKS.glob("*.py"))) <= MOST


def test_every_benchmark_that_is_named_exists_and_every_one_is_named():
    paths = [
        path
        for name in ("docs", "evidence", "src")
        for kind in ("*.md", "*.py", "*.csv")
        for path in (TOP / name).rglob(kind)
    ]
    paths += [*TOP.glob("*.md"), *BENCHMARKS.glob("*.py")]
    names = {}
    for path in paths:
        for name in re.findall(r"benchmarks/(\w+)\.py", path.read_text(encoding="utf-8")):
            names.setdefault(name, set()).add(path.parent)
    assert names.keys() <= {*COMMANDS, HELPER}
    assert [name for name in COMMANDS if not names.get(name, set()) - {BENCHMARKS}] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_printed_and_nothing_is_measured(name, tmp_path):
    done = run(f"{name}.py", "--help", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {name}.py") and "--quick" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_quick_ends_without_an_error_and_changes_no_page(name, tmp_path):
    before = state(TOP / "docs")
    done = run(f"{name}.py", "--quick", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert state(TOP / "docs") == before
