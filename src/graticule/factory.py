"""The one place where `encoding` and `joining` become the position of a backbone."""

from __future__ import annotations

from typing import Any

from graticule.checks import checked
from graticule.encodings import ENCODINGS, CombinedPosition, Position, Site
from graticule.grid import Grid
from graticule.joining import DECOMPOSITIONS, JOININGS, build_joining
from graticule.specs import Spec


def list_encodings() -> list[str]:
    """List the names that `encoding` takes; several are combined by '+', as 'learnable + relative_bias'."""
    return list(ENCODINGS)


def list_joinings() -> list[str]:
    """List the names that `joining` takes."""
    return list(JOININGS)


def list_decompositions() -> list[str]:
    """List what can replace LaPE's norm, as in `joining="lape(decomposition='norm')"`."""
    return list(DECOMPOSITIONS)


@checked
def build_position(
    grid: Grid,
    *,
    dim: int,
    depth: int,
    num_heads: int,
    encoding: str | Spec | tuple[Spec, ...] = "learnable",
    joining: str | Spec = "default",
    **within: Any,
) -> Position:
    """Build the position of a backbone.

    Args:
        grid: the grid that tables are held for.
        dim: D.
        depth: number of layers.
        num_heads: h.
        encoding: one of `list_encodings()` with its options, as 'shaw(clip=4)', or several combined by '+'.
        joining: one of `list_joinings()` with its options, as 'lape(layers=6)'; it is how an absolute encoding reaches
            the layers. A relative bias takes 'default' (as it is) and 'lape' (through a LayerNorm); beside an absolute
            encoding it stays as it is. All others take 'default' alone. `layers` is the number of the first layers that
            are joined, or the indices of any, as 'lape(layers=[0, 5])'; the others get nothing.
        within: further fields of `Site`.

    Raises:
        ValueError: for an unknown name or option, or a pair that the mathematics does not allow.
    """
    specs = ENCODINGS.specs(encoding)
    said = " + ".join(map(str, specs))
    how, *more = JOININGS.specs(joining)
    if more:
        raise ValueError(f"`joining` must be one joining, got {joining!s}.")
    site = Site(grid, dim, depth, num_heads, **within)
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names) or ("none" in names and len(names) > 1):
        raise ValueError(f"`encoding` must name each encoding once, and 'none' alone, got {said}.")
    kinds = [ENCODINGS[name] for name in names]
    tables = [name for name, kind in zip(names, kinds, strict=True) if kind.joined == "table"]
    if len(tables) > 1:
        raise ValueError(f"`encoding` must have one absolute encoding at most, got {' and '.join(tables)}.")
    joined = "table" if tables else "bias" if any(kind.joined for kind in kinds) else None
    if joined not in JOININGS[how.name].joins:
        known = " or ".join(repr(name) for name, kind in JOININGS.items() if joined in kind.joins)
        what = {"table": "it has a table", "bias": "its bias differs from layer to layer"}
        why = what.get(joined or "", "there is nothing to join")
        raise ValueError(f"`joining` must be {known} with encoding {said!r}: {why}, got {how.name!r}.")
    if "layers" in how.options and not any(kind.layered for kind in kinds):
        raise ValueError(f"`layers` of the joining must be left out with encoding {said!r}, got {how!s}.")
    build_joining(how, dim, depth).check(joined, how.options)
    others = Spec("default", {name: value for name, value in how.options.items() if name == "layers"})
    parts = [
        kind.position(site, build_joining(how if kind.joined == joined else others, dim, depth), **spec.options)
        for kind, spec in zip(kinds, specs, strict=True)
    ]
    return combine(parts)


def combine(parts: list[Position]) -> Position:
    """Combine positions into one, without those that are empty."""
    kept = [part for part in parts if not part.empty] or parts[:1]
    return kept[0] if len(kept) == 1 else CombinedPosition(kept)
