"""Fuzzing: values and edits to draw, limits per input, allowed outcomes, and a command that counts outcomes.

    python tests/fuzz.py --inputs 100000 --seed 0

Tests draw the same few inputs each time; the environment variable GRATICULE_FUZZ multiplies their number. The command
draws `--inputs` others, distributed over the tests in proportion to their numbers, in forked processes with a limit of
memory. A failure is counted and does not end it. The table has one row per test:

- tracebacks: commands that raised an error instead of printing one line
- raw errors: functions that raised an error other than those that they document
- hangs: inputs that took over 5 s of CPU time, or that did not end within 120 s
- memory: inputs with which the process took over 2 GB
- crashes: inputs with which the process ended
- wrong: errors that do not name what is wrong, changed files, results that break the law of the test

It ends with the first input of each cause, and with 1 if any of these numbers is not 0. `--only WORD` selects tests.
"""

import argparse
import gc
import inspect
import json
import mmap
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

#: Any JSON value, including unusual numbers.
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 1e300, float("inf"), float("nan"), -0.5]),
    st.sampled_from([2**16, 2**20, 10**9, 10**400, 4e7, 1e-300]),
    st.sampled_from(["", "0", "a\nb", "\x1b[31m", "../..", "/dev/zero", "\x00", "\udcff", "true"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)),
    max_leaves=6,
)

COLUMNS = ("tracebacks", "raw errors", "hangs", "memory", "crashes", "wrong")
_CPU, _WALL = 5.0, 120.0  # seconds per input
_MEMORY = 2 << 30  # bytes of the process
_LIMIT = 4 << 30  # bytes that a process can allocate


def fuzzed(cases: int, *drawn: Any, **named: Any) -> Any:
    """Decorate a test of `cases` inputs, drawn from strategies, the same each time; the command draws others."""

    def decorate(test: Any) -> Any:
        fuzz = given(*drawn, **named)(test)
        fuzz.hypothesis.inner_test = _limited(test, named or list(inspect.signature(test).parameters)[-len(drawn) :])
        fuzz.cases = cases
        counting = _board is not None
        chosen = settings(
            max_examples=_board.inputs if _board else cases * int(os.environ.get("GRATICULE_FUZZ", 1)),
            derandomize=not counting,
            phases=[Phase.generate] if counting else tuple(Phase),
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )(fuzz)
        return seed(_board.seed)(chosen) if _board else chosen

    return decorate


class Hung(BaseException):
    """Raised when an input takes too long; no code under test catches it."""


class Traceback(Exception):
    """Raised by tests of commands for what a thread has printed."""


@contextmanager
def limit() -> Iterator[None]:
    """Limit an input to 5 s of CPU time, and to 120 s."""

    def stop(number: int, _: Any) -> None:
        raise Hung(f"more than {_CPU:.0f} s of CPU time" if number == signal.SIGPROF else f"more than {_WALL:.0f} s")

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, _CPU), (signal.SIGALRM, signal.ITIMER_REAL, _WALL))
    before = [signal.signal(number, stop) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def _limited(test: Callable[..., None], drawn: Collection[str]) -> Callable[..., None]:
    """Return a test whose inputs, the arguments `drawn`, are limited, and counted by the command."""

    def case(**given: Any) -> None:
        if _board is None:
            with limit():
                test(**given)
        else:
            _board.count(test, given, drawn)

    return case


def outcome(call: Callable[[], Any], *, names: str, allowed: tuple[type[Exception], ...] = (ValueError,)) -> Any:
    """Return the result of `call`, or its error if that is `allowed` and its message contains `names`; else raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other libraries, such as Pillow's on unknown tags
        try:
            return call()
        except allowed as error:
            assert names in str(error), f"{error!r} does not name {names}"
            return error


def tree(folder: Path) -> dict[str, bytes]:
    """Read every file below `folder`, to check later that none has changed."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@st.composite
def edited(draw: Any, content: bytes, header: int = 64) -> bytes:
    """Draw `content` with one to six pieces replaced, removed, inserted or cut, mostly in the first `header` bytes."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 6))):
        last = max(len(changed) - 1, 0)
        place = draw(st.one_of(st.integers(0, min(header, last)), st.integers(0, last)))
        kind = draw(st.sampled_from(["byte", "edge", "insert", "remove", "cut"]))
        if kind == "byte":
            changed[place : place + 1] = draw(st.binary(min_size=1, max_size=1))
        elif kind == "edge":
            changed[place : place + 4] = draw(st.sampled_from([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"9999"]))
        elif kind == "insert":
            changed[place:place] = draw(st.binary(min_size=1, max_size=8))
        elif kind == "remove":
            del changed[place : place + draw(st.integers(1, 8))]
        elif draw(st.integers(0, 3)) == 0:
            del changed[place:]
    return bytes(changed)


@contextmanager
def replaced(path: Path, content: bytes) -> Iterator[None]:
    """Replace the content of a file within the block, which must not change it."""
    whole = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
        assert path.read_bytes() == content
    finally:
        path.write_bytes(whole)


def places(values: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the paths to all values within `values`."""
    inner = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


@st.composite
def changed(draw: Any, values: Any, new: Any = JSON) -> Any:
    """Replace or remove a value somewhere in `values`, or add one next to it."""
    *way, last = draw(st.sampled_from([place for place in places(values) if place]))
    values = json.loads(json.dumps(values))
    within = values
    for key in way:
        within = within[key]
    action = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
    if action == "remove":
        del within[last]
    elif action == "add" and isinstance(within, dict):
        within[draw(st.sampled_from(["new", "\x1b", ""])) + str(last)] = draw(new)
    else:
        within[last] = draw(new)
    return values


@st.composite
def altered(draw: Any, path: Path, new: Any = JSON, header: int = 400) -> bytes:
    """Draw other content for a file: other bytes, or another value if it is JSON."""
    content = path.read_bytes()
    if path.suffix == ".json" and draw(st.integers(0, 3)):
        return json.dumps(draw(changed(json.loads(content), new))).encode()
    return draw(edited(content, len(content) if path.suffix == ".json" else header))


@dataclass
class Board:
    """The inputs of one test in one process, and what was found, in files that outlive the process.

    shared: the number of inputs, and the present one.
    """

    inputs: int
    seed: int
    found: Path
    shared: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 1 << 14))

    @property
    def counted(self) -> int:
        """Return the number of inputs that have ended."""
        return int.from_bytes(self.shared[:8], "little")

    @property
    def present(self) -> str:
        """Return the present input."""
        return bytes(self.shared[8:]).rstrip(b"\0").decode(errors="replace")

    def count(self, test: Callable[..., None], given: dict[str, Any], drawn: Collection[str]) -> None:
        """Run a test on an input, its arguments `drawn`, and count the outcome."""
        texts: list[str] = []
        for name in drawn:
            if name == "data":
                given[name].draw = _noted(given[name].draw, texts, self._show)
            else:
                texts.append(f"{name}={given[name]!r}"[:1000])
        self._show(texts)
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + 4 * _CPU), resource.RLIM_INFINITY))
        try:
            with limit():
                test(**given)
            column = error = None
        except BaseException as raised:
            if type(raised).__module__.startswith("hypothesis") or isinstance(raised, KeyboardInterrupt):
                raise  # the engine's own
            column, error = _column(raised), raised
        high = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 > _MEMORY
        column = "memory" if high else column
        if column:
            self.record(column, error, ", ".join(texts))
        self.shared[:8] = (self.counted + 1).to_bytes(8, "little")
        if not self.counted % 20:
            gc.collect()  # tests/conftest.py lets Python collect rarely
        if high:
            os._exit(0)  # the peak would count again; another process draws the other inputs

    def record(self, column: str, error: BaseException | None, given: str) -> None:
        """Write down a failure with its cause: the innermost frame of the library, and the error."""
        frames = list(traceback.extract_tb(error.__traceback__)) if error else []
        ours = [frame for frame in frames if "/graticule/" in frame.filename] or frames
        cause = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} " if ours else ""
        cause += f"{type(error).__name__}: {str(error)[:200]}" if error else ""
        with self.found.open("a") as file:
            file.write(json.dumps([column, cause, given[:2000]]) + "\n")

    def _show(self, texts: list[str]) -> None:
        text = ", ".join(texts).encode(errors="backslashreplace")[: len(self.shared) - 8]
        self.shared[8:] = text.ljust(len(self.shared) - 8, b"\0")


def _noted(draw: Callable[..., Any], texts: list[str], show: Callable[[list[str]], None]) -> Callable[..., Any]:
    """Return `draw`, which also adds the text of what it draws to `texts`."""

    def drawing(*args: Any, **kwargs: Any) -> Any:
        value = draw(*args, **kwargs)
        texts.append(repr(value)[:1000])
        show(texts)
        return value

    return drawing


def _column(error: BaseException) -> str:
    """Return the column that counts an error."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, Hung):
        return "hangs"
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return "memory"
    if isinstance(error, Traceback) or any(name.endswith("/lab/cli.py") for name in files):
        return "tracebacks"
    within = Path(files[-1]).parent == Path(__file__).parent
    return "wrong" if within and isinstance(error, AssertionError) else "raw errors"


#: Set in the processes of the command.
_board: Board | None = None


class _Cases:
    """Plugin of pytest that lists the fuzzing tests and their numbers of inputs."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        cases = {item.nodeid: item.obj.cases for item in items if hasattr(item.obj, "cases")}
        self.file.write_text(json.dumps(cases))


def _fork(work: Callable[[], Any], log: Path) -> int:
    """Call `work` in a forked process whose output goes to `log`; returns its id."""
    process = os.fork()
    if not process:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(0)
    return process


def _pytest(*arguments: Any, plugins: Any = ()) -> Any:
    import pytest

    root = Path(__file__).parents[1]
    return pytest.main(
        [f"--rootdir={root}", "--assert=plain", "-m", "", "-p", "no:cacheprovider", *map(str, arguments)],
        plugins=list(plugins),
    )


def _round(test: str, board: Board, folder: Path) -> None:
    """Run the inputs of a board."""
    global _board
    _board = board
    resource.setrlimit(resource.RLIMIT_DATA, (_LIMIT, _LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)
    _pytest(Path(__file__).parents[1] / test, f"--basetemp={folder / 'temp'}")


@dataclass
class Test:
    """A test of the command, with the number of its inputs still to draw, and what was found."""

    name: str
    left: int
    inputs: int = 0
    rounds: int = 0
    seconds: float = 0.0
    found: list[tuple[str, str, str]] = field(default_factory=list)

    def row(self) -> str:
        """Return its row of the table."""
        counts = Counter(column for column, _, _ in self.found)
        cells = [f"{self.inputs:,}", *(str(counts[column]) for column in COLUMNS), f"{self.seconds:.0f}"]
        return f"| {self.name} | {' | '.join(cells)} |"


def main() -> int:
    """Draw inputs, count the outcomes and print the table; returns 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="total number of inputs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs")
    parser.add_argument("--only", default="", help="select the tests whose name contains this word")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="number of processes")
    parser.add_argument("--round", type=int, default=2000, help="most inputs of a process")
    given = parser.parse_args()
    root = Path(__file__).parents[1]
    import lightning  # noqa: F401
    import pytest  # noqa: F401
    import torch._dynamo  # noqa: F401

    import graticule.lab.commands.options
    import graticule.lab.training  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        folder = Path(place)
        files = sorted((root / "tests").glob("test_fuzz_*.py"))
        collected = folder / "cases.json"
        process = _fork(lambda: _pytest("--collect-only", "-q", *files, plugins=[_Cases(collected)]), folder / "log")
        os.waitpid(process, 0)
        if not collected.exists():
            raise RuntimeError((folder / "log").read_text())
        cases = {name: count for name, count in json.loads(collected.read_text()).items() if given.only in name}
        tests = _divide(cases, given.inputs)
        _work(tests, given, folder)
    print(f"\n| test | inputs | {' | '.join(COLUMNS)} | CPU seconds |\n|---|{'---:|' * 8}")
    print("\n".join(test.row() for test in tests))
    total = Test("sum", 0, sum(test.inputs for test in tests), seconds=sum(test.seconds for test in tests))
    total.found = [one for test in tests for one in test.found]
    print(total.row())
    for test in tests:
        causes: dict[str, list[tuple[str, str, str]]] = {}
        for one in test.found:
            causes.setdefault(one[0] + re.sub(r"\d+|'.*'", "", one[1]), []).append(one)
        for same in sorted(causes.values(), key=len, reverse=True):
            column, cause, first = same[0]
            print(f"\n{test.name}\n  {column}, {len(same)} times: {cause}\n  first: {first}")
    return 1 if total.found else 0


def _divide(cases: dict[str, int], inputs: int) -> list[Test]:
    """Distribute inputs over tests in proportion to their numbers of cases."""
    total, before, found = sum(cases.values()), 0, []
    for name, count in cases.items():
        here = inputs * (before + count) // total - inputs * before // total
        found.append(Test(name, here))
        before += count
    return found


def _work(tests: list[Test], given: Any, folder: Path) -> None:
    """Run rounds of all tests, several at once."""
    running: dict[int, tuple[Test, Board, Path, float]] = {}
    waiting = [test for test in tests if test.left]
    while waiting or running:
        while waiting and len(running) < given.processes:
            test = waiting.pop(0)
            test.rounds += 1
            place = Path(tempfile.mkdtemp(dir=folder))
            number = random.Random(f"{given.seed} {test.name} {test.rounds}").getrandbits(64)
            board = Board(min(test.left, given.round), number, place / "found.jsonl")
            process = _fork(lambda test=test, board=board, place=place: _round(test.name, board, place), place / "log")
            running[process] = test, board, place, time.monotonic()
        process, status, used = os.wait3(0)
        test, board, place, _ = running.pop(process)
        test.seconds += used.ru_utime + used.ru_stime
        count = board.counted
        if board.found.exists():
            test.found += [tuple(json.loads(line)) for line in board.found.read_text().splitlines()]
        if os.WIFSIGNALED(status):
            column = "hangs" if os.WTERMSIG(status) == signal.SIGXCPU else "crashes"
            test.found.append((column, signal.Signals(os.WTERMSIG(status)).name, board.present[:2000]))
            count += 1
        elif not count:
            raise RuntimeError(f"{test.name}: {(place / 'log').read_text()[-4000:]}")
        test.inputs += count
        test.left -= count
        if test.left > 0:
            waiting.append(test)
        elif test not in waiting:
            print(test.row(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.update(OMP_NUM_THREADS="1", GOMP_SPINCOUNT="1000", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    sys.path.insert(0, str(Path(__file__).parent))
    from fuzz import main as command  # the module that the tests import

    sys.exit(command())
