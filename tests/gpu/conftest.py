"""The device of the tests in this folder: a GPU where PyTorch finds one, otherwise the CPU.

Numbers are compared, so rounding of products to TF32 is off. Warnings of other libraries are shown instead of raised:
which ones a GPU, its driver and its compiler give cannot be known on the CPU; those of graticule are errors everywhere.
"""

import os
from itertools import islice
from pathlib import Path

import pytest

#: Read by cuBLAS when it starts; without it, PyTorch refuses its products with deterministic algorithms.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if "PYTEST_XDIST_WORKER" in os.environ:  # each process of several has one thread, and a few to compile
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")

#: Beginnings of the names of tests that take long where kernels are compiled, which are not left to one process.
LONG = ("test_a_compiled_model", "test_a_run", "test_the_gradients_of_a_group")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, except those that run on the meta device, which need no GPU."""
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("long"):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.filterwarnings("default", "error:::graticule"), append=False)

    if all(Path(__file__).parent in item.path.parents for item in items):
        _spread(items, getattr(items[0].config, "workerinput", {}).get("workercount", 1) if items else 1)


def _spread(items: list[pytest.Item], processes: int) -> None:
    """Move long tests to the beginnings of the parts that pytest-xdist gives to its processes first."""
    long = [item for item in items if item.name.startswith(LONG)]
    others = [item for item in items if not item.name.startswith(LONG)]
    size = max(len(items) // processes // 4, 2)
    parts: list[list[pytest.Item]] = [[] for _ in range(processes)]
    for index, item in enumerate(long):
        parts[index % processes].append(item)
    rest = iter(others)
    items[:] = [item for part in parts for item in (*part, *islice(rest, max(size - len(part), 0)))]
    items.extend(rest)


@pytest.fixture(scope="session")
def device():
    """Return the device of the tests."""
    import warnings

    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of PyTorch prefer another name
        torch.backends.cudnn.allow_tf32 = False  # on by default, unlike that of products of matrices
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def deterministic():
    """Use deterministic algorithms alone, for results that are equal bit for bit."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
