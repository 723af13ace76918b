"""Progress bars: on terminals and in notebooks, and as lines in files."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm.std import tqdm

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


def bar(*arguments: Any, wanted: bool = True, **options: Any) -> tqdm[Any]:
    """Return tqdm's bar, or lines if stderr is a file or a pipe; it shows nothing if it is not wanted."""
    from tqdm.auto import tqdm as notebook_tqdm  # imports asyncio

    # in a notebook stderr is no terminal either
    kind: type[tqdm[Any]] = notebook_tqdm if sys.stderr.isatty() or "ipykernel" in sys.modules else PlainProgress
    return kind(*arguments, disable=not wanted, **options)
