"""`graticule new`."""

from __future__ import annotations

import keyword
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Literal

from graticule.lab.arguments import Positional
from graticule.lab.commands.models import list_names
from graticule.lab.commands.options import Options, output_folder, print_written
from graticule.system.files import write_text


@dataclass
class NewOptions(Options):
    """Write a working Python file to start from, and a passing test of it.

        graticule new encoding my_encoding
        graticule new joining my_joining --output methods

    The file is a plugin: commands take it as --plugin my_encoding.py. An encoding is a table of one row per token,
    which joinings pass to the layers; a bias is added to the attention logits; a rotary encoding rotates queries and
    keys.
    """

    kind: Positional[Literal["encoding", "bias", "rotary", "joining", "backbone", "dataset", "recipe", "task"]]
    """kind of class or function in the file"""
    name: Positional[str]
    """its name, an identifier such as my_encoding"""
    output: Path = Path()
    """folder to write to (default: this one)"""


_TEMPLATES = Path(__file__).parent / "templates"
#: The kinds that `graticule check FILE.py` checks.
_CHECKED = {"encoding", "bias", "rotary", "joining", "backbone", "task"}
#: Kind -> arguments of `graticule train` that try a file of that kind.
_TRY = {
    **dict.fromkeys(("encoding", "bias", "rotary"), "digits_quick --plugin {file} --encoding {name}"),
    "joining": "digits_quick --plugin {file} --joining {name}",
    "backbone": "digits_quick --plugin {file} --model {name}",
    "dataset": "digits_quick --plugin {file} --dataset {name}",
    "recipe": "{name} --plugin {file}",
    "task": "{name}_digits --plugin {file}",
}


def run(options: NewOptions) -> int:
    """Write a plugin and its test."""
    name, file = options.name, output_folder(options.output, Path()) / f"{options.name}.py"
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise ValueError(f"`name` must be an identifier, such as my_{options.kind}, got {name!r}.")
    if any(name in names for names in list_names().values()):
        raise ValueError(f"`name` must be new, got {name!r}, which graticule has already.")
    test = file.with_name(f"test_{name}.py")
    for path in (file, test):
        if path.exists():
            raise ValueError(f"`name` must be new, got {name!r}, for which {path} exists.")

    parts = {"name": name, "cls": "".join(part.capitalize() for part in name.split("_")), "file": file.name}
    for path, template in ((file, options.kind), (test, f"test_{options.kind}")):
        text = (_TEMPLATES / f"{template}.py.txt").read_text(encoding="utf-8")
        write_text(path, Template(text).substitute(parts))
    print_written(file, test)
    print(f"check it: graticule check {file}" if options.kind in _CHECKED else f"test it:  pytest {test}")
    print(f"run it:   graticule train {_TRY[options.kind].format(name=name, file=file)}")
    return 0
