import sys
from types import ModuleType

import pytest

from graticule.lab.data.sets.texts import load_text

HELD_OUT_TOPICS = {
    "booleans",
    "break",
    "exprlists",
    "imaginary",
    "import",
    "power",
    "string-methods",
    "truth",
    "typesmapping",
    "typesmodules",
}


def give_python_topics(monkeypatch, topics):
    module = ModuleType("pydoc_data.topics")
    module.topics = topics
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", module)


def test_every_topic_of_python_is_in_one_part_and_about_a_tenth_of_the_bytes_is_held_out():
    from pydoc_data.topics import topics

    corpus = load_text("pydoc")
    assert corpus["test"] == [topics[name] for name in sorted(HELD_OUT_TOPICS & topics.keys())]
    assert len(corpus["train"]) + len(corpus["test"]) == len(topics)
    size = {split: sum(len(text.encode()) for text in of_split) for split, of_split in corpus.items()}
    assert 0.08 < size["test"] / sum(size.values()) < 0.13
    assert size["train"] > 300_000


def test_a_python_without_topics_is_refused_with_an_alternative(monkeypatch):
    for topics in ({}, {"import": "Held out."}, {"compound": "Trained on."}):
        give_python_topics(monkeypatch, topics)
        with pytest.raises(ValueError, match=r"topics held out.*text_file"):
            load_text("pydoc")
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ImportError, match=r"pydoc_data.*text_file"):
        load_text("pydoc")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_last_tenth_of_a_file_is_held_out_from_a_line_on_and_nothing_is_changed(tmp_path, end):
    text = end.join(f"line {n}: Ä" for n in range(1000))
    path = tmp_path / "a.txt"
    path.write_bytes(f"\ufeff{text}".encode())
    corpus = load_text("text_file", path)
    (train,), (test,) = corpus["train"], corpus["test"]
    assert train + test == text and train.endswith(end) and test.startswith("line ")
    assert 0.09 < len(test) / len(text) <= 0.1
    path.write_bytes(b"one line " * 10)
    assert load_text("text_file", path) == {"train": ["one line " * 9], "test": ["one line "]}


def test_a_file_that_does_not_exist_or_has_too_little_text_is_named(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n" * 40)
    (tmp_path / "end.txt").write_text("text" + " " * 40)
    for name in ("empty.txt", "end.txt"):
        with pytest.raises(ValueError, match=rf"`data_root` must have text in its first nine tenths .*{name}"):
            load_text("text_file", tmp_path / name)
    for root, match in (
        (None, "got none"),
        (tmp_path, "is not a file"),
        (tmp_path / "no.txt", r"no\.txt.* not a file"),
    ):
        with pytest.raises(FileNotFoundError, match=match):
            load_text("text_file", root)
