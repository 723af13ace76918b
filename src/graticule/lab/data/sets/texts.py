"""Text for language models: Python's own help, which every installation has, or a text file."""

from __future__ import annotations

import hashlib
from pathlib import Path

from graticule.lab.data.images import Split
from graticule.registry.checks import known_name
from graticule.system.files import read_utf8

#: The documents to train on and the held-out ("test") ones.
Corpus = dict[Split, list[str]]
#: Chosen among 3,000 before any training: with it, the held-out topics of Python 3.11 to 3.13 have 10.5 to 11.3 % of
#: the bytes, none has more than half of these, and none repeats a paragraph of a training topic.
_PYDOC_SALT = "922/"
#: The held-out share of topics, by the hash of their names, and of a file.
_HELD_OUT = 0.1
#: Largest text file in bytes: all text is kept in memory.
_LARGEST = 1 << 32


def load_text(name: str, root: str | Path | None = None) -> Corpus:
    """Load the training and the held-out ("test") documents of a text, one of `TEXTS`.

    Raises:
        ValueError, FileNotFoundError, ImportError: for an unknown name, or text that does not exist or cannot be read.
    """
    known_name("dataset", name, TEXTS)
    return _pydoc() if name == "pydoc" else _text_file(None if root is None else Path(root))


#: The texts by name.
TEXTS = ("pydoc", "text_file")


def hash_share(name: str) -> float:
    """Return a number in [0, 1) that depends only on a name, not on the machine or the version of Python."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:6], "big") / 2**48


def _pydoc() -> Corpus:
    """Load the topics of Python's `help()`: 79 with 0.47 MB in Python 3.11, of which 10 are held out.

    The text differs between versions of Python; the held-out topics do not, since only the hash of a topic's name
    decides.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ImportError(
            f"`dataset` pydoc needs the module pydoc_data of Python, which is missing here ({error}); use "
            "another Python, or text_file."
        ) from None
    corpus: Corpus = {"train": [], "test": []}
    for name, text in sorted(topics.items()):
        if text.strip():
            corpus["test" if hash_share(_PYDOC_SALT + name) < _HELD_OUT else "train"].append(text)
    if not corpus["train"] or not corpus["test"]:
        raise ValueError(
            "`dataset` pydoc must have topics to train on and topics held out: this installation of Python has "
            f"{sum(map(len, corpus.values()))} of about 79; use another, or text_file."
        )
    return corpus


def _text_file(path: Path | None) -> Corpus:
    """Load a UTF-8 text file; its last tenth is held out, from the beginning of a line on.

    Line ends are unchanged; a byte order mark is removed.
    """
    if path is None or not path.is_file():
        actual = "none" if path is None else f"{str(path)!r}, which is not a file"
        raise FileNotFoundError(f"`data_root` must be a text file for the dataset text_file, got {actual}.")
    text = read_utf8(path, _LARGEST)
    tenth = round(len(text) * (1 - _HELD_OUT))
    cut = text.find("\n", tenth, -1) + 1 or tenth
    train, test = text[:cut], text[cut:]
    if not train.strip() or not test.strip():
        raise ValueError(f"`data_root` must have text in its first nine tenths and in its last one, got {str(path)!r}.")
    return {"train": [train], "test": [test]}
