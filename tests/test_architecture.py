"""Architecture: imports point one way and stand at the top of a file; names say what a value is, and name one class."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "graticule"

#: Rooms from bottom to top; a file imports only from its own room and from rooms before it. First the library, then
#: the lab.
FLOORS = (
    *("system", "registry", "position", "encodings", "layers", "checkpoints", "hub", "backbones", "dense"),
    *("surgery", "external", "analysis", "testing"),
    *("lab.terminal", "lab.arguments", "lab.data", "lab.training", "lab.figures", "lab.tasks", "lab.recipes"),
    *("lab.studies", "lab.pages", "lab.testing", "lab.commands", "lab.cli", "lab", "__main__"),
)
FLOOR = {room: floor for floor, room in enumerate(FLOORS)}
#: The package re-exports public names: it is above the tasks, and those above them may import it.
FLOOR["graticule"] = FLOOR["lab.tasks"] + 0.5


ROOMS = {path.stem for path in SOURCE.iterdir()}


def room_of(module):
    """Return the room of a dotted name: graticule.encodings.alibi -> encodings, graticule.lab.data.coco -> lab.data."""
    parts = module.split(".")[1:]
    pair = ".".join(parts[:2])
    return pair if pair in FLOOR else (parts or [module])[0]


def module_of(path):
    """Return the dotted name of a file."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(["graticule", *(parts[:-1] if parts[-1] == "__init__" else parts)])


def imports_of(tree, module, is_package=False, submodules=False):
    """Return all dotted names that `module`, parsed, imports from graticule, with relative ones resolved.

    With `submodules`, dotted names include the imported name.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            # `from graticule import grid` is an import of the room, `from graticule import Grid` one of the package
            found |= {
                f"{base}.{a.name}"
                if submodules or base == "graticule.lab" or (base == "graticule" and a.name in ROOMS)
                else base
                for a in node.names
            }
    return {name for name in found if name.split(".")[0] == "graticule"}


def complaint(room, target):
    """Return the reason that `room` may not import from `target`; None if it may."""
    return None if room == target or FLOOR[target] < FLOOR[room] else f"{room} reads {target}, which is not below it"


@cache
def files():
    """Return each file, parsed."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}


def test_imports_point_down():
    for path, tree in files().items():
        module = module_of(path)
        room = room_of(module)
        targets = {room_of(name) for name in imports_of(tree, module, path.stem == "__init__")}
        assert not (targets | {room}) - FLOOR.keys(), f"{module}: no floor for {targets}"
        wrong = [why for why in (complaint(room, target) for target in sorted(targets)) if why]
        assert not wrong, f"{module}: {wrong}"


def test_names_of_test_files_are_unique():
    """pytest imports them by name, and refuses a second file of the same one."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]


def cycle(graph):
    """Return the modules of a cycle in `graph`, module -> the modules that it imports; [] if there is none."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        path.append(module)
        found = next((found for target in sorted(graph.get(module, ())) if (found := visit(target))), [])
        path.pop()
        done.add(module)
        return found

    return next((found for module in sorted(graph) if (found := visit(module))), [])


def test_imports_between_files_are_acyclic_late_ones_counted_as_well():
    modules = {module_of(path): path for path in files()}
    graph = {}
    for module, path in modules.items():
        names = imports_of(files()[path], module, path.stem == "__init__", submodules=True)
        # a package's `__init__` re-exports its own modules, which may import each other but not the package
        graph[module] = {name if name in modules else name.rpartition(".")[0] for name in names} - {module}
    assert not cycle(graph), " -> ".join(cycle(graph))


def test_a_cycle_is_found():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import graticule.lab.tasks", {"graticule.lab.tasks"}),
        ("from graticule.surgery.fold import fold", {"graticule.surgery.fold"}),
        ("from graticule import dense", {"graticule.dense"}),
        ("from graticule import Grid", {"graticule"}),
        ("from ..dense import Detector", {"graticule.dense"}),
        ("from . import absolute", {"graticule.encodings"}),
        ("from .. import dense", {"graticule.dense"}),
        ("def late():\n    import graticule.lab.cli", {"graticule.lab.cli"}),
        ("if TYPE_CHECKING:\n    from graticule.encodings import Position", {"graticule.encodings"}),
        ("import torch", set()),
    ],
)
def test_imports_are_found_however_they_are_written(text, found):
    assert imports_of(ast.parse(text), "graticule.encodings.relative_bias") == found


def test_an_arrow_going_up_is_found():
    up = [("position", "encodings"), ("layers", "backbones"), ("surgery", "external"), ("analysis", "lab.figures")]
    assert all(complaint(*arrow) for arrow in up)
    down = [("backbones", "layers"), ("lab.recipes", "graticule"), ("lab.commands", "analysis"), ("hub", "hub")]
    assert not any(complaint(*arrow) for arrow in down)


def test_super_is_called_for_an_attribute_at_once():
    """From Python 3.12 on, torch.compile traces `super().forward(x)`, but not `super()` as a value."""
    for file, tree in files().items():
        taken = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
                assert id(node) in taken, f"{file}, line {node.lineno}"


#: Names that do not say what a value is.
VAGUE = {"found", "given", "said", "held", "kept", "shown", "own", "theirs", "whole", "one", "each"}
#: Packages of extras, which may be imported where they are used.
OPTIONAL = {
    *("PIL", "bokeh", "filelock", "jinja2", "lightning_fabric", "matplotlib", "mlxtend", "pycocotools"),
    *("tensorboard", "tqdm"),
    *("dask", "datasets", "distributed", "onnx", "onnxruntime", "onnxscript", "torchao", "transformers"),
}
#: What is left, by room: these numbers may only fall. The share of position that a layer `kept` is a public name.
VAGUE_LEFT = """
surgery 3
"""
LATE_LEFT = """
. 1, external 1, lab 1, lab/data 2, lab/recipes 1, lab/studies 5, lab/tasks 5,
lab/training 4, system 2
"""


def vague_names(tree):
    """Yield the vague names of variables, parameters, assigned attributes and functions."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                pass
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                pass
            case _:
                continue
        if name.strip("_") in VAGUE:
            yield name


def late_imports(tree):
    """Yield the packages, but for optional ones, that functions import; a command imports PyTorch when it is run."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                else:
                    names = [node.module or "."] if isinstance(node, ast.ImportFrom) else []
                yield from (name for name in names if name.partition(".")[0] not in OPTIONAL)


def count_by_room(names):
    """Return room -> the number of names in its files."""
    counts = Counter()
    for path, tree in files().items():
        folder = path.relative_to(SOURCE).parent.parts
        counts["/".join(folder[: 1 + (folder[:1] == ("lab",))]) or "."] += len([*names(tree)])
    if names is late_imports:
        del counts["lab/commands"]
    return +counts


@pytest.mark.parametrize(("names", "left"), [(vague_names, VAGUE_LEFT), (late_imports, LATE_LEFT)])
def test_vague_names_and_late_imports_become_fewer(names, left):
    allowed = {room: int(number) for room, number in re.findall(r"(\S+)\s+(\d+)", left)}
    counts = count_by_room(names)
    assert {room: number for room, number in counts.items() if number > allowed.get(room, 0)} == {}, (
        "rename or move them up"
    )


def test_a_class_name_exists_once():
    names = Counter(node.name for tree in files().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == set()


def test_vague_names_and_late_imports_are_found():
    tree = ast.parse("def each(whole, a):\n    import torch\n    import onnx\n    self._found = b = found\n")
    assert sorted(vague_names(tree)) == ["_found", "each", "whole"] and [*late_imports(tree)] == ["torch"]


def test_the_names_of_long_tests_exist():
    names = (Path(__file__).with_name("long.txt")).read_text(encoding="utf-8").split()
    missing = []
    for name in names:
        file, _, test = name.partition("::")
        text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
        if not re.search(rf"^def {test}\(", text, re.MULTILINE):
            missing.append(name)
    assert names == sorted(set(names)) and missing == []
