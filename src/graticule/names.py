"""Checks of names from a user, with suggestions for unknown ones."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection


def known_name(argument: str, name: str, known: Collection[str]) -> str:
    """Return `name` if it is known.

    Raises:
        ValueError: if it is not, naming the nearest names, and all known ones unless they are many.
    """
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    quoted = repr if any("," in one for one in known) else str  # a name with a comma would look like two
    shown = [quoted(one) for one in (known if len(known) <= 30 else near or list(known)[:30])]
    shown += ["..."] * (len(known) > 30)
    raise ValueError(f"`{argument}` must be one of {', '.join(shown)}; got {name!r}{hint}")


def is_path(given: str) -> bool:
    """Return whether `given`, a name or a path, is a path: it contains a separator, or is . or ..

    >>> [is_path(given) for given in ("digits", "./digits", "runs/digits", "..")]
    [False, True, True, True]
    """
    return given in (".", "..") or any(separator in given for separator in (os.sep, os.altsep) if separator)
