"""Check that what is in this folder and in dist/ could be published as a release; `make release` builds dist/ before.

Prints every problem, not only the first; the exit status is 1 if there is one.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

TOP = Path(__file__).parents[1]
#: The day of a release in CHANGELOG.md before it is known; then all else is checked.
UNRELEASED = "unreleased"
#: Files that a source distribution must have beside the package: all that its tests and its documentation need.
SOURCES = (
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "Makefile",
    "lowest.txt",
)


def version_problems(top: Path) -> list[str]:
    """Compare the version of the project with the changelog, the citation and the tags of git."""
    version = tomllib.loads((top / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    heading = re.search(r"^## (.*)$", (top / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    said = heading[1] if heading else "no heading"
    citation = (top / "CITATION.cff").read_text(encoding="utf-8")
    dated = re.search(r"^date-released: (.*)$", citation, flags=re.MULTILINE)
    day = dated[1] if dated else UNRELEASED
    found = []
    if not re.fullmatch(rf"{re.escape(version)} \((\d{{4}}-\d\d-\d\d|{UNRELEASED})\)", said):
        found.append(
            f"CHANGELOG.md must begin with '## {version} (YEAR-MONTH-DAY)', or ({UNRELEASED}), got '## {said}'."
        )
    if f"\nversion: {version}\n" not in citation:
        found.append(f"CITATION.cff must have 'version: {version}'.")
    if not said.endswith(f" ({day})"):
        found.append(f"CITATION.cff must have the day of CHANGELOG.md as 'date-released: YEAR-MONTH-DAY', got {day}.")
    git = ["git", "-C", str(top)]
    if subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout:
        found.append("all changes must be committed (git status).")
    if subprocess.run([*git, "tag", "--list", f"v{version}"], capture_output=True, text=True, check=True).stdout:
        found.append(f"the tag v{version} must not exist: raise the version in pyproject.toml.")
    return found


def wheel_problems(path: Path, project: dict[str, object], package: Path) -> list[str]:
    """Compare the files and the metadata of a wheel with the package and pyproject.toml."""
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        said = Parser().parsestr(wheel.read(metadata).decode("utf-8"))
    skipped = ("__pycache__", ".pyc")
    wanted = {
        f"graticule/{file.relative_to(package).as_posix()}"
        for file in package.rglob("*")
        if file.is_file() and not any(part in str(file) for part in skipped)
    }
    found = [f"{path.name} must have {name}." for name in sorted(wanted - names)]
    strange = sorted(name for name in names - wanted if ".dist-info/" not in name)
    found += [f"{path.name} must not have {name}." for name in strange]
    for key, value in (
        ("Name", project["name"]),
        ("Version", project["version"]),
        ("License-Expression", project["license"]),
    ):
        if said[key] != value:
            found.append(f"{path.name}: {key} must be {value}, got {said[key]}.")
    if set(said.get_all("Provides-Extra", [])) != set(project["optional-dependencies"]):
        found.append(f"{path.name} must have the extras of pyproject.toml.")
    return found


def source_problems(path: Path) -> list[str]:
    """Return the files that a source distribution lacks."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [
        *SOURCES,
        "src/graticule/py.typed",
        "tests/conftest.py",
        "docs/conf.py",
        "evidence/names.py",
        "vectors/verify.py",
    ]
    return [f"{path.name} must have {name}." for name in wanted if name not in names]


def checksums(folder: Path) -> str:
    """Return lines of SHA-256 and name of the artifacts, as `sha256sum --check` reads them."""
    files = sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)


def main() -> int:
    """Check version and artifacts, write dist/SHA256SUMS, and print what is missing."""
    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dist = TOP / "dist"
    stem = f"{project['name']}-{project['version']}"
    wheel, source = dist / f"{stem}-py3-none-any.whl", dist / f"{stem}.tar.gz"
    found = version_problems(TOP)
    missing = [file for file in (wheel, source) if not file.is_file()]
    found += [f"{file.relative_to(TOP)} must exist: make dist." for file in missing]
    if not missing:
        found += wheel_problems(wheel, project, TOP / "src" / "graticule") + source_problems(source)
        (dist / "SHA256SUMS").write_text(checksums(dist), encoding="utf-8")
    for problem in found:
        print(f"release: {problem}", file=sys.stderr)
    if not found:
        undated = (
            UNRELEASED in (TOP / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n## ")[2].partition("\n")[0]
        )
        rest = "but for its day in CHANGELOG.md and CITATION.cff" * undated
        print(f"release: {stem} is ready {rest}; CONTRIBUTING.md says how it is signed, tagged and published")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
