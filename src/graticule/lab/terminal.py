"""Bold and colored text, on terminals only."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, TextIO

from tqdm.std import tqdm

_BOLD, _RED = "1", "1;31"


def bold(text: str, stream: TextIO) -> str:
    """Return `text` in bold, or unchanged if `stream` is not a terminal or colors are not wanted."""
    return _styled(text, _BOLD, stream)


def red(text: str, stream: TextIO) -> str:
    """Return `text` in red, or unchanged if `stream` is not a terminal or colors are not wanted."""
    return _styled(text, _RED, stream)


def _styled(text: str, style: str, stream: TextIO) -> str:
    colored = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"  # see no-color.org
    return f"\x1b[{style}m{text}\x1b[0m" if colored and stream.isatty() else text


#: Seconds between the lines of a bar in a file.
INTERVAL = 30.0


class PlainProgress(tqdm):
    """A bar that prints a line every 30 seconds, for a stderr that is a file or a pipe."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._printed_at = time.monotonic()
        super().__init__(*arguments, **{**options, "leave": False, "ncols": 0, "dynamic_ncols": False})

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Print a line, if the last one is old enough."""
        if (now := time.monotonic()) - self._printed_at >= INTERVAL:
            self._printed_at = now
            print(str(self).strip(), file=sys.stderr, flush=True)
        return True

    def close(self) -> None:
        """Close the bar, without the characters that clear a line."""
        self.last_print_t, self.delay = self.start_t if hasattr(self, "start_t") else 0.0, 1.0
        super().close()


def hidden(wanted: bool) -> bool:
    """Return whether to hide a progress bar: it is not wanted, or stderr is a file or a pipe.

    In a notebook, where stderr is not a terminal either, bars are drawn.
    """
    return not wanted or not (sys.stderr.isatty() or "ipykernel" in sys.modules)


def bar(*arguments: Any, wanted: bool = True, **options: Any) -> tqdm[Any]:
    """Return tqdm's bar, or lines if stderr is a file or a pipe; it shows nothing if it is not wanted."""
    from tqdm.auto import tqdm as notebook_tqdm  # imports asyncio

    kind: type[tqdm[Any]] = PlainProgress if hidden(True) else notebook_tqdm
    return kind(*arguments, disable=not wanted, **options)
