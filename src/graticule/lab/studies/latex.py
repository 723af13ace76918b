"""Tables for LaTeX."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Characters that LaTeX reads as commands.
_LATEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
}


def latex_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for LaTeX with the package booktabs; the first column, of names, is in typewriter type."""
    cells = [" & ".join([rf"\texttt{{{latex(name)}}}", *map(latex, others)]) for name, *others in rows]
    lines = [
        r"% \usepackage{booktabs}",
        rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}",
        r"\toprule",
        " & ".join(map(latex, columns)) + r" \\",
        r"\midrule",
        *(rf"{row} \\" for row in cells),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def latex(text: str) -> str:
    r"""Escape text for LaTeX; the hyphen of a negative number becomes a minus sign.

    >>> latex("a_b"), latex("-1.5")
    ('a\\_b', '$-$1.5')
    """
    sign = "$-$" if re.fullmatch(r"-[\d.]+", text) else ""
    return sign + "".join(_LATEX.get(c, c) for c in (text[1:] if sign else text))
