"""Wrong encodings, as users write them and as mutations of those of the package, fail the contract by name."""

import re

import pytest

import graticule
from commands import refused, run_command
from graticule.position.position import ENCODINGS
from graticule.registry import plugins
from graticule.testing.methods import BrokenLaws, check_encoding
from in_turn import in_turn

TEMPLATE = """
import torch
from torch import nn
import graticule


@graticule.register_encoding("mine")
class Mine(graticule.{base}):
    stored = {{}}

    def __init__(self, grid: graticule.Grid, {argument}: int) -> None:
        super().__init__({passed})
        {parameters}

    def {method}(self, grid):
        {body}
"""
BIAS = {
    "base": "PatchBias",
    "argument": "num_heads",
    "passed": "grid, num_heads",
    "method": "patch_bias",
    "parameters": "self.slope = nn.Parameter(torch.full((num_heads,), 0.1))",
    "body": """h, w = grid.shape
        i = torch.arange(h * w, device=self.slope.device)
        y, x = i // w, i % w
        d = ((y[:, None] - y).abs() + 2 * (x[:, None] - x).abs()).to(self.slope.dtype)
        return -self.slope[:, None, None] * d""",
}
SQUARE = BIAS["body"].replace("2 * ", "")
TABLE = {
    "base": "ComputedEncoding",
    "argument": "dim",
    "passed": "grid, dim",
    "method": "rows",
    "parameters": "self.lin = nn.Linear(2, dim)",
    "body": """h, w = grid.shape
        i = torch.arange(h * w, device=self.lin.weight.device)
        return self.lin(torch.stack([i // w, i % w], -1).to(self.lin.weight.dtype))""",
}


def bias(old: str = "", new: str = "", body: str = SQUARE, **parts: str) -> dict[str, str]:
    """Return a bias with a part of its body replaced."""
    assert old in body
    return {**BIAS, "body": body.replace(old, new), **parts}


def table(old: str = "", new: str = "", **parts: str) -> dict[str, str]:
    """Return a table with a part of its body replaced."""
    assert old in TABLE["body"]
    return {**TABLE, "body": TABLE["body"].replace(old, new), **parts}


ROTATION = {
    "base": "RotaryEncoding",
    "argument": "head_dim",
    "passed": "",
    "method": "rotations",
    "parameters": "self.angles = nn.Parameter(torch.zeros(head_dim // 2))",
    "body": "return grid.coordinates().float() @ self.angles[:2]",
}


def resampled(
    body: str = "rows_of(maps[None], (h, w), mode='bicubic')",
    file: str = "self.at_grids(table, old, self.grid)",
    more: str = "",
) -> dict[str, str]:
    """Return a learned table of (N, D) that is resampled by `body`."""
    return {
        "base": "AbsoluteEncoding",
        "argument": "dim",
        "passed": "grid, dim",
        "method": "at",
        "parameters": f"self.pos_embed = nn.Parameter(torch.zeros(1, grid.tokens, dim)){more}",
        "body": f"""return self.at_grids(self.pos_embed[0], self.grid, grid)

    resampled = True

    def fit(self, table, old):
        return {file}

    def at_grids(self, table, old, new):
        first, table, (h, w) = table[:1], table[1:], new.shape
        maps = table.T.unflatten(1, old.shape)
        rows, columns = torch.arange(h)[:, None], torch.arange(w)

        def rows_of(maps, shape, **options):
            return nn.functional.interpolate(maps, shape, **options)[0].flatten(1).T

        return torch.cat([first, {body}])""",
    }


#: What is done instead of resampling -> the rows of the patches.
RESAMPLED = {
    "truncated": "table.repeat(9, 1)[: h * w]",
    "clamped": "maps[:, rows.clamp(max=old.shape[0] - 1), columns.clamp(max=old.shape[1] - 1)].flatten(1).T",
    "transposed": "rows_of(maps[None], (w, h), mode='bicubic')",
    "shifted": "rows_of(maps[None], (h, w), mode='bicubic').roll(1, 0)",
}
#: Mistake -> the parts of the file, and what the failure says.
WRONG = {
    "pairs are flat": (bias("* d", "* d.flatten()[None]"), r"`patch_bias` of encoding 'mine' must return "
                       r"\(heads, H \* W, H \* W\) = \(3, 15, 15\), got \(3, 1, 225\)"),
    "none is returned": (bias("return ", ""), r"= \(3, 15, 15\), got NoneType"),
    "sides are exchanged": (bias("i // w, i % w", "i // h, i % h"), r"row_order: patches must be row by row .*"
                            "`bias` on 3 x 5 patches is the one of 5 x 3 patches; patch i is in row i // W"),
    "axes differ without a reason": ({**BIAS}, "permutation: permuting the axes must permute the position"),
    "a table of one grid": (
        bias(
            body="return self.slope",
            parameters="self.slope = nn.Parameter(torch.zeros(num_heads, *[grid.patches] * 2))",
        ),
        r"layers and 3 other laws: .* = \(3, 8, 8\), got \(3, 15, 15\)",
    ),
    "an unused parameter": (
        bias(parameters=BIAS["parameters"] + "; self.unused = nn.Parameter(torch.zeros(3))"),
        "gradients: a gradient must reach every parameter, not .*unused",
    ),
    "no constructor of the base": (
        bias(passed="")
        | {"parameters": "", "argument": "num_heads"}
        | {"passed": ") if False else setattr(self, 'slope', nn.Parameter(torch.zeros(num_heads))"},
        r"layers and \d+ other laws: AttributeError: cannot assign parameters before Module.__init__\(\) call, "
        r"in line 12 of mine\.py$",
    ),
    "an attribute that does not exist": (
        bias("grid.shape", "grid.size"),
        r"^layers and \d+ other laws: AttributeError: 'Grid' object has no attribute 'size', in line 16 of mine\.py$",
    ),
    "a constant on the CPU": (
        bias("* d", "* (d + torch.ones(len(i), 1))"),
        r"device: every tensor must be made on the device of the parameters: .*in line 20 of mine\.py",
    ),
    "float32 in any model": (
        table("self.lin.weight.dtype))", "self.lin.weight.dtype)).float()"),
        "^dtypes: `added_to_stream` must be torch.bfloat16, got torch.float32$",
    ),
    "a cache of the process": (
        bias("return -self", "return self.stored.setdefault((h, w), d[None].detach() * 0) - self"),
        "a model must be built on the meta device: Tensor on device meta",
    ),
    "values of the first instance": (
        bias("return -self.slope[:, None, None] * d", "return self.stored.setdefault((h, w), -self.slope.detach()"
             "[:, None, None] * d).to(d) + 0 * self.slope[:, None, None]"),
        "a gradient must reach every parameter|two models with other parameters must differ|must compute the same",
    ),
    "random numbers": (bias("* d", "* (d + torch.rand_like(d))"), "must compute the same"),
    "a ValueError by accident": (bias("grid.shape", "grid.shape + (1,)"), r"ValueError: too many values to unpack"),
    "a row too many": (table("dtype))", "dtype))[[0, *range(h * w)]]"), r"`rows` of encoding 'mine' must return "
                       r"\(H \* W, D\) = \(15, 24\), got \(16, 24\)"),
    "a channel too few": (table(parameters="self.lin = nn.Linear(2, dim - 1)"), r"= \(15, 24\), got \(15, 23\)"),
    "coordinates in float32": (table(".to(self.lin.weight.dtype)", ".float()"), r"must have the same dtype, "
                               r"but got Float and Double, in line 18 of mine\.py"),
    **{
        f"the grid that came first of {those}": (
            table("[i // w, i % w]", f"[i // w, i % w, {v}]", parameters="self.lin = nn.Linear(3, dim); self.old = {}"),
            rf"sizes: a grid of \({grid}\) must have the same position after other grids as in a model that is built",
        )
        for those, v, grid in (
            ("all", "(i >= 0) * self.old.setdefault('', h)", "4, 2"),
            ("those with as many patches", "(i >= 0) * self.old.setdefault(h * w, h)", "5, 3"),
        )
    },
    "rows divided by the width": (
        table("[i // w, i % w]", "[i // w / w, i % w / h]"),
        "^row_order: rows must depend on the height, and columns on the width .*`added_to_stream` has them exchanged$",
    ),
    "whole numbers": (
        bias("-self.slope[:, None, None] * d", "(-self.slope[:, None, None] * d).long()"),
        "layers: `bias` must be in floating point, got torch.int64",
    ),
    "a rotation that is a tensor": (
        ROTATION,
        r"layers and \d+ other laws: `rotations` of encoding 'mine' must return a list of one rotation, or one per "
        "layer, got Tensor",
    ),
    **{
        f"a table that is {way}": (
            resampled(body),
            r"resampling: a table must be resampled from 4 x 6 to 7 x 5 patches \(`resampling`\): entries of "
            r"`pos_embed` come from places up to (\d+\.\d|inf) entries off",
        )
        for way, body in RESAMPLED.items()
    },
    "a table of a file that is cut": (
        resampled(file="table[:1].expand(self.grid.tokens, -1)"),
        r"resampling: the table of a file, `pos_embed` on 4 x 6 patches, must fit 7 x 5 .* as it is resampled",
    ),
    "a table of a file that is left out": (resampled(file="None"), "resampling: .*, got None; define `fit`"),
    "a resampler that has no effect": (
        resampled(more="; self.resampler = graticule.position.resampling.build_resampler('area')"),
        "resampling: a table must be resampled from 4 x 6 to 7 x 5 patches by area",
    ),
}  # fmt: skip
NOT_COMPUTED = {"resampling", "points", "crop"}
#: What is right and passes -> the laws that do not apply to it.
RIGHT = {
    **{
        f"a table resampled by {mode}": (
            resampled(f"rows_of(maps[None], (h, w), mode='{mode}')"),
            {"points", "crop"},
        )
        for mode in ("nearest", "area", "bicubic")
    },
    "sides are unpacked": (bias(), NOT_COMPUTED),
    "offsets of the grid": (
        bias(body="d = grid.offsets(self.slope.device).abs().sum(-1).to(self.slope)\n"
             "        return -self.slope[:, None, None] * d"),
        {"resampling", "crop"},
    ),
    "a table of coordinates": (table(), NOT_COMPUTED),
}  # fmt: skip


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Return a function that checks the encoding of a file with these parts, and the file."""
    monkeypatch.setattr(plugins, "_registered", dict(plugins._registered))
    file = tmp_path / "mine.py"

    def check(parts: dict[str, str]) -> list:
        file.write_text(TEMPLATE.format(**parts))
        try:
            graticule.load_plugin(file)
            return check_encoding("mine", compiled=False)
        finally:
            ENCODINGS.data.pop("mine", None)

    return check


@in_turn("mistake", WRONG)
def test_each_mistake_of_a_user_fails_with_the_shape_or_the_line(check, mistake):
    parts, message = WRONG[mistake]
    with pytest.raises(BrokenLaws) as failure:
        check(parts)
    failed = [finding for finding in failure.value.findings if finding.outcome == "failed"]
    assert re.search(message, str(failure.value)), str(failure.value)
    assert len({finding.detail for finding in failed}) == len(failed)


@in_turn("code", RIGHT)
def test_right_code_passes_and_each_law_that_does_not_apply_says_why(check, code):
    parts, refusing = RIGHT[code]
    findings = check(parts)
    skipped = {finding.check: finding.detail for finding in findings if finding.outcome == "not applicable"}
    assert skipped.keys() - {"subsets"} == refusing
    assert {"permutation", "row_order", "device"} <= {law.check for law in findings if law.outcome == "passed"}
    assert skipped.pop("resampling", "no parameter is a table").startswith("no parameter is a table")
    assert all(re.match("refused: .*(`|to unpack .* in line 16 of mine.py)", reason) for reason in skipped.values())


def test_the_command_goes_on_after_an_error_of_the_users_code(tmp_path, capsys, forgotten):
    file = tmp_path / "mine.py"
    wrong = TEMPLATE.format(**bias("grid.shape", "grid.size")).replace('"mine"', '"theirs"').replace("Mine", "Theirs")
    resampler = """

@graticule.register_resampler("broken")
class Broken(graticule.Resampler):
    def weights(self, old, new, device=None):
        raise KeyError(old)
"""
    file.write_text(TEMPLATE.format(**bias()).replace('"mine"', '"right"') + wrong + resampler)
    code, out, err = run_command(capsys, "check", file)
    _, *lines, counts = out.splitlines()
    text = "\n".join(lines)
    assert (code, err) == (1, "") and counts == "1 passed, 2 failed, 4 not applicable"
    assert re.search("encoding right +passed +fulfills the contract", text)
    assert re.search("encoding right, crop +not applicable +refused: `crop` must be left out", text)
    assert re.search(
        r"encoding theirs, layers and \d+ other laws +failed +AttributeError: .* in line 36 of mine\.py", text
    )
    assert re.search(r"resampler broken +failed +KeyError: .* in line \d+ of mine\.py", text)


def test_training_and_evaluation_name_the_encoding_the_method_and_the_shapes(tmp_path, capsys, forgotten):
    file, run = tmp_path / "mine.py", tmp_path / "run"
    train = ["train", "digits_quick", "--quick", "--plugin", file, "--encoding", "yours", "--output", run]

    def write(mistake: str) -> None:
        file.write_text(TEMPLATE.format(**WRONG[mistake][0]).replace('"mine"', '"yours"'))

    write("pairs are flat")
    assert "`patch_bias` of encoding 'yours' must return (heads, H * W, H * W) = (" in refused(capsys, *train)
    write("an attribute that does not exist")
    assert "AttributeError: 'Grid' object has no attribute 'size', in line 16 of mine.py" in refused(capsys, *train)
    write("a table of one grid")
    assert run_command(capsys, *train)[0] == 0
    message = refused(capsys, "evaluate", run, "--plugin", file, "--sizes", "36")
    assert re.search(r"`patch_bias` of encoding 'yours' must return \(heads, H \* W, H \* W\) = \(.*\), got ", message)
