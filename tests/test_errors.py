"""Every error message of the package names its subject, the given value or a remedy, and is a sentence.

`python tests/test_errors.py` lists them all, for review.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "graticule"
#: Errors that users see; others are caught within the package, or belong to Python's protocols.
KINDS = {
    *("ValueError", "TypeError", "FileNotFoundError", "FileExistsError", "ImportError", "OSError", "RuntimeError"),
    *("FloatingPointError", "ChildProcessError", "BlockingIOError", "BadOption"),
}
#: Files with reasons that become part of another message, which names the file or the option.
REASONS = {
    *(
        "lab/data/sets/coco.py",
        "lab/data/images.py",
        "lab/data/sets/mask_folder.py",
    ),
    *("testing/subject.py", "lab/studies/runs.py"),
}


def said(node: ast.expr) -> str:
    """Return the text of a message, with formatted values in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(said(part) if isinstance(part, ast.Constant) else "{...}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return said(node.left) + said(node.right)
    return "{...}"


def messages() -> Iterator[tuple[str, str]]:
    """Yield location, as FILE:LINE, and text of every message."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            raised = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(raised, ast.Call) and raised.args and ast.unparse(raised.func) in KINDS:
                text = said(raised.args[0])
                if text != "{...}":  # which is composed elsewhere
                    yield f"{path.relative_to(SOURCE)}:{node.lineno}", text


@cache
def whole() -> list[tuple[str, str]]:
    """Return location and text of the messages that are not composed elsewhere."""
    return [(place, text) for place, text in messages() if place.partition(":")[0] not in REASONS or "`" in text]


def test_there_are_messages_to_read():
    assert len(whole()) > 500


def test_every_message_names_its_subject_at_its_beginning():
    found = [one for one in whole() if not re.search(r"`|\{\.\.\.\}", " ".join(one[1].split()[:8]))]
    assert not found, "names neither an argument in backticks nor what the message is about"


def test_every_message_is_a_sentence():
    found = [one for one in whole() if not re.search(r"[.?]$|\{\.\.\.\}$|install \S+$", one[1])]
    assert not found, "has no end"
    assert not [one for one in whole() if re.search(r"\b(invalid|illegal|please|oops|bad)\b", one[1], re.IGNORECASE)]


def test_every_message_names_the_given_value_or_a_remedy():
    to_do = r"\bgot\b|left out|be given|call |use |pass |run |give |pip install|see |again|\{\.\.\.\}"
    found = [one for one in whole() if not re.search(to_do, one[1])]
    assert not found, "says neither what came nor what to do"


def test_an_argument_is_in_backticks_without_dashes():
    found = [one for one in whole() if re.search(r"`--(?!plugin|resume|output|auto-resume)[^`]*`", one[1])]
    assert not found, "names an option where Python has an argument of the same name"


if __name__ == "__main__":
    print(*(f"{place}  {text}" for place, text in messages()), sep="\n")
