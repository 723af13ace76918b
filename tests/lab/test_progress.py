"""Progress bars are drawn only on terminals; a file gets a line at intervals."""

import io
import sys

from graticule.lab import terminal as progress
from graticule.lab.terminal import bar, hidden


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


def test_a_file_gets_a_line_at_intervals_and_nothing_of_a_short_task(monkeypatch):
    file, now = io.StringIO(), [0.0]
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for _ in bar(range(3), "short"):
        pass
    assert not file.getvalue()
    with bar(total=10, desc="long", mininterval=0) as progress_bar:
        for _ in range(10):
            now[0] += 12
            progress_bar.update(1)
            progress_bar.set_postfix(loss=1)
    lines = file.getvalue().splitlines()
    assert [line[:10] for line in lines] == ["long:  30%", "long:  60%", "long:  90%"] and "\r" not in file.getvalue()
    assert list(bar(range(3), wanted=False)) == [0, 1, 2]
