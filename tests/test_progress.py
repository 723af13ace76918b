"""Progress bars are drawn only on terminals."""

import io
import sys

from graticule.progress import hidden


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self):
        return True


def test_bars_are_drawn_on_a_terminal_and_in_a_notebook_alone(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert hidden(True) and hidden(False)
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert not hidden(True) and hidden(False)
    monkeypatch.delitem(sys.modules, "ipykernel")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert not hidden(True) and hidden(False)
