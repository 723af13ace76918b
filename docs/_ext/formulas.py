"""Write formulas as MathML, which browsers render without scripts, fonts or network."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)
#: Words such as softmax or LN, which are names of functions, except commands and words within \text{}.
WORD = re.compile(r"(\\[A-Za-z]+\s*(?:\{[^{}]*\})?)|(?<![A-Za-z])([A-Za-z]{2,})(?![A-Za-z])")
#: Commands whose argument is already text.
TEXT = re.compile(r"\\(text|mathrm|operatorname|mathbb|begin|end)\b")


def upright(formula: str) -> str:
    """Make words of several letters upright: 'softmax(x)' -> '\\mathrm{softmax}(x)'."""

    def replacement(match: re.Match[str]) -> str:
        if match[2]:
            return rf"\mathrm{{{match[2]}}}"
        if TEXT.match(match[1]) or "{" not in match[1]:
            return match[1]
        command, _, argument = match[1].partition("{")
        return f"{command}{{{WORD.sub(replacement, argument[:-1])}}}"

    return WORD.sub(replacement, formula)


def mathml(formula: str, block: bool) -> str:
    """Return a formula as MathML.

    Raises:
        MathError: if it cannot be parsed.
    """
    if block and "\\\\" in formula and "\\begin" not in formula:
        formula = rf"\begin{{aligned}}{formula}\end{{aligned}}"
    formula = re.sub(r"\\dots\b", r"\\ldots", formula)
    text: str = tex2mathml(upright(formula), as_block=block)
    return text


def visit(translator: Any, node: nodes.Node) -> None:
    """Write a formula to the page."""
    block = isinstance(node, nodes.math_block)
    try:
        translator.body.append(mathml(node.astext(), block))
    except MathError as error:
        logger.warning("cannot parse formula: %s (%s)", node.astext(), error, location=node)
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register 'mathml' as a writer of formulas."""
    app.add_html_math_renderer("mathml", (visit, None), (visit, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
