"""A command of the command line, run within a test."""

from graticule.lab.cli import main


def run_command(capsys, *arguments: object) -> tuple[int, str, str]:
    """Run a command; returns its exit code and its output."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as exit:  # after --help
        code = int(exit.code or 0)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err
