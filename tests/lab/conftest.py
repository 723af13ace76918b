"""Fixtures of the tests of training."""

import os

import pytest
import torch


@pytest.fixture
def single_process_group():
    """Let a test train with strategy fsdp in this process, and destroy its process group afterwards."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
