"""The processes that load images: they end with the training, and outlive the signals of a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def loading(*loaders: Any) -> Iterator[None]:
    """Name the errors of the processes of these loaders within the block, and end the processes with it.

    Raises:
        ChildProcessError: if one of them died.
    """
    for loader in loaders:
        loader.worker_init_fn = _outlive_signals
    try:
        yield
    except (ValueError, OSError) as error:  # of a process that loads images, without its traceback
        message = str(error).rpartition(f"\n{type(error).__name__}: ")[2].strip()
        if str(error).startswith("Caught ") and message:
            raise type(error)(message) from error
        raise
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):  # it exited unexpectedly, or was killed by a signal
            raise
        raise ChildProcessError(
            f"a process that loads images died ({str(error).splitlines()[0]}); is the memory too small for "
            "`workers`, or was it killed? The last checkpoint is intact."
        ) from error
    finally:  # after an error, live workers would hold the lock of the folder
        for loader in loaders:
            if hasattr(loader._iterator, "_shutdown_workers"):
                loader._iterator._shutdown_workers()


def _outlive_signals(worker: int) -> None:
    """Make a worker ignore the signals of a cluster, which the training process handles, and end with that process.

    A cluster sends signals to all processes; without images, the current step could not be completed. And if the
    training process is killed, a worker must not hold the lock of the folder any longer.
    """
    parent = os.getppid()
    blocked = {signal.SIGTERM, signal.SIGUSR1} if hasattr(signal, "sigtimedwait") else set()  # macOS hides the sender
    if blocked:
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)

    def watch() -> None:
        while os.getppid() == parent:
            if not blocked:
                time.sleep(0.5)
                continue
            sent = signal.sigtimedwait(blocked, 0.5)
            if sent is not None and (sent.si_signo, sent.si_pid) == (signal.SIGTERM, parent):
                break
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
