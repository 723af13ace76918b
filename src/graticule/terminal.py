"""Bold and colored text, on terminals only."""

from __future__ import annotations

import os
from typing import TextIO

_BOLD, _RED = "1", "1;31"


def bold(text: str, stream: TextIO) -> str:
    """Return `text` in bold, or unchanged if `stream` is not a terminal or colors are not wanted."""
    return _styled(text, _BOLD, stream)


def red(text: str, stream: TextIO) -> str:
    """Return `text` in red, or unchanged if `stream` is not a terminal or colors are not wanted."""
    return _styled(text, _RED, stream)


def _styled(text: str, style: str, stream: TextIO) -> str:
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"  # see no-color.org
    return f"\x1b[{style}m{text}\x1b[0m" if wanted and stream.isatty() else text
