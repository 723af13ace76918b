"""Laws of `graticule.testing` on position bugs of public histories: the table of docs/time_machine.md.

`python -m evidence.time_machine` runs both codes of each case of history.csv, without and with the declared convention,
and writes docs/data/time_machine.json and the page.
"""

import csv
import json
import math
from functools import partial
from pathlib import Path

import torch
from scipy.stats import binomtest

from evidence.history import BIASES, TABLES, rotate
from graticule.lab.studies.tables import between
from graticule.registry.specs import Spec
from graticule.system.files import write_text
from graticule.testing import BiasCode, RotationCode, TableCode, inspect_code

CASES, DOCS = Path(__file__).with_name("history.csv"), Path(__file__).parents[1] / "docs"
PAGE = DOCS / "time_machine.md"
#: Laws, or laws for a case, that came after the cases were collected.
NEW = {"autocast", ("vllm-project/vllm#29425", "axes")}


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
    """Return shares and the table of cases."""
    lines, codes = [], [case for case in cases if "before" in case]
    later = "With `autocast` and change along both axes, which came later"
    for name, without in (("Laws that were there before", NEW), (later, ())):
        alone, declared = (sum(bool(found(case, key, without)) for case in codes) for key in ("before", "declared"))
        bounds = [binomtest(alone, len(every)).proportion_ci(method="exact") for every in (codes, cases)]
        texts = [f"{100 * low:.0f} to {100 * high:.0f} %" for low, high in bounds]
        lines.append(f"- {name}: {alone} of {len(codes)} codes ({texts[0]}), of {len(cases)} bugs in all ({texts[1]}).")
        lines.append(f"  With the declared convention: {declared}.")
    false = [f"{link(case)} ({', '.join(case['after'])})" for case in codes if case["after"]]
    missed = [link(case) for case in codes if not found(case, "declared")]
    lines.append(f"- Not found by any law, also if declared: {', '.join(missed)}.")
    lines.append(f"- Laws that fail on fixed code: {', '.join(false) or 'none'}.")
    lines.append(f"- Without code: {', '.join(link(case) for case in cases if case not in codes)}.")
    lines += ["", "|thread|date|bug|found by|", "|---|---|---|---|"]
    for case in codes:
        by = ", ".join(found(case)[:2]) or ("declared" if found(case, "declared") else "not found")
        lines.append(f"|{link(case)}|{case['date']}|{case['what']}|{by}|")
    return "\n".join(lines)


def main():
    """Measure all cases, and write the data and the page."""
    with CASES.open(encoding="utf-8", newline="") as file:
        cases = [measure(**case) for case in csv.DictReader(file)]
    write_text(DOCS / "data" / "time_machine.json", "[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")
    write_text(PAGE, between(PAGE.read_text(encoding="utf-8"), "cases", page(cases)))


if __name__ == "__main__":
    main()
