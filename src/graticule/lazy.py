"""Lazy imports: public names of a package are imported when they are first used, so that importing it is fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package.

    Args:
        package: its `__name__`.
        homes: public name -> the module in the package that defines it. A public name must not be the name of a module
            of the package, because importing that module would replace it.
    """
    assert homes.keys().isdisjoint(homes.values())
    module = import_module(package)

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(module, name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(module), *homes})

    return get, names
