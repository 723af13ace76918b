"""Check within seconds that the Hugging Face hub can be reached; its client repeats requests for a minute."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

#: Timeout for a connection to the hub, in seconds.
_SECONDS = 3.0


@contextmanager
def quick_hub() -> Iterator[None]:
    """Let downloads use the cache of the hub, or fail, immediately if the hub cannot be reached.

    Raises:
        ConnectionError: if the hub cannot be reached, and a file is not in the cache.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    if constants.HF_HUB_OFFLINE or can_connect(constants.ENDPOINT):
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    except LocalEntryNotFoundError as error:
        raise ConnectionError(
            f"{constants.ENDPOINT} accepts no connection within {_SECONDS:.0f} s, and the file is not in the cache"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = False


def can_connect(address: str) -> bool:
    """Return True if the server at `address`, a URL, or the proxy that is set for it, accepts a connection in time."""
    url = urlsplit(address)
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "//" in proxy else f"//{proxy}", url.scheme)
    port = url.port or (80 if url.scheme == "http" else 443)
    found: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection((url.hostname or "", port), timeout=_SECONDS).close()
        except OSError:
            return
        found.append(True)

    thread = Thread(target=connect, daemon=True)  # a look-up of a host name has no timeout
    thread.start()
    thread.join(_SECONDS)
    return bool(found)
