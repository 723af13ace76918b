"""The device of the tests in this folder: a GPU where PyTorch finds one, otherwise the CPU.

Numbers are compared, so rounding of products to TF32 is off. Warnings of other libraries are shown instead of raised:
which ones a GPU, its driver and its compiler give cannot be known on the CPU; graticule's are errors everywhere.
"""

import os
from pathlib import Path

import pytest

#: Read by cuBLAS when it starts; without it, PyTorch refuses its products with deterministic algorithms.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if "PYTEST_XDIST_WORKER" in os.environ:  # each process of several has one thread, and a few to compile
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, except those that run on the meta device, which need no GPU."""
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("long"):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.filterwarnings("default", "error:::graticule"), append=False)


@pytest.fixture(scope="session")
def device():
    """Return the device of the tests."""
    import warnings

    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of PyTorch prefer another name
        torch.backends.cudnn.allow_tf32 = False  # on by default, unlike for products of matrices
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def deterministic():
    """Use deterministic algorithms alone, for results that are equal bit for bit."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
