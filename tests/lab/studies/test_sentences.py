"""Each sentence about data is true of the stored tables, and errors that are planted in pages or tables are found."""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest

from evidence.contrasts import ROWS, Asked, Registry
from evidence.records import read_records
from evidence.sentences import PAGES, Sentence, read_pages, sentences

TOP = Path(__file__).parents[3]
DATA = TOP / "docs" / "data"
REGISTRY = Registry(DATA)
PLACE = '"beside, std 1 - once, std 1"'
WHY = "docs/why_lape.md"


def problems(page: str, text: str, registry: Registry = REGISTRY) -> list[str]:
    return [problem for sentence in sentences(page, text) for problem in sentence.problems(registry)]


def test_every_sentence_about_data_is_true():
    false = {sentence.text: found for sentence in read_pages(TOP) if (found := sentence.problems(REGISTRY))}
    assert false == {}, "see python -m evidence.sentences"


def test_few_sentences_are_definitions():
    assert sum("says: definition" in sentence.comments for sentence in read_pages(TOP)) <= 6


@pytest.mark.parametrize(
    ("page", "old", "new", "problem"),
    [
        ("docs/which.md", "+22.6", "-22.6", "the number -22.6"),  # a sign
        ("docs/which.md", "gains 5.9 points", "loses 5.9 points", "the word 'loses'"),  # a direction
        ("docs/which.md", "answer = no difference found", "answer = larger", "is false"),  # an answer
        ("docs/which.md", "rank = 1", "rank = 2", "is false"),
        (WHY, "gains 22.4 points", "gains 22.5 points", "the number 22.5"),  # a digit
        (WHY, "gains 7.4 points", "gains 7.3 points", "the number 7.3"),  # stale
        (WHY, "holds: lape_place_cifar10", "holds: lape_place_deep", "must be a row of"),  # another study
        (WHY, "layers = 24", "layers = 12", "is false"),
        (WHY, "not shown to help", "shown to help", "the word 'help'"),
        ("README.md", "keeps 9.6", "keeps 9.7", "the number 9.7"),
        ("docs/results.md", "margin = 3", "margin = 1", "is false"),
        ("docs/results.md", r"<!-- holds: [^>]*-->", "", "has no condition"),  # a condition that is missing
        ("docs/results.md", "answer = no difference found", "reply = no difference found", "cannot be evaluated"),
    ],
)
def test_an_error_of_a_page_is_found(page, old, new, problem):
    text = (TOP / page).read_text(encoding="utf-8")
    assert problems(page, text) == []
    planted = re.sub(old, new, text, count=1) if old.startswith("<") else text.replace(old, new)
    assert planted != text
    assert any(re.search(problem, found) for found in problems(page, planted)), problems(page, planted)


@pytest.mark.parametrize(
    ("fact", "value"),
    [("std", "0.2"), ("layers", "6")],  # the default of another family; another model
)
def test_a_model_that_is_not_what_the_sentence_says_is_found(tmp_path, fact, value):
    for file in DATA.glob("*.csv"):
        shutil.copy(file, tmp_path)
    built = tmp_path / "built.csv"
    built.write_text(re.sub(rf"(?m)^(lape_place(?:_deep)?,.*,{fact}),.*$", rf"\1,{value}", built.read_text()))
    found = problems(WHY, (TOP / WHY).read_text(encoding="utf-8"), Registry(tmp_path))
    assert any("is false: built" in problem and fact in problem for problem in found)


def test_another_margin_and_a_stale_table_are_found(tmp_path):
    rows = [dataclasses.replace(row, margin=2.0) for row in read_records(ROWS, Asked)]
    page = "docs/results.md"
    assert any("margin = 1, got 2" in found for found in problems(page, (TOP / page).read_text(), Registry(DATA, rows)))
    for file in DATA.glob("*.csv"):
        shutil.copy(file, tmp_path)
    table = tmp_path / "study_lape_place_fashion.csv"
    table.write_text(re.sub(r'(once, std 1",,\d+,top1,trained,)', r"\g<1>1", table.read_text()))
    assert any("7.4" in found or "5.5" in found for found in problems(WHY, (TOP / WHY).read_text(), Registry(tmp_path)))


@pytest.mark.parametrize(
    ("text", "numbers", "words"),
    [
        ("It gains +1.5 and 1,000 points in CIFAR-10.", ["+1.5", "1,000"], ["gains"]),
        ("No choice is better on larger images.", [], ["not better"]),
        ("Three of `std=2` [are 4](x5.md) *better*.", ["3", "4"], []),
        ("They are within the margin.", [], ["within the margin"]),
    ],
)
def test_numbers_and_directions_are_those_of_the_text(text, numbers, words):
    (sentence,) = sentences("docs/which.md", text)
    assert sentence.numbers == numbers
    assert ["not " * negated + word for word, _, negated in sentence.directions] == words


def test_a_condition_belongs_to_the_sentence_before_it():
    text = (
        "One gains.<!-- holds: a -->\nTwo loses. Three:\n\n- four;<!-- says: definition -->\n- five `x.` six\n\n# 7\n"
    )
    assert [(sentence.text, sentence.comments) for sentence in sentences("p.md", text)] == [
        ("One gains.", ("holds: a",)),
        ("Two loses.", ()),
        ("Three:", ()),
        ("- four;", ("says: definition",)),
        ("- five ` six", ()),
    ]


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        (f"lape_place {PLACE} @ zoom 40 low > 0", None),
        ('lape_place "once, std 1 - beside, std 1" @ zoom 40 high < 0', "the word 'gains'"),  # of the other sign
        (f"lape_place {PLACE} @ zoom 40 low > 0; {PLACE} low > 0", "is false"),
        (f"lape_place {PLACE} @ zoom 41 low > 0", "must be a row of"),
        ("__import__('os')", "must have one of the forms"),
        ('lape_place "once, std 9" mean', "cannot be evaluated"),
    ],
)
def test_a_clause_is_a_contrast_in_either_sign(condition, problem):
    found = Sentence("p.md", "The place gains.", (f"holds: {condition}",)).problems(REGISTRY)
    assert (found == []) if problem is None else any(problem in text for text in found), found


def test_the_pages_of_results_are_at_most_ten():
    assert (
        len([page for page in PAGES if page not in ("README.md", "docs/results.md")]) + 1 <= 10
    )  # and that of the GPU
    assert {page.name for page in (TOP / "docs" / "results").glob("*.md")} <= {Path(page).name for page in PAGES} | {
        "gpu.md"
    }
