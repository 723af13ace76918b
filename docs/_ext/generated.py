"""Write the pages that are generated from the code (encodings, commands, API) before Sphinx reads the sources."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import api
import command_line
import gallery
from sphinx.application import Sphinx


def write_pages(app: Sphinx) -> None:
    """Write all generated pages into the folder of the sources."""
    root = Path(app.srcdir)
    for maker in (gallery, command_line, api):
        for name, text in maker.pages(root).items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text(encoding="utf-8") != text:  # unchanged pages are not read again
                path.write_text(text, encoding="utf-8")


def link_gallery(app: Sphinx, docname: str, source: list[str]) -> None:
    """Link the page of each encoding where the clone has a link to its file."""
    if docname == "encodings":
        source[0] = re.sub(r"\[`(\w+)`\]\(\.\./src/[\w/]+\.py\)", r"[`\1`](gallery/\1.md)", source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the pages when the build starts, and convert docstrings to reStructuredText when they are read."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", link_gallery)
    app.connect("autodoc-process-docstring", api.process_docstring, priority=100)  # before napoleon
    app.connect("autodoc-process-docstring", api.keep_attribute, priority=900)  # after it
    return {"parallel_read_safe": True, "parallel_write_safe": True}
