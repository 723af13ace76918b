"""Commands of the command line, run within a test."""

from collections.abc import Iterable
from importlib import import_module

from graticule.lab.cli import main


def command_options(name: str) -> type:
    """Return the dataclass of a command's options."""
    return getattr(import_module(f"graticule.lab.commands.{name}"), f"{name.title()}Options")


def code_of(arguments: Iterable[str]) -> int:
    """Run a command; returns its exit code."""
    try:
        return main(list(arguments))
    except SystemExit as exit:  # after --help
        return int(exit.code or 0)


def run_command(capsys, *arguments: object) -> tuple[int, str, str]:
    """Run a command; returns its exit code and its output."""
    code = code_of(map(str, arguments))
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def refused(capsys, *arguments: object) -> str:
    """Run a command that must fail without any output but one line of an error, after notes; returns the line."""
    code, out, err = run_command(capsys, *arguments)
    assert code in (1, 2) and out == "" and err.count("graticule: error:") == 1, (code, out, err)
    line = err.splitlines()[-1]
    assert line.startswith("graticule: error: ")
    return line
