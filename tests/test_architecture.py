"""Architecture: imports point one way."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "graticule"

#: Layers of the package from bottom to top ("rooms"); each imports only from itself and from those below it.
FLOORS = [
    {"symbolic"},
    {"files", "lazy", "memory", "metric", "names", "plugins", "progress", "terminal"},
    {"checks", "recipe_registry", "run_folder", "specs"},
    {"registries"},
    {"resampling"},
    {"axis"},
    {"grid"},
    {"typed"},
    {"displacement", "rotation", "token_mlp", "attention_bias"},
    {"layer_position", "decompositions"},
    {"joined_layers"},
    {"joining"},
    {"encodings"},
    {"layers", "factory", "checkpoints"},
    {"backbones"},
    {"surgery", "data", "dense", "model_checks"},
    {"hub"},
    {"training"},
    {"tasks"},
    {"testing"},
    {"recipes"},
    {"studies"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
#: The package re-exports public names: it is above tasks, and those above it may import it.
FLOOR["graticule"] = FLOOR["tasks"] + 0.5
#: Modules that analysis may import: the public interface of models, metrics, and helpers of files and values.
PUBLIC = {
    "checks",
    "grid",
    "displacement",
    "token_mlp",
    "attention_bias",
    "layer_position",
    "decompositions",
    "joining",
    "metric",
    "factory",
    "backbones",
    "files",
    "names",
    "progress",
    "typed",
    "encodings",
}
READERS_OF_ANALYSIS = {"tasks", "studies", "commands", "cli", "__main__"}


def room_of(module):
    """Return the room of a dotted name: graticule.encodings.absolute -> encodings."""
    return module.split(".")[1] if "." in module else module


def module_of(path):
    """Return the dotted name of a file."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(["graticule", *(parts[:-1] if parts[-1] == "__init__" else parts)])


def imports_of(source, module, is_package=False, submodules=False):
    """Return all dotted names that the source of `module` imports from graticule, with relative ones resolved.

    With `submodules`, dotted names include the imported name.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            rooms = {path.stem for path in SOURCE.iterdir()}
            # `from graticule import grid` is an import of the room, `from graticule import Grid` one of the package
            found |= {
                f"{base}.{a.name}" if submodules or (base == "graticule" and a.name in rooms) else base
                for a in node.names
            }
    return {name for name in found if name.split(".")[0] == "graticule"}


def complaint(room, target):
    """Return the reason that `room` may not import from `target`; None if it may."""
    if room == target:
        return None
    if target == "analysis":
        return None if room in READERS_OF_ANALYSIS else f"{room} reads analysis"
    if room == "analysis":
        return None if target in PUBLIC else f"analysis reads {target}, which is not its public interface"
    return None if FLOOR[target] < FLOOR[room] else f"{room} reads {target}, which is not below it"


FILES = sorted(SOURCE.rglob("*.py"))


def test_imports_point_down():
    for path in FILES:
        module = module_of(path)
        targets = {room_of(name) for name in imports_of(path.read_text(), module, path.stem == "__init__")}
        unknown = (targets | {room_of(module)}) - FLOOR.keys() - {"analysis"}
        assert not unknown, f"{module}: no floor for {unknown}"
        if module != "graticule":
            wrong = [why for why in (complaint(room_of(module), target) for target in sorted(targets)) if why]
        else:
            wrong = [target for target in targets if FLOOR[target] >= FLOOR["graticule"]]
        assert not wrong, f"{module}: {wrong}"


def file_of(name, modules):
    """Return the module of an imported name: itself, or the module that defines it."""
    return name if name in modules else name.rpartition(".")[0]


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
    modules = {module_of(path): path for path in FILES}
    graph = {}
    for module, path in modules.items():
        names = set()
        for name in imports_of(path.read_text(), module, path.stem == "__init__", submodules=True):
            names.add(file_of(name, modules))
        # a package's `__init__` re-exports its own modules, which may import each other but not the package
        graph[module] = names - {module}
    assert not cycle(graph), " -> ".join(cycle(graph))


def test_a_cycle_is_found():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_every_room_of_the_ground_floors_is_there():
    assert {path.stem for path in SOURCE.iterdir()} >= {room for floor in FLOORS[:8] for room in floor}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import graticule.tasks", {"graticule.tasks"}),
        ("from graticule.surgery.fold import fold", {"graticule.surgery.fold"}),
        ("from graticule import cli", {"graticule.cli"}),
        ("from graticule import Grid", {"graticule"}),
        ("from ..tasks import Run", {"graticule.tasks"}),
        ("from . import absolute", {"graticule.encodings"}),
        ("from .. import tasks", {"graticule.tasks"}),
        ("def late():\n    import graticule.cli", {"graticule.cli"}),
        ("if TYPE_CHECKING:\n    from graticule.encodings import Position", {"graticule.encodings"}),
        ("import torch", set()),
    ],
)
def test_imports_are_found_however_they_are_written(text, found):
    assert imports_of(text, "graticule.encodings.relative_bias") == found


@pytest.mark.parametrize(
    ("room", "target"),
    [
        ("grid", "encodings"),
        ("joining", "encodings"),
        ("layer_position", "joining"),
        ("specs", "registries"),
        ("layers", "factory"),
        ("factory", "layers"),
        ("backbones", "surgery"),
        ("checkpoints", "backbones"),
        ("layers", "checkpoints"),
        ("tasks", "graticule"),
        ("surgery", "training"),
        ("training", "analysis"),
        ("training", "tasks"),
        ("analysis", "tasks"),
        ("analysis", "surgery"),
        ("studies", "commands"),
        ("commands", "cli"),
    ],
)
def test_an_arrow_going_up_is_found(room, target):
    assert complaint(room, target)


@pytest.mark.parametrize(
    ("room", "target"),
    [
        ("backbones", "layers"),
        ("backbones", "checkpoints"),
        ("recipes", "graticule"),
        ("cli", "commands"),
        ("commands", "analysis"),
        ("analysis", "backbones"),
        ("grid", "grid"),
    ],
)
def test_an_arrow_going_down_is_fine(room, target):
    assert complaint(room, target) is None
