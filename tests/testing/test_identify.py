"""Position code is named by the encoding of this library that equals it, or said not to equal any."""

import math
import random
import re
from pathlib import Path

import pytest
import torch

from commands import run_command
from graticule import Grid, build_position, identify
from graticule.testing import BiasCode, RotationCode, TableCode


def code_of(encoding, dim=32, heads=1, shape="{0}, {1}", built=(7, 9)):
    """Return position code with the values of an encoding, which is built for another grid than those of the laws."""

    def place(grid):
        return eval(f"Grid({shape.format(*grid)})", {"Grid": Grid})

    position = (
        build_position(place(built), dim=dim * heads, depth=1, num_heads=heads, encoding=encoding).double().eval()
    )
    layer = position(place(built))[0]
    if layer.rotary is not None:
        return RotationCode(lambda x, grid: position(place(grid))[0].rotary(x, x)[0], dim, heads)
    if layer.bias is not None:
        return BiasCode(lambda grid: position(place(grid))[0].bias)
    return TableCode(lambda grid: position(place(grid))[0].added_to_stream, layer.added_to_stream, built)


def draw(seed):
    """Return a random dialect, its head dim and number of heads."""
    rng = random.Random(seed)
    dim = rng.choice([24, 32, 48])
    pairs = dim // 2

    def number(low, high):
        return round(math.exp(rng.uniform(math.log(low), math.log(high))), rng.choice([0, 2])) or 1.0

    def counts(total, parts):
        return tuple(rng.randint(2, total // parts) for _ in range(parts))

    kind = rng.choice(["rope"] * 8 + ["mrope", "rope_1d", "rope_golden_gate", "rope_mixed"])
    options = {}
    way = rng.choice(["plain", "plain", "relative", "offset", "interpolation", "ntk", "yarn"])
    if way == "relative":
        options["coordinates"] = rng.choice(["centered", "separate", "min", "max", "corners", "area", "unit"])
    if way == "offset" or (way == "relative" and options["coordinates"] in ("centered", "separate", "min", "max")):
        options["offset"] = rng.choice([1, -0.5, 0.25, 3.0])
    if way in ("interpolation", "ntk", "yarn"):
        options |= {"scaling": way, "reference": (rng.randint(5, 20), rng.randint(5, 20))}
        if way == "yarn" and rng.random() < 0.5:
            options["ramp"] = (0.25, 1.0)
    if kind == "rope":
        if way == "relative" and options["coordinates"] != "centered":
            frequencies = [{"turns": True, "base": number(10, 1000)}, {"periods": (number(0.5, 1), number(5, 50))}]
            frequencies += [{"pixels": number(8, 30)}, {"pixels": number(8, 30), "linear": True}]
            options |= rng.choice(frequencies)
        else:
            options["base"] = number(50, 100_000)
        options["layout"] = rng.choice(["interleaved", "half", "half_per_axis", "half_rotated"])
        options["order"] = rng.choice(["yx", "xy"])
        whole = options["layout"] == "half_per_axis"
        if not whole and rng.random() < 0.5:
            options["split"] = counts(pairs, 2)
        elif not whole and rng.random() < 0.5:
            options[rng.choice(["alternate", "turn"])] = True
            if options.pop("turn", False):
                options["arrangement"] = "interleaved"
    elif kind == "mrope":
        options = {} if way == "interpolation" else options
        sections = counts(pairs, 3)
        if rng.random() < 0.5:
            options |= {"arrangement": "chunked", "sections": (pairs - sum(sections[1:]), *sections[1:])}
        options["base"] = number(1000, 1_000_000)
        options = {k: v for k, v in options.items() if k not in ("coordinates",)}
    elif kind == "rope_1d":
        options = {"base": number(100, 100_000), "layout": rng.choice(["interleaved", "half"])}
    elif kind == "rope_golden_gate":
        options = {"lowest": number(0.1, 1), "highest": number(5, 30), "zeros": rng.choice([0.0, 0.25])}
    else:
        options = {}
    text = f"{kind}({', '.join(f'{name}={value!r}' for name, value in options.items())})"
    return text, dim, rng.choice([1, 2])


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 200))])
def test_random_dialects_are_named(seed):
    encoding, dim, heads = draw(seed)
    torch.manual_seed(seed)
    identity = identify(code_of(encoding, dim, heads))
    assert identity.encoding is not None, (encoding, identity)


def rounded(queries, grid):
    """Rotate by positions that are rounded to multiples, as of a table for 256 rows."""
    y, x = (torch.arange(side) * 256 // side for side in grid)
    angles = torch.cartesian_prod(y, x) @ torch.eye(2).long()
    waves = angles[..., None] * 10_000.0 ** -(torch.arange(4) / 4)
    cos, sin = waves.flatten(1).cos(), waves.flatten(1).sin()
    first, second = queries.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.parametrize(
    ("code", "note"),
    [
        (lambda x, grid: torch.cat([x[..., :8], 2 * x[..., 8:]], -1), "no rotation: it changes lengths"),
        (lambda x, grid: x.norm(dim=-1, keepdim=True) * x, "depends on the input"),
        (rounded, "as if quantized"),
    ],
)
def test_other_code_is_not_named(code, note):
    identity = identify(code, channels=16)
    assert identity.encoding is None and note in identity.notes[0], identity


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (lambda x, grid: x[:, :, 1:], "must keep their shape"),
        (lambda x, grid: x / 0, "must be finite"),
        (lambda x, grid: x.nothing, "must be accepted, got AttributeError"),
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
        "alibi(distance='axes', slopes=(0.5, 0.2, 0.1))",
        "sandwich",
    ],
)
def test_tables_and_biases_are_named(encoding):
    assert identify(code_of(encoding, heads=3)).encoding == encoding


@pytest.mark.parametrize("encoding", ["bucketed_bias(buckets=32, max_distance=128)", "mirrored_bias", "relative_bias"])
def test_a_learned_bias_is_named_with_its_index(encoding):
    torch.manual_seed(0)
    position = build_position(Grid(4, 6), dim=8, depth=1, num_heads=2, encoding=encoding).double().eval()
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    identity = identify(BiasCode(lambda grid: position(Grid(*grid))[0].bias, grids=((4, 6),)))
    assert identity.encoding == encoding and "learned" in identity.notes[-1]


def test_command_prints_the_name(capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from graticule.testing import RotationCode\n"
        "def rotate(queries, grid):\n    return RotationCode.of(\"rope(preset='llama4')\", 16).rotate(queries, grid)\n"
    )
    code, out, _ = run_command(capsys, "identify", f"{file}:rotate", "--channels", 16)
    assert code == 0 and out.startswith("rope(base=10000, order='xy', offset=1) on Grid(H, W)\nrope(preset='llama4')")


def test_the_example_of_the_page_is_printed(capsys):
    page = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
    block = re.search(r"^```python identify\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1]
    exec(block, {})
    assert capsys.readouterr().out.split("\n")[:2] == re.findall("  # (rope.*|\\(.rope.*)", block)
