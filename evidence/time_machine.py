"""Laws of `graticule.testing` on position bugs of public histories: the end of docs/conformance.md.

The codes before and after the fix of a bug are rebuilt from their formulas; the columns `before` and `after` of
history.csv name them, with options: `rotate`, or one of BIASES or TABLES.

`python -m evidence.time_machine` runs both codes of each case of history.csv, without and with the declared convention,
and writes docs/data/time_machine.json and the page.
"""

import csv
import json
import math
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from scipy.stats import binomtest
from torch.nn.functional import grid_sample, interpolate

from evidence.records import between
from graticule.registry.specs import Spec
from graticule.system.files import write_text
from graticule.testing import BiasCode, RotationCode, TableCode, inspect_code

CASES, DOCS = Path(__file__).with_name("history.csv"), Path(__file__).parents[1] / "docs"
PAGE = DOCS / "conformance.md"
#: Laws, or laws for a case, that came after the cases were collected.
NEW = {"autocast", ("vllm-project/vllm#29425", "axes")}


def rows(grid):
    """Return (y, x) of the patches of a grid, row by row, (N, 2)."""
    return torch.cartesian_prod(*map(torch.arange, grid)).double()


#: Two coordinates of each token of a grid. `columns` are laid out as (width, height) and read as (height, width);
#: `transposed` belong to tokens column by column.
PLACES = {
    "rows": rows,
    "columns": lambda grid: rows(grid[::-1]).flip(-1),
    "transposed": lambda grid: rows(grid)[torch.arange(math.prod(grid)).view(grid[::-1]).T.flatten()],
    "x, y": lambda grid: rows(grid).flip(-1),
    "x": lambda grid: rows(grid) * torch.tensor([0, 1]),
    "line": lambda grid: torch.arange(math.prod(grid)).double()[:, None].expand(-1, 2),
    "thirds": lambda grid: rows(grid) / 3,
    "zeros": lambda grid: rows(grid) * 0,
    "dinov3": lambda grid: 2 * math.pi * ((rows(grid) + 0.5) / torch.tensor(grid) * 2 - 1),
    "class first": lambda grid: torch.cat([torch.zeros(1, 2), rows(grid)]),
    "class last": lambda grid: torch.cat([rows(grid), torch.zeros(1, 2)]),
}


def rotate(x, grid, places="rows", table="half", use="half", cast="", first=0, guarded=False):
    """Rotate x: (B, h, N, d) by angles of the pairs of `table`, used for those of `use`; `cast` takes x's dtype."""
    to = {name: x.dtype if name in cast else torch.float64 for name in ("places", "frequencies", "values")}
    frequencies = (100.0 ** -(torch.arange(x.shape[-1] // 4) * 4 / x.shape[-1])).to(to["frequencies"])
    positions = (PLACES[places](grid) + first).to(to["places"])[..., None]
    product = torch.float32 if first else torch.float64  # autocast rounds a product in float32
    with torch.autocast("cpu", enabled=not guarded and torch.is_autocast_enabled("cpu")):
        angles = (positions.to(product) @ frequencies[None].to(product)).flatten(1).double()
    angles = torch.cat([angles, angles], -1) if table == "half" else angles.repeat_interleave(2, -1)
    one, two = x.chunk(2, -1) if use == "half" else (x[..., ::2], x[..., 1::2])
    turned = torch.cat([-two, one], -1) if use == "half" else torch.stack([-two, one], -1).flatten(-2)
    outputs = x * angles.cos().to(to["values"]) + turned * angles.sin().to(to["values"])
    return outputs.to(torch.promote_types(x.dtype, torch.float32) if "wide" in cast else x.dtype)


def relative(grid, indexing):
    """Return the values of a table at the index of each displacement."""
    y, x = (axis.flatten() for axis in torch.meshgrid(*map(torch.arange, grid), indexing=indexing))
    index = (y[:, None] - y + grid[0] - 1) * (2 * grid[1] - 1) + x[:, None] - x + grid[1] - 1
    return torch.randn(9999, generator=torch.Generator().manual_seed(0))[index]


def windows(grid, wrong=False):
    """Return the distances of patches that were split into 2 x 2 windows, of wrong widths or right ones."""
    height, width = grid[0] // 2, grid[1] // 2
    parts = rows(grid).reshape(2, height, 2, height if wrong else width, -1).transpose(1, 2)
    parts = parts.reshape(2, 2, height, width, 2).transpose(1, 2).reshape(-1, 2)
    return -torch.cdist(parts, parts)


def sinusoids(grid, places="rows"):
    """Return the inner products of sinusoids."""
    angles = (PLACES[places](grid)[..., None] * torch.tensor([1.0, 0.3])).flatten(1)
    return torch.cat([angles.sin(), angles.cos()], -1) @ torch.cat([angles.sin(), angles.cos()], -1).mT


def resize(table, old, new, target="size", mode="bicubic", **options):
    """Resample a table; `target` is the size, a square, or scale factors of both axes or of each."""
    side, scale = math.isqrt(math.prod(new)), (math.prod(new) / len(table)) ** 0.5
    factors = {"one scale": [scale, scale], "scales": [new[0] / old[0], new[1] / old[1]]}.get(target)
    size = {"size": new, "square": (side, side)}.get(target)
    maps = interpolate(table.T.reshape(1, -1, *old), size, scale_factor=factors, mode=mode, **options)
    return maps[0].flatten(1).T


def keep(table, old, new, square=False):
    """Keep the table for a square of as many patches; else resample it, read as a `square` or as what it is."""
    old = (math.isqrt(len(table)),) * 2 if square else old
    return table if len(table) == math.prod(new) and new[0] == new[1] else resize(table, old, new)


def sample(table, old, new, indexing):
    y, x = torch.meshgrid(*(torch.linspace(-1, 1, side).double() for side in new), indexing=indexing)
    places = torch.stack([x, y] if indexing == "ij" else [y, x], -1)
    return grid_sample(table.T.reshape(1, -1, *old), places[None], align_corners=True)[0].flatten(1).T


def nearest(table, old, new, fractions):
    """Take the row i * n // height, or the one that float32 fractions below 1 fall into."""
    y, x = (torch.arange(side) * count // side for side, count in zip(new, old, strict=True))
    if fractions:
        edges = torch.arange(1 / old[0], 1.0, 1 / old[0])
        y, x = (torch.bucketize(torch.arange(side) / side * (1 - 1e-6), edges, right=True) for side in new)
    return table[(y[:, None] * old[1] + x).flatten()]


#: Functions of a grid, and of a table, its grid and another one.
BIASES = {
    **{"relative": relative, "windows": windows, "sinusoids": sinusoids},
    "distance": lambda grid, places="rows": -torch.cdist(PLACES[places](grid), PLACES[places](grid)),
}
TABLES = {
    **{"resize": resize, "keep": keep, "sample": sample, "nearest": nearest},
    "class_rows": lambda table, old, new, factor=1.0: torch.cat([table[:1] * factor, resize(table[1:], old, new)]),
    "zero": lambda table, old, new: resize(table * 0, old, new),
    "one_row": lambda table, old, new: table[:1],
}


def failures(kind, text, declared=None):
    """Return the laws that a code fails, and the code; `declared` is the code after the fix."""
    kind, spec = Spec.parse(kind), Spec.parse(text)
    options, functions = dict(kind.options), {**BIASES, **TABLES, "rotate": rotate}
    function = partial(functions[spec.name], **spec.options)
    if kind.name == "rotation":
        code = RotationCode(function, 16, expected=declared, **options)
    elif kind.name == "bias":
        code = BiasCode(function, **options)
    else:
        native, prefix, name = options.get("native", (6, 6)), options.get("prefix", 0), options.get("resampler")
        rows = torch.randn(prefix + math.prod(native), 8, generator=torch.Generator().manual_seed(0)).double()
        code = TableCode(partial(function, rows, native), rows, native, prefix, name if declared else None)
    return [finding.check for finding in inspect_code(code) if finding.outcome == "failed"], code


def measure(thread, date, what, kind, before, after):
    """Return what fails before and after the fix, and what fails before if the convention is declared."""
    case = {"thread": thread, "date": date, "what": what}
    if kind:
        (broken, _), (fixed, code) = failures(kind, before), failures(kind, after)
        declared, still = failures(kind, before, code)[0], failures(kind, after, code)[0]
        case |= {"before": broken, "declared": declared, "after": sorted({*fixed, *still})}
    return case


def found(case, name="before", without=()):
    laws = [law for law in case.get(name, []) if law not in case["after"]]
    return [law for law in laws if law not in without and (case["thread"], law) not in without]


def link(case):
    repository, number = case["thread"].partition(" ")[0].split("#")
    return f"[{repository.partition('/')[2]}#{number}](https://github.com/{repository}/issues/{number})"


def page(cases):
    """Return the shares that are found, and what is not."""
    lines, codes = [], [case for case in cases if "before" in case]
    later = "With `autocast` and change along both axes, which were written later"
    for name, without in (("Laws older than this test", NEW), (later, ())):
        alone, declared = (sum(bool(found(case, key, without)) for case in codes) for key in ("before", "declared"))
        bounds = [binomtest(alone, len(every)).proportion_ci(method="exact") for every in (codes, cases)]
        texts = [f"{100 * low:.0f} to {100 * high:.0f} %" for low, high in bounds]
        lines.append(
            f"- {name}: {alone} of {len(codes)} bugs with code ({texts[0]}), or of all {len(cases)} ({texts[1]})."
        )
        lines.append(f"  With the declared convention: {declared}.")
    false = [f"{link(case)} ({', '.join(case['after'])})" for case in codes if case["after"]]
    lines.append(f"- Laws that fail on fixed code: {', '.join(false) or 'none'}.")
    laws = Counter(found(case)[0] for case in codes if found(case))
    lines.append(f"- The law that fails first: {', '.join(f'{law} {count}' for law, count in laws.most_common())}.")
    missed = [link(case) for case in codes if not found(case, "declared")]
    lines.append(f"- Not found by any law, also if declared: {', '.join(missed)}.")
    return "\n".join(lines)


def main():
    """Measure all cases, and write the data and the page."""
    with CASES.open(encoding="utf-8", newline="") as file:
        cases = [measure(**case) for case in csv.DictReader(file)]
    write_text(DOCS / "data" / "time_machine.json", "[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")
    write_text(PAGE, between(PAGE.read_text(encoding="utf-8"), "cases", page(cases)))


if __name__ == "__main__":
    main()
