"""One HTML page that holds all it shows: nothing is fetched when it is read."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from graticule.analysis.plots import png
from graticule.files import write_bytes

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
:root {{
  color-scheme: light dark;
  --ground: #ffffff; --text: #1c1f23; --soft: #5a636e; --line: #d5dae0; --shade: #f4f6f8; --accent: #0072b2;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --ground: #16181c; --text: #e6e8eb; --soft: #a3abb5; --line: #3a4048; --shade: #202429; --accent: #56b4e9;
  }}
}}
* {{ box-sizing: border-box; }}
body {{
  margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; overflow-wrap: break-word;
  background: var(--ground); color: var(--text);
  font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}}
h1 {{ font-size: 1.8rem; line-height: 1.25; margin: 0; }}
h2 {{ font-size: 1.25rem; line-height: 1.3; margin: 2.5rem 0 0.75rem; }}
.subtitle {{ color: var(--soft); margin: 0.4rem 0 0; }}
header {{ border-bottom: 1px solid var(--line); padding-bottom: 1rem; margin-bottom: 1.5rem; }}
p {{ margin: 0 0 1rem; max-width: 44rem; }}
.note {{
  margin: 0 0 1.25rem; padding: 0.7rem 1rem; max-width: 44rem;
  border-left: 4px solid var(--accent); background: var(--shade);
}}
figure {{ margin: 1.25rem 0 1.75rem; }}
figure img {{ display: block; max-width: 100%; height: auto; background: #ffffff; border-radius: 6px; }}
figure img.wide {{ min-width: 46rem; }}
figcaption {{ color: var(--soft); font-size: 0.9rem; margin: 0.5rem 0; max-width: 44rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.35rem 0.9rem 0.35rem 0; text-align: left; border-bottom: 1px solid var(--line); }}
th {{ border-bottom: 2px solid var(--line); vertical-align: bottom; }}
th, td.number, td:first-child {{ white-space: nowrap; }}
.number {{ text-align: right; }}
@media print {{ figure, table, .note {{ break-inside: avoid; }} }}
</style>
</head>
<body>
<header>
<h1>{title}</h1>
{subtitle}</header>
<main>
{body}
</main>
</body>
</html>
"""
_NUMBER = re.compile(r"[<≈]?\s*[+−-]?\d[\d,. ]*(e[+-]?\d+)?\s*(%|±\s*[\d.,]+)?\s*|[-–]?")


class Report:
    """A page built from top to bottom: every method adds one thing at the end; all text is escaped.

    Args:
        title: of the page.
        subtitle: a line beneath it.

    Example:
        >>> report = Report("Two joinings", "seeds 0 to 4")
        >>> report.table(["joining", "top-1 (%)"], [["default", "71.5"], ["lape", "73.1"]], "ImageNet")
        >>> "<td>lape</td>" in report.html()
        True
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title = title
        self.subtitle = subtitle
        self._parts: list[str] = []

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, paragraph: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{escape(paragraph)}</p>")

    def note(self, text: str) -> None:
        """Add a paragraph set apart: a caution, a finding."""
        self._parts.append(f'<div class="note" role="note">{escape(text)}</div>')

    def table(self, columns: Sequence[object], rows: Iterable[Sequence[object]], caption: str = "") -> None:
        """Add a table; a column of numbers is aligned to the right, a wide table scrolls.

        Raises:
            ValueError: if a row has not as many cells as there are columns.
        """
        cells = [[str(cell) for cell in row] for row in rows]
        for row in cells:
            if len(row) != len(columns):
                raise ValueError(f"`rows` must have {len(columns)} cells each, got {len(row)}: {row}.")
        numeric = [
            any(any(map(str.isdigit, row[i])) for row in cells) and all(_NUMBER.fullmatch(row[i]) for row in cells)
            for i in range(len(columns))
        ]
        kinds = [' class="number"' if number else "" for number in numeric]
        head = "".join(f'<th scope="col"{kind}>{escape(str(c))}</th>' for c, kind in zip(columns, kinds, strict=True))
        body = "\n".join(
            "<tr>" + "".join(f"<td{kind}>{escape(c)}</td>" for c, kind in zip(row, kinds, strict=True)) + "</tr>"
            for row in cells
        )
        # a region that scrolls must take the focus, or a keyboard cannot scroll it
        self._parts.append(
            f'<figure>{_caption(caption)}<div class="scroll" tabindex="0" role="region" '
            f'aria-label="{escape(caption or "table")}"><table>\n<thead><tr>{head}</tr></thead>\n'
            f"<tbody>\n{body}\n</tbody>\n</table></div></figure>"
        )

    def figure(self, picture: Figure | bytes, caption: str, alt: str) -> None:
        """Add a picture, a figure or the bytes of a PNG.

        Args:
            picture: what to show.
            caption: beneath it.
            alt: what one who does not see it should know.

        Raises:
            ValueError: if the bytes are no PNG.
        """
        data = png(picture) if isinstance(picture, Figure) else picture
        if not data.startswith(b"\x89PNG\r\n\x1a\n"):
            raise ValueError(f"`picture` must be a figure or the bytes of a PNG, got {data[:8]!r}.")
        source = base64.b64encode(data).decode("ascii")
        width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))  # from the PNG's first chunk
        kind = ' class="wide"' if width > 2 * height else ""  # on a phone it scrolls rather than shrinks
        self._parts.append(
            f'<figure><div class="scroll" tabindex="0"><img{kind} src="data:image/png;base64,{source}" '
            f'alt="{escape(alt)}" width="{width}" height="{height}"></div>{_caption(caption)}</figure>'
        )

    def html(self) -> str:
        """The page as it stands."""
        subtitle = f'<p class="subtitle">{escape(self.subtitle)}</p>\n' if self.subtitle else ""
        return _PAGE.format(title=escape(self.title), subtitle=subtitle, body="\n".join(self._parts))

    def write(self, path: str | Path) -> Path:
        """Write the page to `path`, whole or not at all; returns the path."""
        return write_bytes(path, self.html().encode("utf-8"))


def _caption(text: str) -> str:
    return f"<figcaption>{escape(text)}</figcaption>" if text else ""
