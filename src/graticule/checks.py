"""Text from files that goes into messages."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escape what a terminal or a picture cannot show in a name: line ends, control codes, bytes that are no text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
