"""Faults of released libraries: each folder of evidence/upstream shows its own, and its patch takes it away."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UPSTREAM = Path(__file__).parents[1] / "evidence" / "upstream"
FOLDERS = sorted(path.parent for path in UPSTREAM.glob("*/reproducer.py"))
RUN = """
import os, pytest, runpy, sys
try:
    runpy.run_path("reproducer.py")
except SystemExit as fault:
    print(fault)
sys.stdout.flush()
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-c", os.devnull, "test_upstream.py"]))
"""


def patched_packages(patch, folder):
    """Link the packages that a patch changes into `folder`, with copies of the changed files, and apply it there."""
    for name in re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.MULTILINE):
        package, *parts = Path(name).parts
        source = Path(importlib.util.find_spec(package).origin).parent
        target = folder / package
        for part in parts:
            if target.is_symlink():
                target.unlink()
            if not target.exists():
                target.mkdir()
                for path in source.iterdir():
                    (target / path.name).symlink_to(path)
            source, target = source / part, target / part
        target.unlink()
        shutil.copy(source, target)
    subprocess.run(["git", "apply", patch], cwd=folder, check=True)


def run(folder, *packages):
    """Return the outputs of the reproducer, its fault or None, and the exit status of the test in upstream's style."""
    paths = [*map(str, packages), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", RUN]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    outputs = [line for line in result.stdout.splitlines() if line.startswith("released: ")]
    faults = [line for line in result.stdout.splitlines() if line.startswith("fault: ")]
    assert outputs, result.stdout + result.stderr
    return outputs, faults, result.returncode


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_patch_mends_the_fault_and_changes_nothing_else(folder, tmp_path):
    outputs, faults, status = run(folder)
    if not faults:
        pytest.fail(f"mended upstream: remove the folder {folder.name}")
    if (folder / "fix.patch").exists():
        assert status == pytest.ExitCode.TESTS_FAILED
        patched_packages(folder / "fix.patch", tmp_path)
        assert run(folder, tmp_path) == (outputs, [], pytest.ExitCode.OK)
    else:
        assert "weights were most likely trained with it" in (folder / "README.md").read_text().replace("\n", " ")


def changed_lines(patch):
    """Return FILE:LINE of each line of the release that a patch removes, or adds something after."""
    lines = set()
    for line in patch.read_text().splitlines():
        if match := re.match(r"\+\+\+ b/(\S+)", line):
            file = match[1]
        elif match := re.match(r"@@ -(\d+)", line):
            at = int(match[1]) - 1
        elif not line.startswith("---"):
            at += line[:1] in (" ", "-")
            if line[:1] in ("-", "+"):
                lines.add(f"{file}:{at}")
    return lines


def test_the_page_for_maintainers_has_each_folder_with_a_line_that_its_patch_changes():
    page = (UPSTREAM.parents[1] / "docs" / "conformance.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| .*?`(\S+\.py:\d+)` \|", page, re.MULTILINE))
    assert set(rows) == {folder.name for folder in FOLDERS}
    for folder in FOLDERS:
        if (patch := folder / "fix.patch").exists():
            assert any(line.endswith(rows[folder.name]) for line in changed_lines(patch)), folder.name


def test_folders_are_complete_and_reproducers_short():
    assert len(FOLDERS) >= 9
    for folder in FOLDERS:
        names = {path.name for path in folder.iterdir() if path.is_file()}
        assert names - {"fix.patch", "test_upstream.py"} == {"README.md", "reproducer.py"}
        assert ("fix.patch" in names) == ("test_upstream.py" in names)
        code = (folder / "reproducer.py").read_text()
        assert len(code.splitlines()) <= 25 and "graticule" not in code
