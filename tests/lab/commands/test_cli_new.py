"""`graticule new`: the written file works, and passes the test that is written with it."""

import importlib.util
import inspect

import pytest

from commands import refused, run_command
from graticule.lab.arguments import options_of
from graticule.lab.commands.new import NewOptions
from in_turn import in_turn

KINDS = next(option.choices for option in options_of(NewOptions) if option.name == "kind")


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_file_passes_the_test_beside_it(capsys, tmp_path, monkeypatch, forgotten, kind):
    monkeypatch.chdir(tmp_path)
    name = f"my_{kind}"
    code, out, err = run_command(capsys, "new", kind, name)
    assert code == 0 and err == ""
    wrote, test, tried = out.splitlines()
    assert wrote == f"wrote {name}.py and test_{name}.py"
    checked = kind in ("encoding", "bias", "rotary", "joining", "backbone", "task")
    assert test == (f"check it: graticule check {name}.py" if checked else f"test it:  pytest test_{name}.py")
    assert tried.startswith("run it:   graticule ") and f"{name}.py" in tried
    spec = importlib.util.spec_from_file_location(f"test_{name}", tmp_path / f"test_{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = [option for one_name, option in vars(module).items() if one_name.startswith("test_")]
    assert tests
    for option in tests:
        option(**({"tmp_path": tmp_path} if "tmp_path" in inspect.signature(option).parameters else {}))


@in_turn(
    ("arguments", "message"),
    [
        (["encoding", "rope"], "`name` must be new, got 'rope', which graticule has already."),
        (["recipe", "digits_quick"], "`name` must be new, got 'digits_quick'"),
        (["encoding", "3d"], "`name` must be an identifier, such as my_encoding, got '3d'."),
        (["encoding", "../up"], "`name` must be an identifier, such as my_encoding, got '../up'."),
        (["encoding", "class"], "`name` must be an identifier, such as my_encoding, got 'class'."),
        (["encodin", "mine"], "did you mean 'encoding'"),
        (["encoding"], "`NAME` (its name, an identifier such as my_encoding) must be given"),
        (["encoding", "mine"], "`name` must be new, got 'mine', for which test_mine.py exists."),
    ],
)
def test_invalid_targets_are_named_and_nothing_is_replaced(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_mine.py").write_text("mine")
    assert message in refused(capsys, "new", *arguments)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
