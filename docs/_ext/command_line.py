"""Write one page with the help of every command, as printed on an 80-column terminal."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from unittest.mock import patch

from graticule.lab.cli import COMMANDS, main
from graticule.lab.commands.analyze import KINDS

HEAD = """# Command line

`graticule COMMAND TARGET [options]`. Names of models, encodings and joinings are the same as in Python, with their
options: `--encoding "rope(base=100)"`. This is the help of each command as printed on a terminal of 80 columns;
`--help-all` adds rare options.

`--output` is a folder; a command that writes one file also takes the name of the file. With `--json`, commands that
print a table print only JSON on stdout; progress and errors are on stderr. An error is one line, and the exit code 1,
or 2 for an option or a value that cannot be parsed.

"""


def help_of(arguments: list[str]) -> str:
    """Return the output of `graticule ARGUMENTS` on a terminal of 80 columns.

    Raises:
        ValueError: if the command fails.
    """
    printed = io.StringIO()
    code: object = 0
    with patch.dict(os.environ, {"COLUMNS": "80"}), contextlib.redirect_stdout(printed):
        try:
            code = main(arguments)
        except SystemExit as stopped:
            code = stopped.code
    text = printed.getvalue()
    if code or not text.strip():
        raise ValueError(f"`graticule {' '.join(arguments)}` must print its help, got exit code {code}.")
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def pages(root: Path) -> dict[str, str]:
    """Return path -> text of the page."""
    parts = [HEAD, f"```text\n{help_of(['--help'])}\n```\n"]
    for name in COMMANDS:
        parts.append(f"\n## graticule {name}\n\n```text\n{help_of([name, '--help'])}\n```\n")
        for kind in KINDS if name == "analyze" else ():
            parts.append(f"\n### graticule analyze {kind}\n\n```text\n{help_of([name, kind, '--help'])}\n```\n")
    return {"commands/index.md": "".join(parts)}
