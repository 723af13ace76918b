"""The command `graticule`."""

from __future__ import annotations

import io
import logging
import os
import re
import select
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from graticule.checks import printable
from graticule.names import known_name
from graticule.plugins import load_named_plugins

#: What there is, and what it is for; each is a module of graticule.commands, imported when it is asked for.
COMMANDS = {
    "models": "list the models, encodings, joinings and recipes",
    "train": "train a recipe, or go on with a run",
    "runs": "list the runs of a folder: how far they are, and what came of them",
    "plot": "draw the training of runs in one picture, a line a run or a mean with a band",
    "evaluate": "scores of runs at several image sizes or text lengths",
    "generate": "let a run on text go on with a text",
    "correlations": "draw position as every layer of a run sees it, and the bias of every head",
    "translation": "how far every layer of runs is from translation equivariance",
    "attention": "draw the attention maps of runs, with and without position",
    "mixing": "draw what gated MLPs mix: weights around a token, bias maps, non-locality",
    "compare": "several choices with several seeds, one table",
    "consolidate": "put the weights of a run's checkpoint, shared out or not, into one safetensors file",
    "pack": "pack an image folder into shards, or check shards",
    "demo": "the whole chain on embedded digits, in minutes",
}
_LIST = "\n".join(f"  {name:14} {about}" for name, about in COMMANDS.items())

USAGE = f"""\
usage: graticule COMMAND ...

Choose a position embedding and how it reaches each layer, train a vision backbone or a language model, and see what
came of it.

{_LIST}

graticule COMMAND --help says more. To begin: graticule train digits_quick
Every command takes --plugin FILE.py, your file that registers encodings, joinings, backbones or recipes.
An error is one line; GRATICULE_DEBUG=1 shows where it came from.
"""


#: What a shell says of a process whose reader went away, as `head` does.
NO_READER = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 for a mistake that is named, 2 for a bad option, 130 if stopped.

    It is 141 where nobody reads what is printed any more.
    """
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # the shell closed it
            setattr(sys, stream, io.StringIO())
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:  # here, for Python would complain of what it cannot write when it ends
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ngraticule: stopped.", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _unread():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left in the buffer
            return NO_READER
        said = _beyond_memory(error) or (str(error) if isinstance(error, _named_mistakes()) else None)
        if os.environ.get("GRATICULE_DEBUG") or said is None:
            raise
        print(f"graticule: error: {printable(said.strip())}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # of a full disk, of which Python would complain when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: list[str]) -> int:
    """Run the command that the first argument names; returns its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(version("graticule"))
        return 0
    _quiet()
    _share_cores()
    arguments = load_named_plugins(arguments)
    command = import_module(f"graticule.commands.{known_name('COMMAND', arguments[0], COMMANDS)}")
    return command.run(arguments[1:])


def _unread() -> bool:
    """Return whether stdout is a pipe whose reader has gone away, as `head` does.

    Writing once more would not tell: what an unbuffered stdout could not write is gone.
    """
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (AttributeError, io.UnsupportedOperation):  # closed, or no file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _beyond_memory(error: Exception) -> str | None:
    """Return the message for an allocation that failed; None for any other error."""
    reason = str(error).strip().partition("\n")[0]
    found = isinstance(error, RuntimeError) and re.search("out of memory|can't allocate|not enough memory", reason)
    if not isinstance(error, MemoryError) and not found:
        return None
    return f"the memory does not hold this ({reason or 'MemoryError'}); smaller images, batches or models need less."


def _named_mistakes() -> tuple[type[Exception], ...]:
    """Return the errors that a user can fix, which are shown without a traceback (GRATICULE_DEBUG=1 shows it)."""
    mistakes: tuple[type[Exception], ...] = (ValueError, OSError, ImportError, FloatingPointError)
    lightning = sys.modules.get(
        "lightning.fabric.utilities.exceptions"
    )  # it costs seconds, and many commands need none
    return mistakes if lightning is None else (*mistakes, lightning.MisconfigurationException)


class _ErrorsOnly(logging.Logger):
    """A logger that stays at the level ERROR: Lightning sets its own to INFO when it is imported."""

    def setLevel(self, level: int | str) -> None:
        """Set the level to ERROR, whatever `level`."""
        super().setLevel(logging.ERROR)


def _quiet() -> None:
    """Keep messages of Lightning for its developers from the user's screen, without importing it."""
    kind = logging.getLoggerClass()
    logging.setLoggerClass(_ErrorsOnly)
    try:
        for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
            logging.getLogger(name).setLevel(logging.ERROR)
    finally:
        logging.setLoggerClass(kind)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    warnings.filterwarnings("ignore", module=r"torch\..*", category=FutureWarning)


def _share_cores() -> None:
    """Let threads that wait for each other spin only briefly, unless the user chose otherwise.

    OpenMP's threads otherwise spin until the next parallel region, and a training step becomes many times slower as
    soon as another process computes. It has an effect only before torch is imported.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


if __name__ == "__main__":
    sys.exit(main())
