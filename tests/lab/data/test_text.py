import sys
from itertools import chain
from types import ModuleType

import pytest

from graticule.lab.data.registry import load_text
from graticule.lab.data.sets.texts import hash_share

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


def names(corpus):
    return {split: [document.name for document in documents] for split, documents in corpus.items()}


def texts(corpus):
    return {split: [document.text for document in documents] for split, documents in corpus.items()}


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def give_python_topics(monkeypatch, topics):
    module = ModuleType("pydoc_data.topics")
    module.topics = topics
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", module)


def test_every_topic_of_python_is_in_one_part_and_about_a_tenth_of_the_bytes_is_held_out():
    from pydoc_data.topics import topics

    corpus = load_text("pydoc")
    assert sorted(chain(*names(corpus).values())) == sorted(topics)
    assert set(names(corpus)["test"]) == HELD_OUT_TOPICS & topics.keys()
    size = {split: sum(len(text.encode()) for text in of_split) for split, of_split in texts(corpus).items()}
    assert 0.08 < size["test"] / sum(size.values()) < 0.13
    assert size["train"] > 300_000
    assert all(topics[document.name] == document.text for document in corpus["test"])


def test_held_out_paragraphs_are_not_in_the_training_text():
    corpus = load_text("pydoc")
    paragraphs = {
        split: {" ".join(paragraph.split()) for text in of_split for paragraph in text.split("\n\n")}
        for split, of_split in texts(corpus).items()
    }
    assert max(map(len, paragraphs["train"] & paragraphs["test"]), default=0) < 60


def test_a_python_without_topics_is_refused_with_an_alternative(monkeypatch):
    for topics in ({}, {"import": "Held out."}, {"compound": "Trained on."}):
        give_python_topics(monkeypatch, topics)
        with pytest.raises(ValueError, match=r"topics held out.*text_folder"):
            load_text("pydoc")
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ImportError, match=r"pydoc_data.*text_folder"):
        load_text("pydoc")


def test_a_folder_gives_its_text_files_at_any_depth_as_they_are(tmp_path):
    files = {
        "a.txt": "Ä\r\nline\n",
        "b/c/d.md": "\ufeffmarked",
        "b/e.PY": "print()\n",
        "b/image.png": b"\x89PNG\xff",
        ".git/f.txt": "hidden",
        ".g.txt": "hidden",
        "empty.txt": "",
        "white.rst": " \n",
    }
    corpus = load_text("text_folder", write(tmp_path, files))
    by_name = {document.name: document.text for documents in corpus.values() for document in documents}
    assert by_name == {"a.txt": "Ä\r\nline\n", "b/c/d.md": "marked", "b/e.PY": "print()\n"}
    assert corpus["train"] and corpus["test"]


def test_the_path_of_a_file_alone_decides_its_split(tmp_path):
    files = {f"{n}.txt": f"text {n}" for n in range(200)}
    first = names(load_text("text_folder", write(tmp_path / "a", files)))
    assert 8 <= len(first["test"]) <= 35 and not set(first["train"]) & set(first["test"])
    fewer = {name: text for name, text in files.items() if int(name[:-4]) % 3}
    second = names(load_text("text_folder", write(tmp_path / "b", fewer)))
    assert second == {split: [name for name in of_split if name in fewer] for split, of_split in first.items()}


@pytest.mark.parametrize("val", ["val", "validation", "test"])
def test_folders_for_the_parts_are_taken_where_there_are(tmp_path, val):
    root = write(tmp_path, {"train/a/b.txt": "to train on", f"{val}/c.txt": "held out", "notes.txt": "neither"})
    assert names(load_text("text_folder", root)) == {"train": ["train/a/b.txt"], "test": [f"{val}/c.txt"]}


def test_a_folder_with_too_little_text_is_named(tmp_path):
    for number, (files, error, match) in enumerate(
        [
            ({"a.png": "no text"}, ValueError, "got none in"),
            ({"a.txt": "", "b.txt": "\n"}, ValueError, "got 2 empty ones"),
            ({"a.txt": "text"}, ValueError, r"two text files or more, or folders train and val, got only a\.txt"),
            ({"train/a.txt": "text"}, FileNotFoundError, "val or validation or test"),
            ({"train/a.txt": "text", "val/a.png": "no text"}, ValueError, "got none in .*val"),
        ]
    ):
        with pytest.raises(error, match=match):
            load_text("text_folder", write(tmp_path / str(number), files))


@pytest.mark.parametrize(
    ("content", "byte", "offset"),
    [
        ("Übung macht".encode("latin-1"), "dc", 0),
        ("good: é".encode("cp1252"), "e9", 6),
        ("with a mark".encode("utf-16"), "ff", 0),
        ("without".encode("utf-16-le"), "00", 1),
        ("without".encode("utf-32-be"), "00", 0),
        ("ぱ".encode("shift-jis"), "82", 0),
    ],
)
def test_text_in_another_encoding_is_an_error_that_names_file_and_byte(tmp_path, content, byte, offset):
    write(tmp_path, {"good.txt": "good", "bad.txt": content})
    with pytest.raises(ValueError, match=rf"bad\.txt must be text in UTF-8, got byte 0x{byte} at offset {offset}"):
        load_text("text_folder", tmp_path)


def test_the_hash_of_a_name_is_the_same_on_every_machine():
    # computed with sha256sum: the first 12 digits / 16 ** 12
    assert hash_share("922/import") == 0x0E02FB4FD1E5 / 16**12
    assert hash_share("é.txt") == 0xD0720667BFC8 / 16**12


def test_a_copy_of_a_file_is_not_in_the_other_part(tmp_path):
    write(tmp_path, {f"{n}/LICENSE.txt": "the same" for n in range(50)} | {"other.txt": "another"})
    assert sum(map(len, names(load_text("text_folder", tmp_path)).values())) == 2
