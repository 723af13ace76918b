"""Page of docs with the text of studies between markers."""

from __future__ import annotations

import re
from pathlib import Path

from graticule.files import write_text


def markers(name: str) -> tuple[str, str]:
    """Return the markers in a page that enclose the text of a study."""
    return f"<!-- study {name} -->", f"<!-- end of study {name} -->"


def has_markers(page: Path, name: str) -> bool:
    """Return whether a page has the markers of a study."""
    return _between(name).search(page.read_text(encoding="utf-8")) is not None


def insert(page: Path, name: str, text: str) -> None:
    """Replace the text between the `markers` of a study in a page by `text`."""
    begin, end = markers(name)
    found = page.read_text(encoding="utf-8")
    replaced = _between(name).sub(lambda _: f"{begin}\n\n{text}\n\n{end}", found)
    if replaced != found:
        write_text(page, replaced)


def _between(name: str) -> re.Pattern[str]:
    begin, end = map(re.escape, markers(name))
    return re.compile(f"{begin}.*?{end}", flags=re.DOTALL)
