"""The one place where the names of encodings, joinings and decompositions become modules."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from functools import partial

from graticule.encodings import AbsoluteEncoding, Learnable, NormalizedBias, RelativeBias, Sinusoidal1d, Sinusoidal2d
from graticule.grid import Grid
from graticule.joining import DECOMPOSITIONS, Default, Joining, Lape, LapeSharing, Shared, Unshared
from graticule.position import BiasPosition, CombinedPosition, JoinedPosition, NoPosition, Position

ABSOLUTE: dict[str, Callable[..., AbsoluteEncoding]] = {
    "learnable": Learnable,
    "sinusoidal_1d": Sinusoidal1d,
    "sinusoidal_2d": Sinusoidal2d,
}
RELATIVE = {"relative_bias": RelativeBias}
JOININGS: dict[str, type[Joining]] = {
    "default": Default,
    "shared": Shared,
    "unshared": Unshared,
    "lape_sharing": LapeSharing,
    "lape": Lape,
}


def list_encodings() -> list[str]:
    """List the names that `encoding` takes; several at once are joined by '+', as 'learnable+relative_bias'."""
    return ["none", *ABSOLUTE, *RELATIVE]


def list_joinings() -> list[str]:
    """List the names that `joining` takes."""
    return list(JOININGS)


def list_decompositions() -> list[str]:
    """List what can stand in the place of LaPE's norm, the names that `decomposition` takes."""
    return list(DECOMPOSITIONS)


def known_name(argument: str, name: str, known: Collection[str]) -> str:
    """Return `name` if it is known.

    Raises:
        ValueError: with the nearest names and all of them, if it is not.
    """
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    shown = list(known) if len(known) <= 30 else [*list(known)[:30], "..."]
    raise ValueError(f"`{argument}` must be one of {', '.join(shown)}; got {name!r}{hint}")


def build_position(
    grid: Grid,
    *,
    dim: int,
    depth: int,
    num_heads: int,
    encoding: str = "learnable",
    joining: str = "default",
    joined_layers: int | None = None,
    decomposition: str | None = None,
) -> Position:
    """Build the position of a backbone from names.

    Args:
        grid: the grid that tables are held for.
        dim: D.
        depth: number of layers.
        num_heads: h.
        encoding: one of `list_encodings()`, or several joined by '+'.
        joining: one of `list_joinings()`; it is how an absolute encoding reaches the layers. A relative
            encoding takes 'default' (its bias as it is) and 'lape' (its bias through a LayerNorm over the keys);
            beside an absolute one it keeps its bias as it is.
        joined_layers: eta, the first layers that are joined; all by default.
        decomposition: one of `list_decompositions()`, in the place of LaPE's norm.

    Raises:
        ValueError: for an unknown name, or a pair that the mathematics does not allow.
    """
    names = [known_name("encoding", name, list_encodings()) for name in encoding.split("+")]
    known_name("joining", joining, JOININGS)
    if len(set(names)) < len(names) or ("none" in names and len(names) > 1):
        raise ValueError(f"`encoding` must name each encoding once, and 'none' alone, got {encoding!r}.")
    absolute = [name for name in names if name in ABSOLUTE]
    if len(absolute) > 1:
        raise ValueError(f"`encoding` must have one absolute encoding at most, got {' and '.join(absolute)}.")
    if decomposition is not None:
        known_name("decomposition", decomposition, DECOMPOSITIONS)
        if joining not in ("lape", "lape_sharing") or not absolute:
            raise ValueError(
                "`decomposition` must go with an absolute encoding and joining 'lape' or 'lape_sharing', "
                f"got encoding {encoding!r} with joining {joining!r}."
            )
    if joining == "default" and absolute and joined_layers is not None:
        raise ValueError(
            f"`joined_layers` must be left out with joining 'default', which adds once and reaches every layer, "
            f"got {joined_layers}."
        )
    if names == ["none"] and joined_layers is not None:
        raise ValueError(f"`joined_layers` must be left out with encoding 'none', got {joined_layers}.")
    if names == ["none"] and joining != "default":
        raise ValueError(
            f"`joining` must be 'default' with encoding 'none': there is nothing to join, got {joining!r}."
        )

    parts: list[Position] = []
    for name in names:
        if name in ABSOLUTE:
            build = partial(ABSOLUTE[name], grid, dim)
            joined = _joining(joining, dim, depth, joined_layers, decomposition)
            if name != "learnable" and isinstance(joined, Unshared):
                raise ValueError(
                    f"`joining` must not be 'unshared' with the fixed encoding {name!r}: every layer's table would be "
                    "the same; use 'shared', or encoding 'learnable'."
                )
            parts.append(JoinedPosition((build() for _ in range(joined.tables)), joined))
        elif name in RELATIVE:
            parts.append(_relative(name, grid, depth, num_heads, "default" if absolute else joining, joined_layers))
    if not parts:
        return NoPosition(depth)
    return parts[0] if len(parts) == 1 else CombinedPosition(parts)


def _joining(name: str, dim: int, depth: int, layers: int | None, decomposition: str | None) -> Joining:
    if name == "default":
        return Default(depth)
    if name in ("lape", "lape_sharing"):
        kind = Lape if name == "lape" else LapeSharing
        return kind(dim, depth, layers, DECOMPOSITIONS[decomposition] if decomposition else None)
    return JOININGS[name](depth, layers)


def _relative(name: str, grid: Grid, depth: int, num_heads: int, joining: str, layers: int | None) -> BiasPosition:
    if joining not in ("default", "lape"):
        raise ValueError(
            f"`joining` must be 'default' or 'lape' with the relative encoding {name!r}, which every layer has of its "
            f"own, got {joining!r}."
        )
    layers = depth if layers is None else layers
    if not 1 <= layers <= depth:
        raise ValueError(f"`joined_layers` must be from 1 to the depth of the model, {depth}, got {layers}.")
    biases = (RELATIVE[name](grid, num_heads) for _ in range(layers))
    return BiasPosition((NormalizedBias(b) if joining == "lape" else b for b in biases), depth)
