"""Tables in Markdown, and the markers of a page between which they are written."""

from __future__ import annotations

import re
from collections.abc import Sequence

Rows = list[tuple[str, ...]]


def markdown(*tables: Sequence[Sequence[str]]) -> str:
    """Write tables in Markdown, with an empty line between them."""
    lines = [[table[0], ["---"] * len(table[0]), *table[1:]] for table in tables]
    cells = [[[text.replace("|", "\\|") for text in row] for row in rows] for rows in lines]
    return "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in rows) for rows in cells)


def between(text: str, name: str, new: str) -> str:
    """Return a page with `new` between the markers of `name`, NAME: begin and NAME: end in comments of HTML."""
    marks = f"<!-- {re.escape(name)}: "
    pattern = re.compile(rf"({marks}begin[^>]*-->\n).*?({marks}end -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"`text` must have the markers <!-- {name}: begin --> and <!-- {name}: end -->.")
    return pattern.sub(lambda match: f"{match[1]}\n{new}\n\n{match[2]}", text)


def size_text(size: tuple[int, int]) -> str:
    """Write a size, (height, width): '40' for a square, otherwise '32x36'."""
    height, width = size
    return str(height) if height == width else f"{height}x{width}"
