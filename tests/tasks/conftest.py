"""What the tests of training share."""

import os

import pytest
import torch


@pytest.fixture
def shared_out():
    """Let a test train with strategy fsdp in this process, and leave no trace of its group of one."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
