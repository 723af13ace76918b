"""Every error message of the package names its subject, the given value or a remedy, and is a sentence."""

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "graticule"
#: Errors that users see; others are caught within the package, or belong to Python's protocols.
KINDS = {
    *("ValueError", "TypeError", "FileNotFoundError", "FileExistsError", "ImportError", "OSError", "RuntimeError"),
    *("FloatingPointError", "ChildProcessError", "BlockingIOError", "BadOption"),
}
#: Files with reasons that become part of another message, which names the file or the option.
REASONS = (
    *("lab/data/sets/coco.py", "lab/data/images.py", "lab/data/sets/mask_folder.py"),
    *("testing/model_under_test.py", "lab/studies/runs.py"),
)
#: Pattern that every message has, or must not have -> the reason.
RULES = {
    r"^(?:\S+\s+){0,7}\S*(?:`|\{\.\.\.\})": "names an argument in backticks, or the subject, at its beginning",
    r"(?:[.?]|\{\.\.\.\}|install \S+)$": "is a sentence",
    r"\bgot\b|left out|be given|call |use |pass |run |give |pip install|see |again|\{\.\.\.\}": "has value or remedy",
    r"^(?!.*\b(?i:invalid|illegal|please|oops|bad)\b)": "has no filler",
    r"^(?!.*`--(?!plugin|resume|output|auto-resume)[^`]*`)": "names the argument, not the option",
}


def text_of(node: ast.expr) -> str:
    """Return the text of a message, with formatted values in braces."""
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(text_of(part) if isinstance(part, ast.Constant) else "{...}" for part in node.values)
        case ast.BinOp():
            return text_of(node.left) + text_of(node.right)
    return "{...}"


def messages() -> dict[str, str]:
    """Return location -> text of the messages that are not composed elsewhere."""
    texts = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            error = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(error, ast.Call) and error.args and ast.unparse(error.func) in KINDS:
                text, name = text_of(error.args[0]), path.relative_to(SOURCE).as_posix()
                if text != "{...}" and (name not in REASONS or "`" in text):
                    texts[f"{name}:{node.lineno}"] = text
    return texts


def test_every_message_keeps_the_rules():
    texts = messages()
    assert len(texts) > 400
    for pattern, rule in RULES.items():
        assert {place: text for place, text in texts.items() if not re.search(pattern, text, re.DOTALL)} == {}, rule
