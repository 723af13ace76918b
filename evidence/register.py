"""Hold the position code of the installed timm, transformers and diffusers to its laws, and name its encoding.

`python -m evidence.register` checks all classes, two at a time, and writes docs/data/register.json and the tables of
docs/conformance.md. `python -m evidence.register NAME ...` prints the findings of classes alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import graticule
from evidence.position_tables import build, codes
from evidence.records import between
from graticule.lab.terminal import bar
from graticule.system.files import write_text
from graticule.system.tables import markdown
from graticule.testing.tables import inspect_code

PAGE = Path(__file__).parents[1] / "docs" / "conformance.md"
DATA = PAGE.parent / "data" / "register.json"
LIBRARIES = ("timm", "transformers", "diffusers")
Row = dict[str, Any]


def versions() -> dict[str, str]:
    """Return the versions of PyTorch and of the libraries that are installed."""
    names = {}
    for library in ("torch", *LIBRARIES):
        with suppress(PackageNotFoundError):
            names[library] = version(library)
    return names


def row(name: str) -> Row:
    """Check a class, and return its kind, its encoding, the laws that it passes and fails, or why it is not built."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    checked: Row = {"name": name, "kind": codes()[name][0], "reproducer": f"python -m evidence.register {name!r}"}
    try:
        with torch.no_grad():
            code = build(name)
            findings = inspect_code(code)
    except Exception as error:  # any error of another library
        return {**checked, "reason": f"{type(error).__name__}: {error}".partition("\n")[0][:160]}
    checked["passed"] = [finding.check for finding in findings if finding.outcome == "passed"]
    checked["failed"] = {finding.check: finding.detail for finding in findings if finding.outcome == "failed"}
    with suppress(ValueError), torch.no_grad():
        identity = graticule.identify(getattr(code, "positions", code))
        checked |= {"spec": identity.encoding, "notes": list(identity.notes)}
        if identity.encoding:
            checked |= {"grid": identity.grid, "difference": f"{identity.difference:.0e}"}
    return checked


def record(processes: int) -> list[Row]:
    """Return a row for each class, by name."""
    names = sorted(codes())
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return [*bar(pool.map(row, names), total=len(names), desc="position code", unit="class")]


def tables(register: Mapping[str, Any]) -> dict[str, str]:
    """Return the generated parts of the page: counts, and the classes that fail a law."""
    groups: dict[tuple[str, str], list[Row]] = {}
    failures: dict[str, list[str]] = {}
    for entry in register["rows"]:
        library, _, name = entry["name"].partition(".")
        groups.setdefault((library, entry["kind"]), []).append(entry)
        if failed := entry.get("failed"):
            name, _, table = name.partition(" ")
            failures.setdefault(", ".join(failed) + (f" of {table}" if table else ""), []).append(f"`{name}`")
    counts = [["library", "kind", "checked", "pass all laws", "named", "not checked"]]
    for group, entries in sorted(groups.items()):
        checked = [entry for entry in entries if "failed" in entry]
        passed, named = sum(not entry["failed"] for entry in checked), sum(bool(entry.get("spec")) for entry in checked)
        counts.append([*group, *map(str, (len(checked), passed, named, len(entries) - len(checked)))])
    text = ", ".join(f"{name} {number}" for name, number in register["versions"].items())
    rows = [["fails", "class"], *([laws, ", ".join(names)] for laws, names in failures.items())]
    pages = (markdown(part) for part in (counts, rows))
    first, second = (page.replace("| ", "|").replace(" |", "|") for page in pages)
    return {"register": f"{register['date']}, with {text}:\n\n{first}", "failures": second}


def main(arguments: list[str] | None = None) -> None:
    """Check classes, or all of them, and write the register and its page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="classes to check alone; nothing is written")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    for name in set(options.names) - codes().keys():
        near = get_close_matches(name, codes(), 3)
        parser.error(f"`names` must be of classes in docs/data/register.json, got {name!r}; near it: {near}")
    if options.names:
        return print(json.dumps([row(name) for name in options.names], indent=1))
    date = datetime.now(tz=UTC).date().isoformat()
    register = {"date": date, "versions": versions(), "rows": record(options.processes)}
    write_text(DATA, json.dumps(register, indent=0, ensure_ascii=False) + "\n")
    text = PAGE.read_text(encoding="utf-8")
    for name, new in tables(register).items():
        text = between(text, name, new)
    write_text(PAGE, text)


if __name__ == "__main__":
    main()
