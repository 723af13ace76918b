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

#: Command -> its purpose; each is a module of graticule.commands, imported when it is called.
COMMANDS = {
    "models": "list the models, encodings, joinings and recipes",
    "train": "train a recipe, or resume a run",
    "runs": "list the runs of a folder with their progress and results",
    "plot": "draw the training of runs in one figure, one line per run or a mean with a band",
    "evaluate": "evaluate runs at several image sizes or text lengths",
    "predict": "draw and write what a run finds in images: classes, boxes, masks",
    "generate": "continue a text with a run on text",
    "correlations": "draw the position correlations of every layer of a run, and the bias of every head",
    "translation": "measure how far every layer of runs is from translation equivariance",
    "attention": "draw the attention maps of runs, with and without position",
    "mixing": "draw the token mixing of gated MLPs: weights around a token, bias maps, non-locality",
    "resamplers": "try all resamplers on a model at other image sizes: which keeps its features and scores",
    "audit": "measure what position costs a model, where it can be read, and what depends on it: one page",
    "check": "check the position code of a model, a module or a plugin",
    "export": "write a model for ONNX Runtime or torch.export, run the file and compare it",
    "publish": "write a run as a folder for the Hugging Face hub, with a model card",
    "compare": "train several choices with several seeds, and make one table",
    "study": "run a study: a question with its runs, tests and figure, or list the studies",
    "consolidate": "write the weights of a run's checkpoint, sharded or not, to one safetensors file",
    "pack": "pack an image folder or tar shards into Arrow files, or verify them",
    "demo": "train, evaluate and analyze on embedded digits, in minutes",
}
_LIST = "\n".join(f"  {name:14} {about}" for name, about in COMMANDS.items())

USAGE = f"""\
usage: graticule COMMAND ...

Choose a position encoding and how it reaches each layer, train a vision backbone or a language model, and analyze it.

{_LIST}

graticule COMMAND --help lists its options. To begin: graticule train digits_quick
Every command takes --plugin FILE.py, your file that registers encodings, joinings, backbones or recipes.
An error is one line; GRATICULE_DEBUG=1 shows its traceback.
"""


#: The exit code of a process whose reader has closed the pipe, as `head` does.
NO_READER = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 for an error that is reported, 2 for a bad option, 130 if stopped.

    It is 141 if the reader of the output has closed the pipe.
    """
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # the shell closed it
            setattr(sys, stream, io.StringIO())
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:  # here, for at its end Python would complain of what it cannot write
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
    """Run the command that is the first argument; returns its exit code."""
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
    code: int = command.run(arguments[1:])
    return code


def _unread() -> bool:
    """Return whether stdout is a pipe whose reader has gone away, as `head` does.

    Writing once more would not show it: what an unbuffered stdout could not write is lost.
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
    return f"out of memory ({reason or 'MemoryError'}); use smaller images, batches or models."


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
    """Hide messages of Lightning that are for developers, without importing it."""
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
    """Let waiting threads spin only briefly, unless the user chose otherwise.

    OpenMP's threads otherwise spin until the next parallel region, and a training step becomes many times slower as
    soon as another process computes. It has an effect only before torch is imported.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


if __name__ == "__main__":
    sys.exit(main())
