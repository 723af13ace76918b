"""What commands share: reading options, opening runs, printing tables."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from graticule.checks import parse_sizes as parse_sizes
from graticule.checks import printable
from graticule.commands.help import help_registry
from graticule.run_folder import RunFolder


def parse(kind: Any, name: str, arguments: list[str], **kwargs: Any) -> Any:
    """Parse typed options; an unknown one is an error that lists the known ones."""
    _check_order(kind, name, arguments)
    prog = f"graticule {name}"
    parsed, unknown = tyro.cli(
        kind, prog=prog, args=arguments, return_unknown_args=True, registry=help_registry(), **kwargs
    )
    if unknown:
        options = option_names(kind)
        close = difflib.get_close_matches(unknown[0].replace("_", "-").partition("=")[0], options, n=2)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(f"unknown option {unknown[0]!r}; {hint}The options are: {' '.join(options)}")
    return parsed


def _check_order(kind: Any, name: str, arguments: Sequence[str]) -> None:
    """Check that an option of several values did not take what the command is about.

    Raises:
        ValueError: with the order that works.
    """
    types = {field.name.replace("_", "-"): str(field.type) for field in dataclasses.fields(kind)}
    wanted = [
        field.name
        for field in dataclasses.fields(kind)
        if "Positional" in str(field.type) and field.default is field.default_factory  # both are missing
    ]
    taken: dict[str, list[str]] = {}
    option, free = "", True  # whether the next value is no option's
    for text in arguments:
        if text in ("-h", "--help"):
            return
        if text.startswith("--"):
            option, equals, value = text[2:].replace("_", "-").partition("=")
            free = types.get(option, "bool") == "bool" or bool(equals and not types[option].startswith("list"))
            if types.get(option, "").startswith("list"):
                taken[option] = [value] if equals else []
        elif option in taken:
            taken[option].append(text)
        elif free:
            return
        else:
            free = True
    if wanted and any(taken.values()):
        option, values = next((option, values) for option, values in reversed(taken.items()) if values)
        *before, last = values
        raise ValueError(
            f"`{wanted[0]}` must stand before --{option}, which takes every value up to the next option, got "
            f"--{option} {' '.join(values)}; write graticule {name} {last} --{option} {' '.join(before) or '...'}"
        )


def overridden(recipe: Any, arguments: list[str], command: str) -> Any:
    """Parse overrides of a recipe; a value that it refuses is an error of ours, not of the parser."""

    @dataclasses.dataclass
    class Overrides:
        recipe: Any = dataclasses.field(default_factory=lambda: recipe)

    Overrides.__annotations__["recipe"] = Annotated[type(recipe), tyro.conf.arg(name="")]
    return parse(Overrides, command, arguments).recipe


def option_names(kind: Any, prefix: str = "--") -> list[str]:
    """List the options of a dataclass, those of a recipe in it without its name."""
    found = []
    for field in dataclasses.fields(kind):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        renamed = re.search(r"arg\(name=\W(\w+)", str(field.type))
        name = prefix + ("" if field.name == "recipe" else (renamed[1] if renamed else field.name).replace("_", "-"))
        if dataclasses.is_dataclass(default):
            found += option_names(type(default), name if name == prefix else name + ".")
        elif "Positional" not in str(field.type):
            found.append(name)
            if default is True:
                found.append(f"{prefix}no-{field.name.replace('_', '-')}")
    return found


def parse_checkpoint(given: str) -> Any:
    """Check that it is best or last."""
    if given not in ("best", "last"):
        raise ValueError(f"`checkpoint` must be best or last, got {given!r}.")
    return given


def parse_part(given: str | None) -> tuple[int, int] | None:
    """Read K/N, a part of the runs of a comparison or study."""
    if given is None:
        return None
    number, _, parts = given.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts) < 10**6):
        raise ValueError(f"`part` must be K/N with K from 1 to N, as 2/4, got {given!r}.")
    return int(number), int(parts)


def choose_device(given: str) -> str:
    """Turn auto into cuda where there is a GPU, and into cpu elsewhere.

    Raises:
        ValueError: for a device that is not there.
    """
    import torch

    if given == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.Generator(given)
    except (RuntimeError, AssertionError) as error:  # the latter where PyTorch was built without it
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"`device` must be one that PyTorch has here, as cpu, got {given!r} ({reason}).") from None
    return given


def open_runs(folders: Sequence[Path], command: str) -> list[Any]:
    """Open runs, at least one and all different; a folder that holds none is an error before PyTorch is imported."""
    if not folders:
        raise ValueError(f"`runs` must be one run folder or more, got none; see graticule {command} --help.")
    if len(set(folders)) < len(folders):
        raise ValueError(f"`runs` must differ, got {', '.join(map(str, folders))}.")
    found = [RunFolder.open(folder) for folder in folders]
    from graticule.training import Run

    return [Run(one.folder) for one in found]


def run_labels(runs: Sequence[Any]) -> list[str]:
    """Name runs by what tells their folders apart."""
    folders = [run.folder.resolve() for run in runs]
    if len(folders) == 1:
        return [printable(folders[0].name)]
    common = Path(os.path.commonpath(folders))
    names = [folder.relative_to(common).parts for folder in folders]
    while len({parts[-1:] for parts in names}) == 1 and all(len(parts) > 1 for parts in names):
        names = [parts[:-1] for parts in names]
    return [printable("/".join(parts) or common.name) for parts in names]


def output_folder(given: Path | None, default: Path) -> Path:
    """Return the folder that a command writes into.

    Raises:
        ValueError: if `output` is there and no folder.
    """
    if given is not None and given.exists() and not given.is_dir():
        raise ValueError(f"`output` must be a folder, got {str(given)!r}, which is none.")
    return given or default


def print_written(*paths: Path) -> None:
    """Print what a command wrote."""
    names = [printable(str(path)) for path in paths]
    print(f"wrote {' and '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)}")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, the first column to the left and the others to the right."""
    columns, *rows = ([printable(cell) for cell in row] for row in (columns, *rows))
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, ["-" * width for width in widths], *rows]:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
