"""Check position code against recorded vectors, with NumPy alone.

    python verify.py                    the formulas of this file against every vector
    python verify.py mine.safetensors   your outputs, under the names of the vectors, against them; for one that
                                        differs, the conventions that it follows instead are searched for

A port in any language writes its outputs as safetensors, computed from the recorded inputs. Every convention is one
function of formulas.py, with its formula; `vectors.json` names parameters, inputs and source of each vector.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
if __package__:
    from .formulas import CONVENTIONS, LETTERS, Array
else:  # run as a file
    sys.path.insert(0, str(HERE))
    from formulas import CONVENTIONS, LETTERS, Array

#: Largest difference by the dtype in which the source computes.
TOLERANCE = {"float64": 1e-9, "float32": 2e-6}
#: The names of safetensors' types.
TYPES = {"F64": np.float64, "F32": np.float32, "I64": np.int64}
#: Parameter -> the values that ports confuse, each tried where a convention has the parameter.
CHANGES: dict[str, list[Any]] = {
    "layout": ["interleaved", "half", "half per axis", "tiled", "tiled per axis", "crossed"],
    "arrangement": ["blocks", "alternating"],
    "series": ["axis", "pair", "strided", "growing"],
    "unit": ["radians", "turns", "quarter turns"],
    "coordinates": ["patches", "centered", "floor centered", "scaled", "floored", "centers", "share"],
    "offset": [0.0, 0.5, 1.0],
    "base": [100.0, 256.0, 2_000.0, 10_000.0, 500_000.0, 1_000_000.0],
    "merge": [1, 2],
    **{key: [None] for key in ("split", "trained", "steps")},
    **{key: [True, False] for key in ("text_first", "bidirectional", "scaled", "antialias", "corners")},
    "still": ["last channels", "first channels", "last pairs"],
    "text_at": ["zero", "index", "last", "after", "before"],
    "after": ["side", "largest"],
    "step": [0.0, 1.0],
    "kernel": ["linear", "cubic"],
    "a": [-0.5, -0.75],
    "border": ["repeat", "renormalize"],
}


def read(file: Path) -> dict[str, Array]:
    """Read a safetensors file: the length of a JSON header (8 bytes), the header, and the bytes of the tensors.

    Raises:
        ValueError: for a file that is missing, no safetensors file, or of other types than F64, F32 and I64.
    """
    if not file.is_file():
        raise ValueError(f"`file` must be a safetensors file of your outputs, and there is none at {file}.")
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise ValueError(f"{file} is not a safetensors file: its header has {length} bytes, the file {len(data)}.")
    found = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            if entry["dtype"] not in TYPES:
                raise ValueError(f"{name} must have one of the types {', '.join(TYPES)}, got {entry['dtype']}.")
            start, end = (8 + length + at for at in entry["data_offsets"])
            found[name] = np.frombuffer(data[start:end], TYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


# -- comparison


def vectors() -> Iterator[tuple[str, Mapping[str, Any], dict[str, Array], dict[str, Array]]]:
    """Yield the name, the description, the inputs and the outputs of every vector."""
    described = json.loads((HERE / "vectors.json").read_text(encoding="utf-8"))
    tensors = read(HERE / "vectors.safetensors")
    for name, about in described["vectors"].items():
        inputs = {key: tensors[at] for key, at in about["inputs"].items()}
        yield name, about, inputs, {key: tensors[at] for key, at in about["outputs"].items()}


def inputs(name: str) -> dict[str, Array]:
    """Return the inputs of a vector."""
    known = {vector: given for vector, _, given, _ in vectors()}
    if name not in known:
        near = difflib.get_close_matches(name, known, 3)
        raise ValueError(f"`name` must be of a vector in vectors.json, got {name!r}; near it: {near}.")
    return known[name]


def compute(about: Mapping[str, Any], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Compute the outputs of a vector by the formula of its convention."""
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in about["parameters"].items()}
    return CONVENTIONS[about["convention"]](**inputs, **given)


def difference(found: Array, expected: Array) -> float:
    """Return the largest difference, infinite for other shapes or numbers that are not finite."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return math.inf
    return float(np.abs(found.astype(np.float64) - expected).max(initial=0.0))


def likely_causes(found: Array, about: Mapping[str, Any], inputs: Mapping[str, Array], key: str) -> list[str]:
    """Return the changes of a convention's parameters, or of the order of the outputs, that give `found`."""
    causes = []
    tolerance = TOLERANCE[about["dtype"]]
    conventions = [about["convention"]]
    if conventions == ["rotation"] and "positions" not in inputs:
        conventions.append("token_positions")
    defaults = [one for name in conventions for one in inspect.signature(CONVENTIONS[name]).parameters.values()]
    given = {one.name: one.default for one in defaults if one.default is not one.empty and one.name not in inputs}
    given |= about["parameters"]
    grid, expected = given.get("grid"), compute(about, inputs)[key]
    changes = dict(CHANGES)
    if "order" in given:
        letters = LETTERS[len(grid) if grid else len(inputs["positions"]) if "positions" in inputs else 1]
        given["order"] = given["order"] or letters
        changes["order"] = ["".join(order) for order in itertools.product(f"{letters}0", repeat=len(letters))]
    if isinstance(given.get("base"), list):
        changes["base"] = [*changes["base"], *given["base"]]
    for name, value in [(key, value) for key in sorted(given, key="order".__eq__) for value in changes.get(key, [])]:
        if given[name] != value:
            try:
                other = compute({**about, "parameters": {**given, name: value}}, inputs)[key]
            except (ValueError, IndexError):  # such as blocks that do not divide the grid
                continue
            if difference(found, other) <= tolerance < difference(expected, other):
                causes.append(f"{name} {value!r} instead of {given[name]!r}")
    sides = [side for side in grid or () if side > 1]
    if len(sides) == 2 and len(expected) == sides[0] * sides[1]:
        columns = expected.reshape(*sides, -1).swapaxes(0, 1).reshape(expected.shape)
        if difference(found, columns) <= tolerance:
            causes.append("tokens by columns instead of by rows")
    if grid is not None and "q" not in inputs:
        swapped = {**about, "parameters": {**about["parameters"], "grid": grid[::-1]}}
        if difference(found, compute(swapped, inputs)[key]) <= tolerance:
            causes.append("height and width are swapped")
    if expected.ndim > 1 and difference(found, np.swapaxes(expected, 0, 1)) <= tolerance:
        causes.append("the first two axes are swapped")
    if difference(found, expected[..., ::-1]) <= tolerance:
        causes.append("channels are in reverse order")
    return causes


def compare(own: Mapping[str, Array] | None = None) -> tuple[int, list[str]]:
    """Compare outputs with all vectors; those of this file by default. Returns the number compared and failures."""
    compared, failures = 0, []
    for name, about, inputs, outputs in vectors():
        computed = compute(about, inputs) if own is None else {}
        for key, expected in outputs.items():
            found = computed.get(key) if own is None else own.get(f"{name}.{key}")
            if found is None:
                continue
            compared += 1
            off = difference(found, expected)
            if off > TOLERANCE[about["dtype"]]:
                causes = likely_causes(found, about, inputs, key) if found.shape == expected.shape else []
                shapes = "" if found.shape == expected.shape else f" (shape {found.shape}, expected {expected.shape})"
                why = f"; it follows: {' or '.join(list(dict.fromkeys(causes))[:4])}" if causes else ""
                failures.append(f"{name}.{key}: differs by {off:.3g}{shapes}{why}")
    return compared, failures


def main(arguments: list[str] | None = None) -> int:
    """Print the comparison; the exit status is 1 if an output differs or none was compared, 2 for a wrong argument."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        print("usage: graticule-vectors [mine.safetensors]: at most one file of your outputs, without options")
        return 0 if arguments in (["-h"], ["--help"]) else 2
    try:
        own = read(Path(arguments[0])) if arguments else None
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    known = {f"{name}.{key}" for name, _, _, outputs in vectors() for key in outputs}
    for name in sorted(set(own or {}) - known):
        nearest = difflib.get_close_matches(name, known, 1)
        print(f"{name}: no vector has this name{f', the nearest is {nearest[0]}' if nearest else ''}")
    compared, failures = compare(own)
    print(*failures, sep="\n", end="\n" if failures else "")
    print(f"{compared - len(failures)} of {compared} outputs equal the vectors ({len(known)} are known)")
    return int(bool(failures) or not compared)


if __name__ == "__main__":
    sys.exit(main())
