"""The page of historical bugs counts the recorded outcomes, and these are the outcomes of a run."""

import csv
import json
import re

import pytest

from evidence.time_machine import CASES, DOCS, NEW, found, measure

RECORDED = json.loads((DOCS / "data" / "time_machine.json").read_text())
#: Bugs that are found, codes, bugs in all, and those that are found with the declared convention.
LINE = r": (\d+) of (\d+) codes \(.*?\), of (\d+) bugs in all \(.*\n  With the declared convention: (\d+)\."


def test_page_counts_the_recorded_outcomes():
    codes, counts = sum("before" in case for case in RECORDED), []
    for without in (NEW, ()):
        alone, declared = (
            sum(bool(found(case, name, without)) for case in RECORDED) for name in ("before", "declared")
        )
        counts.append((str(alone), str(codes), str(len(RECORDED)), str(declared)))
    assert re.findall(LINE, (DOCS / "conformance.md").read_text()) == counts and int(counts[0][0]) >= 27
    assert not any(case.get("after") for case in RECORDED), "a law fails on fixed code"


@pytest.mark.slow
def test_recorded_outcomes_are_those_of_a_run():
    with CASES.open(newline="") as file:
        assert [measure(**case) for case in csv.DictReader(file)] == RECORDED
