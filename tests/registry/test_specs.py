"""The grammar of names with options: round trips are exact, and code is never run."""

import pickle

import pytest

from graticule.registry.specs import Spec, parse_sum
from in_turn import in_turn


@in_turn(
    ("text", "found"),
    [
        ("learnable", [("learnable", {})]),
        ("learnable()", [("learnable", {})]),
        (" shaw( clip = 4 ) ", [("shaw", {"clip": 4})]),
        (
            "peg(places=[0, 1, 2], kernel=3) + learnable(std=0.2)",
            [("peg", {"places": [0, 1, 2], "kernel": 3}), ("learnable", {"std": 0.2})],
        ),
        ("a+b+c", [("a", {}), ("b", {}), ("c", {})]),
        (
            "rope(base=-1e2, layout='half', on=(True, None))",
            [("rope", {"base": -100.0, "layout": "half", "on": (True, None)})],
        ),
        ("x(a={'k': [1]}, b='it''s + (fine)')", [("x", {"a": {"k": [1]}, "b": "its + (fine)"})]),
    ],
)
def test_names_and_options_are_read_as_python_literals(text, found):
    assert [(spec.name, dict(spec.options)) for spec in parse_sum(text)] == found


@pytest.mark.parametrize("text", ["a", "a(b=1)", "a(b=[1, 2.5], c='x y')", "a(b={'k': None}, c=(1,), d=-0.1)"])
def test_the_text_of_a_spec_is_read_back_as_the_spec(text):
    spec = Spec.parse(text)
    assert str(spec) == text
    assert Spec.parse(str(spec)) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert {spec: 1}[Spec.parse(text)] == 1


def test_a_spec_does_not_change_with_the_mapping_it_was_made_from():
    given = {"clip": 4}
    spec = Spec("shaw", given)
    given["clip"] = 8
    assert dict(spec.options) == {"clip": 4}
    with pytest.raises(TypeError):
        spec.options["clip"] = 8


@in_turn(
    ("text", "why"),
    [
        ("", "it is empty"),
        ("  ", "it is empty"),
        ("shaw(clip=4", "never closed"),
        ("shaw clip", "invalid syntax"),
        ("shaw(4)", "4 must be written NAME=4"),
        ("shaw(clip=4, clip=8)", "given twice|repeated"),
        ("shaw(**{'clip': 4})", r"\*\* must be left out"),
        ("shaw(clip=__import__('os').getcwd())", "must be a literal"),
        ("shaw(clip=k)", "clip=k must be a literal"),
        ("__import__('os')", "'os' must be written NAME='os'"),
        ("os.system", "os.system is not a name"),
        ("(lambda: 1)()", "is not a name"),
        ("a - b", "a - b is not a name"),
        ("a + 1", "1 is not a name"),
        ("None", "'none' is"),
        ("[a, b]", "is not a name"),
        ("a := b", "invalid syntax"),
        ("a; b", "invalid syntax"),
        ("a(b=1_000_000" + "0" * 5000 + ")", "at most 4,096 characters"),
        ("a(b=" + "(" * 1500 + ")" * 1500 + ")", "too many nested|too deep"),
        ("a(b=" + "-" * 3000 + "1)", "too deep|must be a literal"),
        ("a\nb", "one line of printable text"),
        ("a\x00", "one line of printable text"),
    ],
)
def test_anything_else_is_refused_by_name_and_nothing_is_run(text, why):
    with pytest.raises(ValueError, match=why) as error:
        parse_sum(text, "encoding")
    assert str(error.value).startswith("`encoding` must ")
    assert len(str(error.value)) < 5000 and "\n" not in str(error.value)
