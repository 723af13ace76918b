"""The documents of a text."""

from __future__ import annotations

from dataclasses import dataclass

from graticule.data.images import Split


@dataclass(frozen=True)
class Document:
    """A text and its name: a topic, or the path of a file in its folder."""

    name: str
    text: str


#: The documents to train on and the held-out ("test") ones.
Corpus = dict[Split, list[Document]]
