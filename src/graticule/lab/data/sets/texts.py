"""Text for language models: Python's own help, which every installation has, or any folder of text files."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

from graticule.lab.data.registry import Corpus, Document, register_text
from graticule.lab.data.sets.folder import SPLITS, existing_folder, files_below, split_folder
from graticule.system.files import read_utf8

#: Extensions of text files.
TEXT_EXTENSIONS = (".txt", ".text", ".md", ".rst", ".tex", ".py")
#: Chosen among 3,000 before any training: with it, the held-out topics of Python 3.11 to 3.13 have 10.5 to 11.3 % of
#: the bytes, none has more than half of these, and none repeats a paragraph of a training topic.
_PYDOC_SALT = "922/"
#: A document is held out if the hash of its name, as a number in [0, 1), is below this.
_HELD_OUT = 0.1
#: Paragraphs of fewer characters may be in both splits, such as a heading, or "See also:".
_LONG_PARAGRAPH = 60
#: Largest text file in bytes: all text is kept in memory.
_LARGEST = 1 << 32


def hash_share(name: str) -> float:
    """Return a number in [0, 1) that depends only on a name, not on the machine or the version of Python."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:6], "big") / 2**48


@register_text("pydoc")
def pydoc(root: Path | None = None) -> Corpus:
    """Load the topics of Python's `help()`: 79 with 0.47 MB in Python 3.11, of which 10 are held out.

    The text differs between versions of Python; the held-out topics do not, since only the hash of a topic's name
    decides. Several topics are parts of others ("for" of "compound"). A held-out paragraph that is in a training topic,
    too, is removed from that; Python 3.11 to 3.13 have none.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ImportError(
            f"`dataset` pydoc needs the module pydoc_data of Python, which is missing here ({error}); use "
            "another Python, or text_folder."
        ) from None
    documents = [Document(name, text) for name, text in sorted(topics.items()) if text.strip()]
    corpus = _split(documents, [name for name in topics if hash_share(_PYDOC_SALT + name) < _HELD_OUT])
    if not corpus["train"] or not corpus["test"]:
        raise ValueError(
            "`dataset` pydoc must have topics to train on and topics held out: this installation of Python has "
            f"{len(documents)} of about 79; use another, or text_folder."
        )
    held_out = {_key(paragraph) for document in corpus["test"] for paragraph in document.text.split("\n\n")}
    held_out = {key for key in held_out if len(key) >= _LONG_PARAGRAPH}
    for index, document in enumerate(corpus["train"]):
        paragraphs = [part for part in document.text.split("\n\n") if _key(part) not in held_out]
        corpus["train"][index] = Document(document.name, "\n\n".join(paragraphs))
    return corpus


@register_text("text_folder")
def text_folder(root: Path | None) -> Corpus:
    """Load the UTF-8 text files of a folder, at any depth, as one document each.

    If there is a folder `root`/train, it is the training text, and `root`/val (or validation, or test) is held out.
    Otherwise the hash of a file's path within `root` decides, and holds out about one in ten; if that leaves a split
    empty, the file with the nearest hash moves there. Files and folders that begin with a dot and empty files are
    skipped, and of files with the same text the first is used. Line ends are unchanged; a byte order mark is removed.
    """
    root = existing_folder(root, f"of text files ({', '.join(TEXT_EXTENSIONS)})")
    if (root / "train").is_dir():
        places = {split: split_folder(root, split) for split in SPLITS}
        return {split: _documents(place, root) for split, place in places.items()}
    documents = _documents(root, root)
    if len(documents) < 2:
        raise ValueError(
            f"`data_root` must have two text files or more, or folders train and val, got only {documents[0].name} in "
            f"{root}; split it in two."
        )
    shares = {document.name: hash_share(document.name) for document in documents}
    held_out = {name for name, share in shares.items() if share < _HELD_OUT} or {min(shares, key=shares.__getitem__)}
    if len(held_out) == len(documents):
        held_out -= {max(shares, key=shares.__getitem__)}
    return _split(documents, held_out)


def _split(documents: list[Document], held_out: Collection[str]) -> Corpus:
    return {
        "train": [document for document in documents if document.name not in held_out],
        "test": [document for document in documents if document.name in held_out],
    }


def _key(paragraph: str) -> str:
    """Return a paragraph without indentation and line breaks, which differ when it is quoted."""
    return " ".join(paragraph.split())


def _documents(folder: Path, root: Path) -> list[Document]:
    """Read the text files below `folder`, each once, sorted by their paths within `root`."""
    files = files_below(
        folder, lambda name: name.lower().endswith(TEXT_EXTENSIONS) and not name.startswith("."), hidden=False
    )
    if not files:
        raise ValueError(f"`data_root` must have text files ({', '.join(TEXT_EXTENSIONS)}), got none in {folder}.")
    names: dict[str, str] = {}  # by text, so that a copy is not in both splits
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in files):
        text = read_utf8(path, _LARGEST)
        if text.strip():
            names.setdefault(text, name)
    if not names:
        raise ValueError(f"`data_root` must have text in its files, got {len(files)} empty ones in {folder}.")
    return [Document(name, text) for text, name in names.items()]
