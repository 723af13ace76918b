"""The choice whether progress bars are drawn."""

from __future__ import annotations

import sys


def hidden(wanted: bool) -> bool:
    """Return whether to hide a progress bar: it is not wanted, or stderr is a file or a pipe.

    In a notebook, where stderr is not a terminal either, bars are drawn.
    """
    return not wanted or not (sys.stderr.isatty() or "ipykernel" in sys.modules)
