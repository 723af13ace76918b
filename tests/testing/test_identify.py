"""Position code is named by the encoding of this library that equals it, or said not to equal any."""

import json
import math
import random
import re
from pathlib import Path
from typing import get_args

import pytest
import timm
import torch

import graticule
from commands import run_command
from evidence.position_codes import rotations
from graticule import Grid, build_position, identify
from graticule.encodings.forms.rotary import Layout
from graticule.registry.specs import Spec
from graticule.testing import BiasCode, RotationCode, TableCode


def code_of(encoding, dim=32, heads=1, shape="Grid(H, W)", built=(7, 9)):
    """Return position code with the values of an encoding, which is built for another grid than those of the laws."""

    def place(grid):
        return eval(shape, {"Grid": Grid, "H": grid[0], "W": grid[1]})

    position = build_position(place(built), dim=dim * heads, depth=1, num_heads=heads, encoding=encoding)
    position = position.double().eval()
    layer = position(place(built))[0]
    if layer.rotary is not None:
        return RotationCode(lambda x, grid: position(place(grid))[0].rotary(x, x)[0], dim, heads)
    if layer.bias is not None:
        return BiasCode(lambda grid: position(place(grid))[0].bias)
    return TableCode(lambda grid: position(place(grid))[0].added_to_stream, layer.added_to_stream, built)


def draw(seed):
    """Return a random dialect, the channels of a head and the number of heads."""
    rng = random.Random(seed)
    dim, heads = rng.choice([24, 32, 48]), rng.choice([1, 2])

    def number(low, high):
        return round(math.exp(rng.uniform(math.log(low), math.log(high))), rng.choice([0, 2])) or 1.0

    kind = rng.choice(["rope"] * 8 + ["mrope", "rope_1d", "rope_golden_gate", "rope_mixed"])
    origin = rng.choice(["centered", "separate", "min", "max", "corners", "area", "unit"])
    way, sides = rng.choice(["interpolation", "ntk", "yarn"]), tuple(rng.choices(range(5, 21), k=2))
    scaling = {"scaling": way, "reference": sides}
    if way == "yarn" and rng.random() < 0.5:
        scaling["ramp"] = (0.25, 1.0)
    offset = {"offset": rng.choice([1, -0.5, 0.25, 3.0])}
    relative = {"coordinates": origin} | (offset if origin in ("centered", "separate", "min", "max") else {})
    options = rng.choice([{}, offset, relative, scaling]) if kind in ("rope", "mrope") else {}
    if kind == "rope":
        waves = [{"turns": True, "base": number(10, 1000)}, {"periods": (number(0.5, 1), number(5, 50))}]
        waves += [{"pixels": number(8, 30)}, {"pixels": number(8, 30), "linear": True}]
        in_patches = options.get("coordinates", "centered") == "centered"
        options |= {"base": number(50, 100_000)} if in_patches else rng.choice(waves)
        options |= {"layout": rng.choice(get_args(Layout)[:4]), "order": rng.choice(["yx", "xy"])}
        if options["layout"] != "half_per_axis":
            split = tuple(rng.choices(range(2, dim // 4 + 1), k=2))
            options |= rng.choice([{}, {"split": split}, {"alternate": True}, {"arrangement": "interleaved"}])
    elif kind == "mrope":
        rows, columns = rng.choices(range(2, dim // 6 + 1), k=2)
        chunked = {"arrangement": "chunked", "sections": (dim // 2 - rows - columns, rows, columns)}
        options |= {"base": number(1000, 1_000_000)} | rng.choice([{}, chunked])
    elif kind == "rope_1d":
        options = {"base": number(100, 100_000), "layout": rng.choice(["interleaved", "half"])}
    elif kind == "rope_golden_gate":
        options = {"lowest": number(0.1, 1), "highest": number(5, 30), "zeros": rng.choice([0.0, 0.25])}
    return str(Spec(kind, options)), dim, heads


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 200))])
def test_random_dialects_are_named(seed):
    encoding, dim, heads = draw(seed)
    torch.manual_seed(seed)
    code = code_of(encoding, dim, heads)
    identity = identify(code)
    assert identity.encoding is not None, (encoding, identity)
    if "learned" not in "".join(identity.notes):  # the same at grids on which it was not certified
        other = code_of(identity.encoding, dim, heads, identity.grid, built=(12, 5))
        for grid in ((11, 19), (31, 2)):
            torch.testing.assert_close(other.at(grid), code.at(grid), atol=1e-4, rtol=0)


def rounded(queries, grid):
    """Rotate by positions that are rounded to multiples, as of a table for 256 rows."""
    y, x = (torch.arange(side) * 256 // side for side in grid)
    angles = torch.cartesian_prod(y, x) @ torch.eye(2).long()
    waves = angles[..., None] * 10_000.0 ** -(torch.arange(4) / 4)
    cos, sin = waves.flatten(1).cos(), waves.flatten(1).sin()
    first, second = queries.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rotate(queries, grid, base=10_000.0, offset=0.0, square_order="yx", dtype=torch.float64):
    """Rotate as Qwen2-VL does, or with one difference."""
    places = torch.cartesian_prod(*(torch.arange(side, dtype=dtype) + offset for side in grid))
    places = places.flip(-1) if square_order == "xy" and grid[0] == grid[1] else places
    count = queries.shape[-1] // 4
    angles = (places[..., None] * base ** -(torch.arange(count, dtype=dtype) / count)).flatten(1)
    first, second = queries.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).type_as(queries)


def in_place(queries, grid):
    return queries.copy_(rotate(queries.clone(), grid))


@pytest.mark.parametrize(
    ("code", "encoding"),
    [
        (lambda x, grid: rotate(x, grid, base=10_001), "rope(base=10001, layout='half')"),
        (lambda x, grid: rotate(x, grid, offset=1e-3), "rope(base=10000, layout='half', offset=0.001)"),
        (lambda x, grid: rotate(x, grid, dtype=torch.float32), "rope(base=10000, layout='half')"),
        (lambda x, grid: rotate(x, grid, base=(10_000, 500)[max(grid) > 40]), "at 70 x 90 patches it has other values"),
        (in_place, "rope(base=10000, layout='half')"),
        (lambda x, grid: rotate(x, grid, square_order="xy"), None),
        (lambda x, grid: rotate(x, grid, dtype=torch.bfloat16), None),
        (lambda x, grid: 1.00001 * rotate(x, grid), None),
        (lambda x, grid: torch.nn.functional.dropout(rotate(x, grid), 0.001), None),
        (lambda x, grid: rotate(x, grid).long(), None),
    ],
)
def test_near_misses_are_not_confused(code, encoding):
    identity = identify(code, channels=32)
    assert encoding in (identity.encoding, *identity.notes), identity


@pytest.mark.parametrize(
    ("code", "note"),
    [
        (lambda x, grid: torch.cat([x[..., :8], 2 * x[..., 8:]], -1), "no rotation: it changes lengths"),
        (lambda x, grid: x.norm(dim=-1, keepdim=True) * x, "depends on the input"),
        (lambda x, grid: x, "queries stay as they are"),
        (rounded, "as if quantized"),
    ],
)
def test_other_code_is_not_named(code, note):
    identity = identify(code, channels=16)
    assert identity.encoding is None and note in identity.notes[0], identity
    assert note == "as if quantized" or not any("frequenc" in other for other in identity.notes), identity


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (lambda x, grid: x[:, :, 1:], "must keep their shape"),
        (lambda x, grid: x / 0, "must be finite"),
        (lambda x, grid: x.nothing, "must be accepted, got AttributeError"),
        (lambda x, grid: (x, x), "must be a tensor, got tuple"),
        (torch.nn.Linear(2, 2), "must have a rotation of a known class, .* got Linear."),
        (lambda a, b, c: a, "got 3 arguments"),
        (3, "must be position code, a model or a function"),
    ],
)
def test_code_that_fails_is_refused(code, message):
    with pytest.raises(ValueError, match=message):
        identify(code)


@pytest.mark.parametrize(
    "encoding",
    [
        *(f"sinusoidal_2d(temperature=500, order={order!r})" for order in ("lape", "mae", "detr", "moco_v3", "timm")),
        "sinusoidal_1d(temperature=10000)",
        "sinusoidal_2d(temperature=10000, spread=0.02, order='mae')",
        "alibi(distance='euclidean')",
        "alibi(distance='manhattan', slopes=(0.5, 0.2, 0.1))",
        "sandwich",
    ],
)
def test_tables_and_biases_are_named(encoding):
    assert identify(code_of(encoding, heads=3)).encoding == encoding


WITH_PREFIX = "relative_bias(prefix_rows=True)"


@pytest.mark.parametrize(
    "encoding", ["bucketed_bias(buckets=32, max_distance=128)", "mirrored_bias", "relative_bias", WITH_PREFIX]
)
def test_a_learned_bias_is_named_with_its_index(encoding):
    torch.manual_seed(0)
    grid = Grid(4, 6, prefix=int(encoding == WITH_PREFIX))
    position = build_position(grid, dim=8, depth=1, num_heads=2, encoding=encoding).double().eval()
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    identity = identify(BiasCode(lambda _: position(grid)[0].bias, grid.prefix, grids=((4, 6),)))
    assert identity.encoding == encoding and "learned" in identity.notes[-1]


def test_command_prints_the_name(capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from graticule.testing import RotationCode\n"
        "def rotate(queries, grid):\n    return RotationCode.of(\"rope(preset='llama4')\", 16).rotate(queries, grid)\n"
    )
    code, out, _ = run_command(capsys, "identify", f"{file}:rotate", "--channels", 16)
    assert code == 0 and "same values  rope(base=10000, order='xy', offset=1)\n" in out
    assert "preset with the same values    rope(preset='llama4')" in out


@pytest.mark.parametrize(
    ("target", "message"),
    [("nothing.py:rotate", "`FILE` must be a Python file"), ("mine.py", "did you mean 'mine.py:NAME'?")],
)
def test_command_names_what_is_missing(capsys, tmp_path, monkeypatch, target, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    code, _, err = run_command(capsys, "identify", target)
    assert code and message in err


def test_models_are_named_by_their_rotation_or_table(tmp_path):
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "depth": 1, "num_heads": 2, "img_size": 32, "patch_size": 8, "num_classes": 0}
    model = graticule.create_model("vit_tiny_patch16_224", **sizes, encoding="rope(preset='dinov3')")
    assert identify(model).presets == ("rope(preset='dinov3')",)
    with pytest.raises(ValueError, match="got VisionTransformer with the table pos_embed instead"):
        identify(timm.create_model("vit_tiny_patch16_224", **sizes))


def test_the_example_of_the_page_is_printed(capsys):
    page = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
    block = re.search(r"^```python identify\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1]
    exec(block, {})
    assert capsys.readouterr().out.split("\n")[:2] == re.findall("  # (rope.*|\\(.rope.*)", block)


@pytest.mark.slow
def test_rotations_of_other_libraries_are_named_as_recorded():
    """CogView 4 rounds positions, ERNIE-Image does not rotate, and LTX turns pairs by several turns per patch."""
    rows = json.loads((Path(__file__).parents[2] / "docs" / "data" / "register.json").read_text())["rows"]
    builds = rotations()
    recorded = {row["name"]: row["spec"] for row in rows if row["kind"] == "rotation" and "spec" in row}
    assert {name: identify(builds[name]()).encoding for name in recorded} == recorded
    assert sum(map(bool, recorded.values())) >= 60


FREQUENCIES = 10_000.0 ** (-torch.arange(16, dtype=torch.float64) / 16)


@pytest.mark.parametrize(
    ("index", "factor", "error"), [(15, 1.001, 1.3e-5), (7, 1.01, 1.6e-2)], ids=["slowest", "one of the middle"]
)
def test_the_nearest_encoding_is_that_with_the_least_error_and_the_frequency_that_differs_is_named(
    index, factor, error
):
    changed = FREQUENCIES.clone()
    changed[index] *= factor

    def rotate(x, grid):
        angles = (Grid(*grid).coordinates().double()[..., None] * changed).flatten(1)  # (N, 32)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).flatten(-2)

    identity = identify(rotate)
    assert identity.encoding is None and identity.nearest == "rope(base=10000)"
    assert identity.difference == pytest.approx(error, rel=0.05)
    assert f"frequency {index} of 32 is {factor:g} times the frequency of the nearest" in identity.notes
    assert f"frequency {index + 16} of 32 is {factor:g} times the frequency of the nearest" in identity.notes
