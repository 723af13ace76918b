"""Completion of commands, options and their choices in a shell."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import shtab

from graticule.lab.arguments import options_of
from graticule.lab.recipes.load import list_recipes
from graticule.registry.checks import known_name

SHELLS = ("bash", "zsh", "fish")
_FILES = {"FILE": shtab.FILE, **dict.fromkeys(("FOLDER", "RUN", "MODEL"), shtab.DIRECTORY)}


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
        plugin: Any = command.add_argument("--plugin", nargs="+", help="Python files that register your classes")
        plugin.complete = shtab.FILE
        for option in options_of(command_options(name)):
            action: Any = option.add_to(command)
            action.choices = option.choices or None
            if option.word in _FILES:
                action.complete = _FILES[option.word]
        if name == "train":
            command.add_argument("recipe", choices=list(list_recipes()))
    script: str = shtab.complete(parser, shell)
    return script


def command_options(name: str) -> type:
    """Return the dataclass of a command's options."""
    module = import_module(f"graticule.lab.commands.{name}")
    if hasattr(module, "options_class"):
        found: type = module.options_class()
        return found
    own = [one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__]
    return next(one for one in own if dataclasses.is_dataclass(one) and isinstance(one, type))
