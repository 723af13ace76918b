"""The command `graticule`."""

from __future__ import annotations

import io
import os
import re
import select
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from types import FrameType

from graticule import __version__
from graticule.lab.training.run_folder import STOPPED, Interrupted, Preempted, handling_signals, requeue_code
from graticule.registry.checks import BrokenContract, install, known_name, printable
from graticule.registry.plugins import describe_error, load_named_plugins, plugin_line
from graticule.system.allocator import keep_freed_memory

#: Group -> command -> its purpose; each command is a module of graticule.lab.commands, imported when it is called.
_GROUPS = {
    "Train and compare": {
        "train": "train a recipe, or resume a run",
        "compare": "train several choices with several seeds: one table",
        "demo": "train, evaluate and analyze on embedded digits, in minutes",
    },
    "Look": {
        "evaluate": "score models, also at several image sizes",
        "predict": "draw and write predictions of a run: classes, boxes, masks",
        "runs": "list runs with their progress and results",
        "analyze": "draw position in each layer: correlations, attention, mixing",
        "explore": "write a page that shows position and attention of chosen tokens",
        "audit": "write a page on the cost of position and where it can be read",
    },
    "Models": {
        "models": "list models, encodings, joinings, and which go together",
        "adapt": "replace the position of a trained model by distillation",
        "check": "check the position code of a model, a module or a plugin",
        "identify": "name the encoding that equals position code of any model",
    },
    "Files": {
        "new": "write a template of a plugin, and a test for it",
        "export": "write a model for ONNX Runtime or torch.export, or its weights",
        "publish": "write a run as a folder for the Hugging Face hub",
        "resize": "resize the position embeddings of a model, and save it",
        "debias": "remove position information from features, and save the model",
    },
}
COMMANDS = {name: about for group in _GROUPS.values() for name, about in group.items()}
_LIST = "\n".join(
    "\n".join([f"{title}:", *(f"  {name:14} {about}" for name, about in group.items())])
    for title, group in _GROUPS.items()
)

USAGE = f"""\
usage: graticule COMMAND TARGET [options]

Choose a position encoding and how it reaches each layer, train a vision
backbone or a language model, and analyze it.

{_LIST}

To begin: graticule train digits_quick
COMMAND --help shows examples and common options, --help-all all of them.
--plugin FILE ... loads your Python files, with encodings, recipes, ..., and
--json prints tables as JSON. GRATICULE_DEBUG=1 shows the traceback of an error.
"""

#: Commands that resume their work when they are called again.
RESUMABLE = {"compare", "demo"}

#: The exit code of a process whose reader has closed the pipe, as `head` does.
NO_READER = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 for an error that is reported, 2 for a bad option, 130 if stopped,
    75 if a signal of a cluster stopped a command that can be resumed.

    It is 141 if the reader of the output has closed the pipe.
    """
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # the shell closed it
            setattr(sys, stream, io.StringIO())
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:  # here, because at exit Python would report a failed write itself
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ngraticule: stopped.", file=sys.stderr)
        return STOPPED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _unread():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest of the buffer
            return NO_READER
        message = _beyond_memory(error) or (str(error) if isinstance(error, _named_mistakes()) else None)
        if isinstance(error, BrokenContract) or (plugin_line(error) and "`" not in (message or "")):
            message = f"{describe_error(error)}; GRATICULE_DEBUG=1 shows the traceback."
        if os.environ.get("GRATICULE_DEBUG") or message is None:
            raise
        if isinstance(error, ModuleNotFoundError) and "pip install" not in message:
            message += f"; {install('lab')} installs what the commands need."
        print("graticule: error:", printable(message.strip()), file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # the disk is full, which Python would report again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2 if type(error).__name__ == "BadArguments" else 1


def _run(arguments: list[str]) -> int:
    """Run the command that is the first argument; returns its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    if arguments[0] == "help":
        return _run([*arguments[1:], "--help"])
    _quiet()
    _share_cores()
    keep_freed_memory()
    arguments = load_named_plugins(arguments)
    name = known_name("COMMAND", arguments[0], COMMANDS)
    return (_run_resumable if name in RESUMABLE else _run_command)(name, arguments[1:])


def _run_command(name: str, arguments: list[str]) -> int:
    """Read the options of a command, without PyTorch, and run it."""
    from graticule.lab.commands.options import parse  # not needed for the list of commands

    command = import_module(f"graticule.lab.commands.{name}")
    if hasattr(command, "read"):
        options = command.read(arguments)
    else:
        options = parse(getattr(command, f"{name.title()}Options"), name, arguments)
    return command.run(options)


def _run_resumable(name: str, arguments: list[str]) -> int:
    """Run a command that resumes when called again; if it is stopped, also between two runs, print one line."""
    requeue = requeue_code()

    def stop(number: int, frame: FrameType | None) -> None:
        raise Preempted

    try:
        with handling_signals(stop):
            return _run_command(name, arguments)
    except Preempted:
        print("graticule: stopped on a signal; the same command resumes it.", file=sys.stderr)
        return requeue
    except (Interrupted, KeyboardInterrupt):
        print("\ngraticule: stopped; the same command resumes it.", file=sys.stderr)
        return STOPPED


def _unread() -> bool:
    """Return whether stdout is a pipe whose reader has gone away, as `head` does.

    Another write would not show it: an unbuffered stdout loses what it could not write.
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
    of_torch = isinstance(error, RuntimeError) and re.search("out of memory|can't allocate|not enough memory", reason)
    if not isinstance(error, MemoryError) and not of_torch:
        return None
    return f"out of memory ({reason or 'MemoryError'}); use smaller images, batches or models, or shorter texts."


def _named_mistakes() -> tuple[type[Exception], ...]:
    """Return the errors that a user can fix, which are shown without a traceback (GRATICULE_DEBUG=1 shows it)."""
    mistakes: tuple[type[Exception], ...] = (ValueError, OSError, ImportError, FloatingPointError)
    # importing it takes seconds, and many commands do not need it
    lightning = sys.modules.get("lightning_fabric.utilities.exceptions")
    return mistakes if lightning is None else (*mistakes, lightning.MisconfigurationException)


def _quiet() -> None:
    """Hide warnings of Fabric for developers, and the retries of the hub's client; imports neither."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    warnings.filterwarnings("ignore", module=r"lightning_fabric\..*")
    warnings.filterwarnings("ignore", module=r"torch\..*", category=FutureWarning)


def _share_cores() -> None:
    """Let waiting threads spin only briefly, unless the user chose otherwise.

    OpenMP's threads otherwise spin until the next parallel region, and a training step becomes many times slower as
    soon as another process computes. It has an effect only before torch is imported.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"
