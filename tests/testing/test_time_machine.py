"""The page of historical bugs is that of the recorded outcomes, and these are the outcomes of a run."""

import csv
import json

import pytest

from evidence.time_machine import CASES, DOCS, NEW, found, measure, page

RECORDED = json.loads((DOCS / "data" / "time_machine.json").read_text())


def test_page_is_that_of_the_recorded_outcomes():
    assert page(RECORDED) in (DOCS / "conformance.md").read_text()
    assert sum(bool(found(case, without=NEW)) for case in RECORDED) >= 27
    assert not any(case.get("after") for case in RECORDED), "a law fails on fixed code"


@pytest.mark.slow
def test_recorded_outcomes_are_those_of_a_run():
    with CASES.open(newline="") as file:
        assert [measure(**case) for case in csv.DictReader(file)] == RECORDED
