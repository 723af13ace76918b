"""Figures as files: PNG, PDF and SVG."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.textpath import text_to_path

from graticule.registry.checks import printable
from graticule.system.files import write_bytes

DPI = 150
#: Formats of files, and the metadata that leaves out the date, so that the same figure gives the same bytes.
_UNDATED = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
FORMATS = tuple(_UNDATED)


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write `figure` to `path`, completely or not at all, in the format that its suffix names; returns the path.

    A PNG has 150 dots per inch; a PDF and an SVG are drawn as lines and text, and scale to any size. The same figure
    gives the same bytes.
    """
    kind = Path(path).suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise ValueError(f"`path` must end with .png, .pdf or .svg, got {str(path)!r}.")
    return write_bytes(path, render(figure, kind))


def png(figure: Figure) -> bytes:
    """Render `figure` as a PNG at 150 dots per inch."""
    return render(figure, "png")


def render(figure: Figure, kind: str) -> bytes:
    """Render `figure` in one of `FORMATS`.

    Titles and notes that are wider than the figure, such as long names of runs, become smaller. Names in it are drawn
    literally: $ does not start mathematics, and characters that cannot be drawn are escaped.
    """
    for text in _texts(figure):
        text.set_parse_math(False)
        text.set_text("\n".join(printable(line) for line in text.get_text().split("\n")))
    for text in figure.texts:
        _fit_width(text, 72 * figure.get_figwidth())
    buffer = io.BytesIO()
    # fonts that publishers accept (TrueType instead of Type 3), and names of elements that are not random
    with rc_context({"pdf.fonttype": 42, "svg.hashsalt": "graticule"}):
        figure.savefig(buffer, format=kind, dpi=DPI, facecolor="white", metadata=_UNDATED[kind])
    return buffer.getvalue()


def _fit_width(text: Text, width: float) -> None:
    """Make a centered text smaller if it is wider than its figure, whose `width` is in points."""
    font, middle = text.get_fontproperties(), text.get_position()[0]
    lines = text.get_text().split("\n")
    longest = max(text_to_path.get_text_width_height_descent(line, font, ismath=False)[0] for line in lines)
    space = 0.95 * 2 * min(middle, 1 - middle) * width
    if text.get_horizontalalignment() == "center" and longest > space:
        text.set_fontsize(font.get_size_in_points() * space / longest)


def _texts(figure: Figure) -> list[Text]:
    """Return all texts of a figure except the tick labels, which matplotlib writes."""
    axes = [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)]
    ticks = [tick for axis in axes for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())]
    labels = {label for tick in ticks for label in (tick.label1, tick.label2)} | {axis.offsetText for axis in axes}
    return [text for text in figure.findobj(Text) if isinstance(text, Text) and text not in labels]
