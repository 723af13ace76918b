"""Tests can fork, whatever ran before in their process."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from forked import forked


def backward():
    torch.ones((), requires_grad=True).backward()


def test_a_forked_process_computes_gradients_after_fake_tensors():
    with FakeTensorMode():
        torch.ones(2)
    backward()
    process = forked(backward)
    process.join(600)
    assert process.exitcode == 0
