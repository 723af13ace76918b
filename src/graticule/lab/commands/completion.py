"""Completion of commands, options and their choices in a shell."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import shtab

from graticule.lab.commands.help import Option, options_of
from graticule.lab.recipes.load import list_recipes, load_recipe
from graticule.registry.checks import known_name

SHELLS = ("bash", "zsh", "fish")


def completion(shell: str, commands: Mapping[str, str]) -> str:
    """Return the script that completes `graticule` in a shell.

    Args:
        shell: bash, zsh or fish.
        commands: command -> its purpose.
    """
    known_name("completion", shell, SHELLS)
    parser = argparse.ArgumentParser(prog="graticule")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--completion", choices=SHELLS)
    parsers = parser.add_subparsers()
    for name, about in commands.items():
        command = parsers.add_parser(name, help=about, description=about)
        command.add_argument("--help-all", action="store_true", help="list every option")
        _complete(command.add_argument("--plugin", help="Python file that registers your classes"), "FILE")
        for option in options_of(command_options(name)):
            _add(command, option)
        if name == "train":
            command.add_argument("recipe", choices=list(list_recipes()))
    script: str = shtab.complete(parser, shell)
    return script


def command_options(name: str) -> type:
    """Return the dataclass of a command's options; for train, with the values of its smallest recipe."""
    module = import_module(f"graticule.lab.commands.{name}")
    found: type
    if name == "train":
        found = module.options_class(load_recipe("digits_quick"))
    elif hasattr(module, "options_class"):
        found = module.options_class()
    else:
        own = [one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__]
        found = next(one for one in own if dataclasses.is_dataclass(one) and isinstance(one, type))
    return found


def _add(command: argparse.ArgumentParser, option: Option) -> None:
    """Add an option or an argument to the parser of a command."""
    about = option.about.replace("%", "%%")
    if not option.positional and not option.metavar:
        command.add_argument(f"--{option.name}", action="store_true", help=about)
        return
    given: dict[str, Any] = {"help": about, "choices": option.choices or None}
    if option.positional:
        nargs = ("+" if option.required else "*") if option.many else (None if option.required else "?")
        _complete(command.add_argument(option.name, nargs=nargs, **given), option.metavar)
    else:
        _complete(command.add_argument(f"--{option.name}", nargs="*" if option.many else None, **given), option.metavar)


def _complete(action: Any, metavar: str) -> None:
    """Set the completion of files and folders for options that take them."""
    kind = {"FILE": shtab.FILE, "FOLDER": shtab.DIRECTORY, "RUN": shtab.DIRECTORY, "MODEL": shtab.DIRECTORY}
    if metavar in kind:
        action.complete = kind[metavar]
