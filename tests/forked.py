"""Processes forked from this one, which start with everything imported, while a new interpreter takes seconds."""

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.multiprocessing import start_processes


def forked(work: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Start `work(*arguments)` in a forked process."""
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)  # Python 3.12 and later
        process.start()
    return process


def run_command(arguments: list[str], errors: Path) -> None:
    """Run the command `graticule` in a forked process that leads a process group, its standard error in a file."""
    from graticule.lab.cli import main

    os.setsid()
    with errors.open("w") as sys.stderr:
        code = main(arguments)
    os._exit(code)


def two_processes(work: Callable[..., Any], *arguments: Any) -> None:
    """Call `work(*arguments)` in two processes that train together, as torchrun starts them.

    Raises the error of a process that fails.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # at a free port
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        start_processes(_member, (store.port, work, arguments), nprocs=2, start_method="fork")


def _member(rank: int, port: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) | {"MASTER_PORT": str(port)}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2") | {"MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    work(*arguments)
