"""Write the pages of the API: every public name of every public package, described by its docstring."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_origin

from sphinx.pycode import ModuleAnalyzer

import graticule
from evidence.names import options_table
from graticule.position.position import ENCODINGS

#: The packages whose public names have a page, with a description.
PACKAGES = {
    "encodings": "Base classes to extend, and the parts of encodings. Each encoding has a separate page.",
    "backbones": "Models: vision transformers, pyramids, gated MLPs and mixers, language models.",
    "hub": "Models in folders and on the Hugging Face hub.",
    "surgery": "Operations on an existing model: fold, resize, convert, attach, export.",
    "checkpoints": "Weights, in our names and in published ones.",
    "analysis": "Measurements and figures of the position information in a model.",
    "dense": "Detectors and segmentation models.",
    "external": "Models of other libraries: attention maps and views.",
    "testing": "Contracts that encodings, joinings, resamplers and backbones have to pass, for your own tests.",
    "lab.tasks": "Tasks: data, model, loss and score.",
    "lab.training": "Runs: recipes, training, results.",
    "lab.data": "Data sets, texts and augmentation.",
    "lab.studies": "Comparisons of choices with several seeds.",
    "lab.figures": "Figures of measurements and of runs.",
    "lab.pages": "Pages: reports, audits, the explorer.",
}


#: Public name of `graticule` -> the module that defines it.
HOMES = dict(
    reversed(line.split(" as ")[0].removeprefix("from .").split(" import "))
    for line in Path(graticule.__file__).with_suffix(".pyi").read_text(encoding="utf-8").splitlines()
    if line.startswith("from .")
)


def pages(root: Path) -> dict[str, str]:
    """Return path -> text of each page."""
    lines = [
        "# API",
        "",
        "Shapes use one letter for one thing everywhere: B is the batch, N the tokens, D the channels of the model, H",
        "and W the height and width of the grid in patches, h the heads and d the channels per head. Rows come before",
        "columns.",
        "",
        "```{toctree}",
        "graticule",
        *PACKAGES,
        "```",
        "",
    ]
    texts = {"api/index.md": "\n".join(lines), "api/graticule.md": _top()}
    for name, about in PACKAGES.items():
        texts[f"api/{name}.md"] = _package(name, about)
    return texts


def _top() -> str:
    """Describe the names of `graticule` itself, by the module that defines them."""
    parts = [
        "# graticule\n\nThese names are imported from `graticule`; `import graticule` itself costs milliseconds.\n"
    ]
    homes: dict[str, list[str]] = {}
    for name in graticule.__all__:
        homes.setdefault(HOMES[name], []).append(name)
    for home, names in sorted(homes.items()):
        module = importlib.import_module(f"graticule.{home}")
        about = (inspect.getdoc(module) or "").partition("\n\n")[0]
        parts.append(f"\n## {home}\n\n{about}\n\n")
        parts += [_entry("graticule", name) for name in names]
    return "".join(parts)


def _package(package: str, about: str) -> str:
    module = importlib.import_module(f"graticule.{package}")
    names = [name for name in public_names(module) if name not in graticule.__all__]
    here = [name for name in graticule.__all__ if HOMES[name].startswith(f"{package}.")]
    parts = [f"# graticule.{package}\n\n{about}\n\n"]
    if here:
        links = ", ".join(f"{{py:obj}}`graticule.{name}`" for name in here)
        parts.append(f"Also exported here, and described in [graticule](graticule.md): {links}.\n\n")
    classes = set(ENCODINGS.values())
    parts += [_entry(f"graticule.{package}", name) for name in names if _value(module, name) not in classes]
    if package == "encodings":
        parts.append(f"\n## Names and options\n\nThe defaults are the classes' defaults.\n\n{options_table()}")
    return "".join(parts)


def public_names(module: Any) -> list[str]:
    """Return the public names of a module: its `__all__`, or the functions that it defines."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return [name for name, value in vars(module).items() if not name.startswith("_") and _defined_in(module, value)]


def _defined_in(module: Any, value: Any) -> bool:
    return inspect.isroutine(value) and value.__module__ == module.__name__


def _value(module: Any, name: str) -> Any:
    value = getattr(module, name)
    return value if inspect.isclass(value) else None


def _entry(module: str, name: str) -> str:
    value = getattr(importlib.import_module(module), name)
    options = ""
    if inspect.isclass(value):
        kind, options = "class", "   :members:\n   :show-inheritance:\n"
        if fields := getattr(value, "_fields", None):  # a named tuple documents each as 'Alias for field number 0'
            options += f"   :exclude-members: {', '.join(fields)}\n"
    elif inspect.isroutine(value) or (callable(value) and inspect.getdoc(value)):
        kind = "function"
    else:
        return f"```{{eval-rst}}\n.. py:data:: {module}.{name}\n{_constant(module, name, value)}```\n\n"
    return f"```{{eval-rst}}\n.. auto{kind}:: {module}.{name}\n{options}```\n\n"


def _constant(module: str, name: str, value: Any) -> str:
    """Return the options and the text of a constant, a registry or a module, indented.

    Raises:
        ValueError: if it has no description.
    """
    simple = isinstance(value, int | float | str | tuple) or get_origin(value) is Literal
    text_of_value = repr(value).removeprefix("typing.") if simple else ""
    about = (inspect.getdoc(value) or "").partition("\n\n")[0] if inspect.ismodule(value) else _comment(module, name)
    if not about:
        raise ValueError(f"`{module}.{name}` must have a comment that begins with #: where it is defined.")
    text = "".join(f"   {line}\n" for line in _escaped(about.splitlines()))
    return f"   :value: {text_of_value}\n\n{text}" if text_of_value else f"\n{text}"


def _comment(module: str, name: str) -> str:
    """Return the `#:` comment before `name`, in the file that defines it: of the package, or of another room."""
    top = Path(graticule.__file__).parent
    for path in [*sorted(top.joinpath(*module.split(".")[1:]).rglob("*.py")), *sorted(top.rglob("*.py"))]:
        if f"\n{name}" in path.read_text(encoding="utf-8"):
            lines = ModuleAnalyzer.for_file(str(path), module).find_attr_docs().get(("", name))
            if lines:
                return "\n".join(lines).strip()
    return ""


#: The text of an attribute, stored until napoleon has processed it.
_ATTRIBUTES: dict[str, list[str]] = {}
#: The first line of the description of a field, such as 'after_norm: (N, D), added to the tokens'.
_FIELD = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")
#: Names that become links; all other text in backticks is code, since a word such as `sizes` has many meanings.
_NAME = re.compile(r"^(graticule\.[\w.]+|[A-Z]\w+(\.\w+)?)$")


def process_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Convert a docstring to reStructuredText: lists of fields, code in backticks, no accidental markup."""
    lines[:] = _with_lists(list(_escaped(lines)))
    if what == "attribute":
        _ATTRIBUTES[name] = list(lines)


def keep_attribute(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Restore the text of an attribute: napoleon parses everything before the first colon as a type."""
    lines[:] = _ATTRIBUTES.pop(name, lines)


def _escaped(lines: list[str]) -> Iterator[str]:
    """Escape text that reStructuredText would parse as markup, except directives and examples."""
    inside: int | None = None  # the indentation of a directive
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if inside is not None and line.strip() and depth <= inside:
            inside = None
        if line.lstrip().startswith(".. "):
            inside = depth
        yield line if inside is not None or line.lstrip().startswith(">>>") else _inline(line)


def _inline(line: str) -> str:
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(_code(part) if index % 2 else _plain(part) for index, part in enumerate(parts))


def _code(part: str) -> str:
    name = part[1:-1]
    if not _NAME.match(name):
        return f"`{part}`"
    known = name.partition(".")[0] in graticule.__all__
    return f":py:obj:`~graticule.{name}`" if known else part


def _plain(part: str) -> str:
    part = re.sub(r"(?<![\s(])_(?=\W|$)", r"\\_", part)  # 'name_' is a link
    part = re.sub(r"\*(?=\S)", r"\\*", part)  # '*args' starts emphasis
    return re.sub(r"\|(?=\S)", r"\\|", part)  # '|x|' is a substitution


def _with_lists(lines: list[str]) -> list[str]:
    """Convert paragraphs whose lines describe fields, 'name: text', to lists."""
    converted: list[str] = []
    for index, line in enumerate(lines):
        starts = not index or not lines[index - 1].strip()
        if starts:
            listed = bool(_FIELD.match(line))
        if listed and (match := _FIELD.match(line)):
            converted.append(f"- **{match[1]}**: {line[match.end() :]}")
        elif listed and line.strip():
            converted.append(f"  {line.strip()}")
        else:
            converted.append(line)
    return converted
