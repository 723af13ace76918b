"""Repair the accessibility of every page for keyboards and screen readers, where the theme lacks it."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

#: A signature of several lines, which Sphinx writes as a list of definitions without terms.
SIGNATURE = re.compile(r"<dl>\s*((?:<dd>(?:(?!</?dl>).)*?</dd>\s*)+)</dl>", re.DOTALL)

#: A figure outside of a table, and a link that is all that a cell of a table has.
FIGURE = re.compile(r'(?<!<td>)<p>(<img [^>]*src="(?:\.\./)*_images/\w+\.(?:png|svg)"[^>]*>)</p>')
ALONE = re.compile(r'<td>(<p>)?<a class="([^"]*)"([^>]*)>(<span class="std std-doc">)?([^<]*)(?=</)')

#: Code with a slash, which may break after it, as the name of a file.
PATH = re.compile(r'(?<=<span class="pre">)[^<]*/[^<]*')

#: A cell of numbers, which breaks only before an interval, a parenthesis or a slash.
NUMBERS = re.compile(r"(?<=<td><p>)[-+±\d.,%?=†/()\[\] ]+(?=</p></td>)")


def repair(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Give captions a heading level, make code and tables focusable, and write signatures as plain lines."""
    if "furo_navigation_tree" in context:
        tree = context["furo_navigation_tree"]
        context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')
    if "body" in context:
        body = context["body"].replace("<pre>", '<pre tabindex="0">')
        body = body.replace('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper')
        body = body.replace('display="block"', 'display="block" tabindex="0"')
        body = body.replace('<span class="pre">-', '<span class="pre option-name">-')
        body = PATH.sub(lambda path: path[0].replace("/", "/<wbr>"), body)
        body = FIGURE.sub(r'<p class="figure-line" tabindex="0">\1</p>', body)
        body = ALONE.sub(_alone, body)
        body = NUMBERS.sub(lambda cell: re.sub(r" (?![\[(/])", "\N{NO-BREAK SPACE}", cell[0]), body)
        context["body"] = SIGNATURE.sub(_lines, body)


def _lines(match: re.Match[str]) -> str:
    lines = match[1].replace("<dd>", "<span>").replace("</dd>", "</span>")
    return f'<span class="signature-lines">{lines}</span>'


def _alone(match: re.Match[str]) -> str:
    """Return a cell whose link is large enough to be hit, and whose name breaks at its underscores."""
    paragraph, style, rest, span, name = (part or "" for part in match.groups())
    return f'<td>{paragraph}<a class="{style} only-link"{rest}>{span}{name.replace("_", "_<wbr>")}'


def setup(app: Sphinx) -> dict[str, Any]:
    """Repair pages after the theme has filled them."""
    app.connect("html-page-context", repair, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
