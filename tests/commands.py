"""Commands of the command line, run within a test."""

import dataclasses
from importlib import import_module

from graticule.lab.cli import main


def command_options(name: str) -> type:
    """Return the dataclass of a command's options."""
    module = import_module(f"graticule.lab.commands.{name}")
    if hasattr(module, "options_class"):
        return module.options_class()
    classes = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    return next(value for value in classes if dataclasses.is_dataclass(value) and isinstance(value, type))


def run_command(capsys, *arguments: object) -> tuple[int, str, str]:
    """Run a command; returns its exit code and its output."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as exit:  # after --help
        code = int(exit.code or 0)
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
