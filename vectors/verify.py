"""Check position code against recorded vectors, with NumPy alone.

    python verify.py                    the formulas of this file against every vector
    python verify.py mine.safetensors   your outputs, under the names of the vectors, against them; for one that
                                        differs, the conventions that it follows instead are searched for

Copy this file with the vectors into a port in any language: write your outputs as safetensors, from the recorded
inputs. Every convention is one function below, with its formula; `vectors.json` names its source.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
#: Largest difference by the dtype in which the source computes.
TOLERANCE = {"float64": 1e-9, "float32": 2e-6}
#: The names of safetensors' types.
TYPES = {"F64": np.float64, "F32": np.float32, "I64": np.int64}

Array = np.ndarray[Any, Any]
#: Name of a convention -> its function: parameters and inputs -> outputs by name.
CONVENTIONS: dict[str, Callable[..., dict[str, Array]]] = {}


def convention(function: Callable[..., dict[str, Array]]) -> Callable[..., dict[str, Array]]:
    """Register a convention under the name of its function."""
    CONVENTIONS[function.__name__] = function
    return function


def read(file: Path) -> dict[str, Array]:
    """Read a safetensors file: the length of a JSON header (8 bytes), the header, and the bytes of the tensors."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise ValueError(f"{file} is not a safetensors file: its header has {length} bytes, the file {len(data)}.")
    found = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = (8 + length + at for at in entry["data_offsets"])
            found[name] = np.frombuffer(data[start:end], TYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


# -- coordinates and order of tokens


def places(grid: tuple[int, int]) -> Array:
    """Return (row, column) of each patch, (N, 2), rows first: token n is at (n // W, n % W)."""
    height, width = grid
    return np.stack([np.repeat(np.arange(height), width), np.tile(np.arange(width), height)], -1).astype(np.float64)


def merged_order(grid: tuple[int, int], merge: int) -> Array:
    """Return the row-major numbers of tokens in the order of blocks of merge x merge, (N,)."""
    height, width = grid
    index = np.arange(height * width).reshape(height // merge, merge, width // merge, merge)
    return index.transpose(0, 2, 1, 3).reshape(-1)


# -- rotary encodings: angles (N, d / 2), and the channels that form a pair


def powers(base: float, count: int) -> Array:
    """Return base^(-k / count) for k < count."""
    return base ** -(np.arange(count) / count)


def rotate(q: Array, angles: Array, layout: str) -> Array:
    """Rotate pairs of channels of q (N, d): 'interleaved' (2 k, 2 k + 1), 'half' (k, k + d / 2).

    With 'half per axis', each half of the channels has pairs (k, k + d / 4) of its own.
    """
    if layout == "half per axis":
        middle = q.shape[-1] // 2
        parts = zip((q[:, :middle], q[:, middle:]), np.split(angles, 2, -1), strict=True)
        return np.concatenate([rotate(part, angle, "half") for part, angle in parts], -1)
    half = q.shape[-1] // 2
    first, second = (q[:, 0::2], q[:, 1::2]) if layout == "interleaved" else (q[:, :half], q[:, half:])
    sine, cosine = np.sin(angles), np.cos(angles)
    pair = first * cosine - second * sine, first * sine + second * cosine
    return np.stack(pair, -1).reshape(q.shape) if layout == "interleaved" else np.concatenate(pair, -1)


def axial(places: Array, frequencies: Array, order: str = "yx") -> Array:
    """Return the angles of the rows, then those of the columns; with order 'xy' columns are first, (N, 2 n)."""
    y, x = places[:, :1] * frequencies, places[:, 1:] * frequencies
    return np.concatenate([y, x] if order == "yx" else [x, y], -1)


@convention
def rope(q: Array, base: float, layout: str) -> dict[str, Array]:
    """theta_{p, k} = p T^(-2 k / d), p the index of the token."""
    angles = np.arange(len(q))[:, None] * powers(base, q.shape[-1] // 2)
    return {"rotated": rotate(q, angles, layout)}


@convention
def rope_axial(
    q: Array, grid: tuple[int, int], base: float, order: str, layout: str, offset: float = 0.0, merge: int = 1
) -> dict[str, Array]:
    """theta = (y + o) T^(-4 k / d) for k < d / 4, then the same with x; tokens by rows, or by blocks of merge^2."""
    at = places(grid)[merged_order(grid, merge)] + offset
    return {"rotated": rotate(q, axial(at, powers(base, q.shape[-1] // 4), order), layout)}


@convention
def rope_eva02(
    q: Array,
    grid: tuple[int, int],
    base: float,
    reference: tuple[int, int],
    order: str = "yx",
    layout: str = "interleaved",
) -> dict[str, Array]:
    """theta = (y R_y / H) T^(-4 k / d), then x; R is the grid of pretraining, so angles span the same range."""
    at = places(grid) * np.array(reference) / np.array(grid)
    return {"rotated": rotate(q, axial(at, powers(base, q.shape[-1] // 4), order), layout)}


@convention
def rope_dinov3(
    q: Array, grid: tuple[int, int], base: float, order: str = "yx", layout: str = "half"
) -> dict[str, Array]:
    """theta = 2 pi c T^(-4 k / d) with c = 2 (i + 1 / 2) / n - 1 on each axis; rows first, pairs (k, k + d / 2)."""
    at = 2 * (places(grid) + 0.5) / np.array(grid) - 1
    return {"rotated": rotate(q, axial(2 * np.pi * at, powers(base, q.shape[-1] // 4), order), layout)}


@convention
def rope_pixtral(q: Array, grid: tuple[int, int], base: float, layout: str = "half") -> dict[str, Array]:
    """The frequencies T^(-2 k / d), k < d / 2, of one series: those of even k for rows, of odd k for columns."""
    series, at = powers(base, q.shape[-1] // 2), places(grid)
    angles = np.concatenate([at[:, :1] * series[0::2], at[:, 1:] * series[1::2]], -1)
    return {"rotated": rotate(q, angles, layout)}


@convention
def mrope(
    q: Array, positions: Array, base: float, sections: tuple[int, int, int], arrangement: str, layout: str = "half"
) -> dict[str, Array]:
    """theta_{p, k} = p_{a(k)} T^(-2 k / d), p = (t, y, x); a chunked: t, t, y, y, x; interleaved: t, y, x, t, ..."""
    count = q.shape[-1] // 2
    axis = np.repeat(np.arange(3), sections)
    if arrangement == "interleaved":
        k = np.arange(count)
        axis = np.where(k < 3 * np.array(sections)[k % 3], k % 3, 0)
    angles = positions[axis].T * powers(base, count)
    return {"rotated": rotate(q, angles, layout)}


# -- sinusoids


@convention
def sinusoid(length: int, dim: int, base: float) -> dict[str, Array]:
    """Channel 2 k is sin(p T^(-2 k / D)), channel 2 k + 1 its cosine."""
    angles = np.arange(length)[:, None] * powers(base, dim // 2)
    return {"table": np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, dim)}


@convention
def sinusoid_mae(grid: tuple[int, int], dim: int, base: float) -> dict[str, Array]:
    """(sin x w, cos x w, sin y w, cos y w), w = T^(-4 k / D): the column comes first."""
    y, x = (at[:, None] * powers(base, dim // 4) for at in places(grid).T)
    return {"table": np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], -1)}


@convention
def sinusoid_detr(grid: tuple[int, int], dim: int, base: float) -> dict[str, Array]:
    """2 pi (i + 1) / (n + 1e-6) on each axis; channels (sin, cos) alternate; the row comes first."""
    at = 2 * np.pi * (places(grid) + 1) / (np.array(grid) + 1e-6)
    y, x = (side[:, None] * powers(base, dim // 4) for side in at.T)
    halves = [np.stack([np.sin(each), np.cos(each)], -1).reshape(len(at), -1) for each in (y, x)]
    return {"table": np.concatenate(halves, -1)}


# -- relative positions


def displacements(grid: tuple[int, int]) -> Array:
    """Return (dy, dx) = place of the query - place of the key, (N, N, 2)."""
    at = places(grid).astype(np.int64)
    return at[:, None] - at[None]


@convention
def index_swin(grid: tuple[int, int]) -> dict[str, Array]:
    """(dy + H - 1) (2 W - 1) + dx + W - 1, with displacements of query minus key."""
    height, width = grid
    dy, dx = np.moveaxis(displacements(grid), -1, 0)
    return {"index": (dy + height - 1) * (2 * width - 1) + dx + width - 1}


@convention
def index_beit(grid: tuple[int, int]) -> dict[str, Array]:
    """Swin's index among patches, and 3 rows more: class token to patches, patches to it, and to itself."""
    inner = index_swin(grid)["index"]
    count = (2 * grid[0] - 1) * (2 * grid[1] - 1)
    index = np.full((len(inner) + 1, len(inner) + 1), count + 2)
    index[0, 1:], index[1:, 0], index[1:, 1:] = count, count + 1, inner
    return {"index": index}


@convention
def buckets_t5(length: int, buckets: int, farthest: int, bidirectional: bool) -> dict[str, Array]:
    """Exact distances first, then logarithmic ones; the sign of key minus query takes half of the buckets."""
    relative = np.arange(length)[None] - np.arange(length)[:, None]
    if bidirectional:
        buckets //= 2
        first, distance = (relative > 0) * buckets, np.abs(relative)
    else:
        first, distance = np.zeros_like(relative), np.maximum(-relative, 0)
    exact = buckets // 2
    share = np.log(np.maximum(distance, 1) / exact) / math.log(farthest / exact)
    far = np.minimum(exact + (share * (buckets - exact)).astype(np.int64), buckets - 1)
    return {"index": first + np.where(distance < exact, distance, far)}


@convention
def log_coordinates_swin_v2(grid: tuple[int, int]) -> dict[str, Array]:
    """sign(c) log2(1 + |c|) / 3 with c = 8 d / (n - 1) for each displacement d from -(n - 1) to n - 1 of an axis."""
    sides = [8 * np.arange(-(n - 1), n) / (n - 1) for n in grid]
    c = np.stack(np.meshgrid(*sides, indexing="ij"), -1)
    return {"table": np.sign(c) * np.log2(1 + np.abs(c)) / 3}


@convention
def slopes_alibi(heads: int) -> dict[str, Array]:
    """2^(-8 i / n) for i from 1 to n, n a power of two; more heads take those of 2 n with odd i."""
    most = 2 ** math.floor(math.log2(heads))
    slopes = 2 ** (-8 * np.arange(1, most + 1) / most)
    more = 2 ** (-8 * np.arange(1, 2 * most + 1, 2) / (2 * most))
    return {"slopes": np.concatenate([slopes, more[: heads - most]])}


# -- resampling of a table (H, W, C): a matrix per axis


def kernel(name: str, x: Array, a: float) -> Array:
    """Return the weight at distance x: a triangle, Keys' cubic with parameter a."""
    x = np.abs(x)
    if name == "linear":
        return np.maximum(1 - x, 0)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def matrix(
    source: int,
    target: int,
    name: str,
    a: float,
    antialias: bool,
    corners: bool,
    border: str,
    step: float | None,
    offsets: int | None,
) -> Array:
    """Return the weights of an axis, (target, source).

    name: 'linear' or 'cubic' with parameter a.
    antialias: whether the kernel is stretched by the ratio of the lengths when the axis becomes shorter.
    corners: whether the first and the last samples stay where they are; otherwise pixels are areas.
    border: 'repeat' the last sample beyond the border, or 'renormalize' the weights of the samples inside.
    step: distance of output samples in input samples; source / target if None.
    offsets: how many offsets between two samples are told apart, as in TensorFlow's cubic kernel; None is exact.
    """
    step = source / target if step is None else step
    if corners:
        center = np.arange(target) * ((source - 1) / max(target - 1, 1))
    else:
        center = (np.arange(target) + 0.5) * step - 0.5
    if offsets is not None:
        center = np.floor(center) + np.floor((center - np.floor(center)) * offsets + 0.5) / offsets
    stretch = max(step, 1.0) if antialias else 1.0
    reach = math.ceil(2 * stretch) + 1
    index = np.floor(center)[:, None].astype(np.int64) + np.arange(-reach, reach + 1)
    weight = kernel(name, (index - center[:, None]) / stretch, a)
    inside = (index >= 0) & (index < source)
    if border == "renormalize":
        weight = np.where(inside, weight, 0)
        weight = weight / weight.sum(-1, keepdims=True)
    found = np.zeros((target, source))
    np.add.at(found, (np.arange(target)[:, None], index.clip(0, source - 1)), weight)
    return found


@convention
def resample(
    table: Array,
    size: tuple[int, int],
    kernel: str,
    a: float = -0.75,
    antialias: bool = False,
    corners: bool = False,
    border: str = "repeat",
    steps: tuple[float, float] | None = None,
    offsets: int | None = None,
) -> dict[str, Array]:
    """Resample a table (H, W, C) by one matrix for rows and one for columns."""
    rows, columns = (
        matrix(source, target, kernel, a, antialias, corners, border, None if steps is None else steps[axis], offsets)
        for axis, (source, target) in enumerate(zip(table.shape[:2], size, strict=True))
    )
    return {"resampled": np.einsum("hH,wW,HWc->hwc", rows, columns, table.astype(np.float64))}


# -- comparison


def vectors() -> Iterator[tuple[str, Mapping[str, Any], dict[str, Array], dict[str, Array]]]:
    """Yield the name, the description, the inputs and the outputs of every vector."""
    described = json.loads((HERE / "vectors.json").read_text(encoding="utf-8"))
    tensors = read(HERE / "vectors.safetensors")
    for name, about in described["vectors"].items():
        inputs = {key: tensors[at] for key, at in about["inputs"].items()}
        yield name, about, inputs, {key: tensors[f"{name}.{key}"] for key in about["outputs"]}


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
    defaults = inspect.signature(CONVENTIONS[about["convention"]]).parameters
    given = {name: one.default for name, one in defaults.items() if one.default is not one.empty} | about["parameters"]
    changes: dict[str, list[Any]] = {
        "layout": ["interleaved", "half", "half per axis"],
        "order": ["yx", "xy"],
        "offset": [0.0, 0.5, 1.0],
        "base": [100.0, 10_000.0, 500_000.0, 1_000_000.0],
        "merge": [1, 2],
        "arrangement": ["chunked", "interleaved"],
        "bidirectional": [True, False],
        "kernel": ["linear", "cubic"],
        "a": [-0.5, -0.75],
        "antialias": [True, False],
        "corners": [True, False],
        "border": ["repeat", "renormalize"],
        "steps": [None],
    }
    tolerance = TOLERANCE[about["dtype"]]
    for name, values in changes.items():
        for value in values:
            if name in given and given[name] != value:
                changed = {**about, "parameters": {**given, name: value}}
                try:
                    other = compute(changed, inputs)[key]
                except ValueError:  # blocks that do not divide the grid
                    continue
                if difference(found, other) <= tolerance:
                    causes.append(f"{name} {value!r} instead of {given[name]!r}")
    expected = compute(about, inputs)[key]
    grid = about["parameters"].get("grid")
    if grid is not None and len(expected) == grid[0] * grid[1]:
        columns = expected.reshape(*grid, -1).swapaxes(0, 1).reshape(expected.shape)
        if difference(found, columns) <= tolerance:
            causes.append("tokens by columns instead of by rows")
    if "grid" in about["parameters"] and "order" not in about["parameters"]:
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
                why = f"; it follows: {' or '.join(causes)}" if causes else ""
                failures.append(f"{name}.{key}: differs by {off:.3g}{shapes}{why}")
    return compared, failures


def main(arguments: list[str] | None = None) -> int:
    """Print the comparison; the exit status is 1 if an output differs or none was compared."""
    arguments = sys.argv[1:] if arguments is None else arguments
    own = read(Path(arguments[0])) if arguments else None
    known = {f"{name}.{key}" for name, _, _, outputs in vectors() for key in outputs}
    for name in sorted(set(own or {}) - known):
        print(f"{name}: no vector has this name")
    compared, failures = compare(own)
    print(*failures, sep="\n", end="\n" if failures else "")
    print(f"{compared - len(failures)} of {compared} outputs equal the vectors ({len(known)} are known)")
    return int(bool(failures) or not compared)


if __name__ == "__main__":
    sys.exit(main())
