"""Registries of names with typed options."""

from typing import Literal

import pytest

import graticule
from graticule.registry.fields import as_kind
from graticule.registry.registry import NameTable, Option, Registry, options_of
from graticule.registry.specs import Spec
from in_turn import in_turn


class Method:
    """Base class of the registered classes of this test."""

    def __init__(self, grid: int, clip: int = 8) -> None:
        self.grid, self.clip = grid, clip


class Rotation(Method):
    def __init__(self, grid: int, base: float, layout: Literal["half", "pairs"] = "half", on: tuple[int, ...] = ()):
        super().__init__(grid)


@pytest.fixture
def methods():
    registry = Registry("encoding", Method, lambda cls: options_of(cls.__init__, frozenset({"self", "grid"})))
    registry.register("shaw")(Method)
    registry.register("rotation")(Rotation)
    return registry


def test_the_options_of_a_name_are_the_keyword_arguments_of_its_class(methods):
    assert list(methods) == ["shaw", "rotation"] and "shaw" in methods and len(methods) == 2
    assert methods.options("shaw") == {"clip": Option(int, 8)}
    assert list(methods.options("rotation")) == ["base", "layout", "on"]
    assert methods.name_of(Rotation) == "rotation" and methods.name_of(int) is None


def test_specs_are_checked_and_converted(methods):
    assert methods.specs("shaw") == (Spec("shaw"),)
    first, second = methods.specs("shaw(clip=4) + rotation(base=100, on=[0, 1])")
    assert first == Spec("shaw", {"clip": 4})
    assert dict(second.options) == {"base": 100.0, "on": (0, 1)} and isinstance(second.options["base"], float)
    assert methods.specs(Spec("shaw", {"clip": 2})) == methods.specs("shaw(clip=2)")


@in_turn(
    ("text", "why"),
    [
        ("shav", r"`encoding` must be one of shaw, rotation; got 'shav'; did you mean 'shaw'\?"),
        (
            "shaw(klip=3)",
            r"`encoding` shaw must not have the option 'klip'; did you mean 'clip'\? The options are clip",
        ),
        ("shaw(size=3)", "`encoding` shaw must not have the option 'size': the options are clip"),
        ("shaw(grid=3)", "must not have the option 'grid'"),
        ("shaw(clip=1.5)", "`clip` of encoding shaw .* got 1.5"),
        ("shaw(clip='4')", "got '4'"),
        ("shaw(clip=True)", "got True"),
        ("shaw(clip=None)", "got None"),
        ("rotation(base=1, layout='both')", "`layout` of encoding rotation .*'half' or 'pairs'.* got 'both'"),
        ("rotation(base=1, on=3)", "`on` of encoding rotation"),
        ("rotation", "`encoding` rotation must have the option 'base'"),
    ],
)
def test_unknown_names_and_options_and_other_types_are_refused(methods, text, why):
    with pytest.raises(ValueError, match=why):
        methods.specs(text)


def test_a_name_of_another_kind_is_answered_with_its_kind():
    for kind, name, answer in (
        ("encoding", "lape", "lape is a joining: use joining='lape', or --joining lape."),
        ("joining", "peg", "peg is an encoding: use encoding='peg', or --encoding peg."),
        ("encoding", "fpn", "fpn is a neck: use neck='fpn', or --neck fpn."),
    ):
        with pytest.raises(ValueError, match=f"`{kind}` must be one of .*; got '{name}'; {answer}"):
            graticule.create_model("vit_nano_patch4_28", **{kind: name})
    with pytest.raises(ValueError, match="got 'laqe'; did you mean"):
        graticule.create_model("vit_nano_patch4_28", encoding="laqe")


def test_a_name_has_one_class(methods):
    methods.register("shaw")(Method)  # registered again, like by a reloaded module
    with pytest.raises(ValueError, match=r"`name` must be new, got 'shaw', which is the encoding .*Method"):
        methods.register("shaw")(Rotation)
    with pytest.raises(ValueError, match="must be an identifier"):
        methods.register("my encoding")(Rotation)
    with pytest.raises(TypeError, match="'number' must be a subclass of Method"):
        methods.register("number")(int)


def test_executed_code_registers_functions_and_classes():
    table = NameTable("thing")
    code = "@table.register('one')\ndef f(): pass\n@table.register('two')\nclass C: pass"
    exec(code, {"table": table})  # its functions have no module
    exec(code, {"table": table})
    assert list(table) == ["one", "two"]
    with pytest.raises(ValueError, match="`name` must be new, got 'one', which is the thing f of executed code"):
        exec(code.replace("def f", "def g"), {"table": table})


def test_values_keep_their_type_and_containers_are_converted():
    assert as_kind(tuple[int, ...], [1, 2], "x") == (1, 2)
    assert as_kind(float | None, None, "x") is None
    assert as_kind(dict[str, float], {"a": 1}, "x") == {"a": 1.0}
    marker = object()
    assert as_kind(object, marker, "x") is marker
