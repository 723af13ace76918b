"""Plugins: Python files or entry points of a user that register encodings, joinings, backbones or recipes."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import itertools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from graticule.registry.checks import BrokenContract, checked

GROUP = "graticule.plugins"
#: The commands whose target can be a Python file.
_TAKE_FILES = ("train", "compare", "check")
#: A class or a function, which can be registered.
Definition = Callable[..., Any]
#: The loaded plugins, by resolved path or entry point, in order.
_loaded: list[str] = []
#: The plugins that the command line named, as written there.
_named: list[str] = []
#: Module of every imported plugin, also if its code raised -> its file.
_files: dict[str, Path] = {}
#: File of every plugin that registered something -> its SHA-256 at that time.
_registered: dict[Path, str] = {}


@checked
def load_plugin(name: str | Path, kind: str = "plugin") -> ModuleType:
    """Import a plugin, a file such as `my_methods.py` or an entry point, which registers its classes and recipes.

    It is imported once. Only plugins that the user names are imported.

    Args:
        name: the file or entry point.
        kind: its name in messages.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if there is no such entry point, or the code raises.
    """
    if isinstance(name, str) and not name.endswith(".py") and "/" not in name:
        return _load_entry_point(name)
    path = Path(name)
    if path.is_dir():
        raise ValueError(f"`plugin` must be a Python file (NAME.py), got {str(name)!r}, which is a folder.")
    if not path.is_file():
        raise FileNotFoundError(f"`plugin` must be a Python file (NAME.py), got {str(name)!r}, which does not exist.")
    module_name, file = f"graticule_plugin_{path.stem}_{_hash(path)[:8]}", path.resolve()
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"`plugin` must be a Python file (NAME.py), got {str(name)!r}.")
    module = importlib.util.module_from_spec(spec)
    _files[module_name] = file
    sys.modules[module_name] = module  # pickle and dataclasses look up classes there
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # other files of its folder can be imported, as for a script
    try:
        with _explain_errors(f"the {kind} {path} cannot be imported", path):
            # not by the loader: its cache may be stale after a change within the same second that kept the length
            exec(compile(path.read_bytes(), str(file), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[module_name]
        raise
    if str(file) not in _loaded:
        _loaded.append(str(file))
    return module


def _load_entry_point(name: str) -> ModuleType:
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if name not in installed:
        known = f"installed are {', '.join(sorted(installed))}" if installed else "none is installed"
        raise ValueError(
            f"`plugin` must be a Python file (NAME.py) or an entry point of the group {GROUP}, got {name!r}; {known}."
        )
    with _explain_errors(f"the plugin {name} cannot be imported", Path(name)):
        module: ModuleType = installed[name].load()
    if name not in _loaded:
        _loaded.append(name)
    return module


@contextmanager
def _explain_errors(noun: str, path: Path, passed: type[BaseException] = KeyboardInterrupt) -> Iterator[None]:
    """Raise whatever the code of a user raises as a ValueError that begins with `what`, with the line of the plugin."""
    try:
        yield
    except (KeyboardInterrupt, passed):
        raise
    except BaseException as error:
        if isinstance(error, SyntaxError):
            text, line = error.msg, f" in line {error.lineno}." if error.lineno else "."
        else:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if Path(frame.filename).name == path.name]
            text = f"{type(error).__name__}: {str(error).rstrip('.')}"
            line = f", in line {lines[-1]}." if lines else "."
        raise ValueError(f"{noun}: {text}{line}") from error


def plugin_line(error: BaseException) -> str:
    """Return the last line of a file with registered classes that an error passed through; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(frame.lineno, Path(frame.filename)) for frame in frames if Path(frame.filename).resolve() in _registered]
    return f"in line {lines[-1][0]} of {lines[-1][1].name}" if lines else ""


def describe_error(error: BaseException) -> str:
    """Return the type and the first line of an error, and the line of the user's file that raised it."""
    text = ": ".join(filter(None, (type(error).__name__, str(error).strip().partition("\n")[0].rstrip("."))))
    return ", ".join(filter(None, (str(error) if isinstance(error, BrokenContract) else text, plugin_line(error))))


def load_plugins(names: str | Path | Sequence[str | Path] | None) -> None:
    """Import one plugin or several, in order."""
    for name in [names] if isinstance(names, str | Path) else names or ():
        load_plugin(name)


def call_file(path: Path, function: str) -> Any:
    """Import a Python file of the user as a plugin, call its function of this name, and return the result.

    The result is None if the file has no such function. Other processes need the file only if it registers something.

    Args:
        path: of an existing file.
        function: the name, such as 'recipe'; messages use it for the file, too.

    Raises:
        ValueError: if the code raises, with the line.
    """
    registered, loaded = dict(_registered), list(_loaded)
    build = getattr(load_plugin(path, function), function, None)
    if _registered == registered:
        _loaded[:] = loaded
    with _explain_errors(f"{function}() of {path} cannot be called", path, ValueError):  # which says what to change
        return build() if callable(build) else None


def loaded_plugins() -> list[str]:
    """Return the loaded plugins, for `load_plugin` in another process: paths and entry points."""
    return list(_loaded)


def load_named_plugins(arguments: Sequence[str]) -> list[str]:
    """Import the plugins that `--plugin NAME ...` names in a command line; returns the other arguments.

    All files NAME.py that follow each other are plugins, except that the last one is the target of a command that takes
    a file, if it has none yet.
    """
    others: list[str] = []
    _named.clear()
    words = list(arguments)
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if option != "--plugin":
            others.append(word)
            continue
        name = value if equals else words.pop(0) if words else ""
        if not name or name.startswith("--"):
            raise ValueError(f"`--plugin` must be followed by a Python file or an entry point, got {name!r}.")
        files = list(itertools.takewhile(lambda text: text.endswith(".py") and not text.startswith("-"), words))
        at_end = len(files) == len(words) or words[len(files)].startswith("-")
        lacks_target = others[:1] and others[0] in _TAKE_FILES and all(text.startswith("-") for text in others[1:2])
        if files and at_end and lacks_target:
            files.pop()  # the target
        del words[: len(files)]
        for file in (name, *files):
            load_plugin(file)
            _named.append(file)
    return others


def named_plugins() -> list[str]:
    """Return the plugins that the command line named, as written there."""
    return list(_named)


def check_class(kind: str, name: str, cls: object, base: type) -> None:
    """Check that `cls` is a subclass of `base`."""
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise TypeError(f"the {kind} {name!r} must be a subclass of {base.__name__}, got {cls!r}.")


def note_file(definition: Definition) -> None:
    """Remember the file of a class or function that is registered, if it is not of the package."""
    if (file := source_of(definition)) is not None:
        _registered[file] = _hash(file)


def replaces(definition: Definition, known: Definition) -> bool:
    """Return whether a definition is the same as the known one, or from a later version of the same file."""
    if (known.__qualname__, source_of(known)) == (definition.__qualname__, source_of(definition)):
        return True
    old, new = known.__module__, definition.__module__
    return old != new and old in _files and _files[old] == _files.get(new)


def source_of(definition: Definition) -> Path | None:
    """Return the file of a class or function; None for the package's own and for those without a file."""
    module = str(definition.__module__)  # None for a function of executed code
    if module.partition(".")[0] == __name__.partition(".")[0]:
        return None
    if module in _files:
        return _files[module]
    try:
        file = inspect.getsourcefile(definition)
    except (TypeError, OSError):  # defined in an interactive session
        return None
    return None if file is None or not Path(file).is_file() else Path(file).resolve()


def plugins_of(classes: Iterable[Definition]) -> dict[str, str]:
    """Return the plugins that define classes: the name of the file, and its SHA-256 when it registered something.

    Files with the same name are distinguished by the folders before it.
    """
    files = {file for file in map(source_of, classes) if file in _registered}
    return {_short_name(file, files): _registered[file] for file in sorted(files)}


def missing_plugins(recorded: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the recorded plugins that are not loaded, and those that are loaded but have changed."""
    known = {name: {digest for file, digest in _registered.items() if _ends_with(file, name)} for name in recorded}
    changed = [name for name, digest in recorded.items() if known[name] and digest not in known[name]]
    return [name for name in recorded if not known[name]], changed


def _short_name(file: Path, others: Iterable[Path]) -> str:
    """Return the shortest end of a path that no other path shares."""
    for count in range(1, len(file.parts)):
        name = Path(*file.parts[-count:]).as_posix()
        if not any(_ends_with(other, name) for other in others if other != file):
            return name
    return str(file)


def _ends_with(file: Path, name: str) -> bool:
    parts = Path(name).parts
    return file.parts[-len(parts) :] == parts


def named_again(plugins: Iterable[str]) -> str:
    """Return the options of a command line that load `plugins`."""
    return " ".join(f"--plugin {name}" for name in plugins)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def module_name(target: str) -> tuple[str, str] | None:
    """Return the file and the name of a model that is given as FILE.py:NAME; None for another one."""
    file, _, name = target.rpartition(":")
    return (file, name) if file.endswith(".py") else None
