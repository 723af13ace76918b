"""What every test starts from: the same seed, an empty cache of compiled graphs."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _start_alike():
    torch.manual_seed(0)
    torch._dynamo.reset()
