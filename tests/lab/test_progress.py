"""Progress bars are drawn only on terminals; a file gets a line at intervals."""

import io
import sys

import pytest

from graticule.lab import terminal as progress
from graticule.lab.terminal import PlainProgress, bar


@pytest.mark.parametrize(("terminal", "notebook"), [(False, False), (True, False), (False, True)])
def test_bars_are_drawn_on_a_terminal_and_in_a_notebook_alone(monkeypatch, terminal, notebook):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    if notebook:
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert isinstance(bar(wanted=False), PlainProgress) != (terminal or notebook)


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
