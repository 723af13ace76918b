"""The factory that builds the position of a backbone from `encoding` and `joining`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graticule.position.grid import Grid
from graticule.position.joining import DECOMPOSITIONS, JOININGS, build_joining, joined_layers
from graticule.position.position import ENCODINGS, CombinedPosition, Position, StageSpec
from graticule.registry.checks import checked
from graticule.registry.fields import Channels, Depth, SmallCount
from graticule.registry.specs import Spec
from graticule.system.memory import build_within_memory


def list_encodings() -> list[str]:
    """List the names for `encoding`; several are combined by '+', such as 'learnable + relative_bias'."""
    return list(ENCODINGS)


def list_joinings() -> list[str]:
    """List the names for `joining`."""
    return list(JOININGS)


def list_decompositions() -> list[str]:
    """List the names of decompositions, which can replace LaPE's norm, as in `joining="lape(decomposition='norm')"`."""
    return list(DECOMPOSITIONS)


@checked
def build_position(
    grid: Grid,
    *,
    dim: Channels,
    depth: Depth,
    num_heads: SmallCount,
    encoding: str | Spec | tuple[Spec, ...] = "learnable",
    joining: str | Spec = "default",
    **within: Any,
) -> Position:
    """Build the position of a backbone.

    Args:
        grid: the grid that tables are built for.
        dim: D.
        depth: number of layers.
        num_heads: h.
        encoding: one of `list_encodings()` with its options, such as 'shaw(clip=4)', or several combined by '+'. The
            option `layers` of an encoding replaces the joining's:
            'rope(layers=[0, 1]) + relative_bias(layers=[2, 3])'. An encoding can be named several times for different
            layers.
        joining: one of `list_joinings()` with its options, such as 'lape(layers=6)'; it decides how an absolute
            encoding reaches the layers. A relative bias takes 'default' (unchanged) and 'lape' (through a LayerNorm);
            combined with an absolute encoding it is added unchanged. All others take 'default' only. `layers` is the
            number of the first layers that are joined, or the indices of any, such as 'lape(layers=[0, 5])'; the other
            layers get nothing.
        within: further fields of `StageSpec`.

    Raises:
        ValueError: for an unknown name or option, or a combination that is not defined, or does not fit into memory.
    """
    specs = ENCODINGS.specs(encoding)
    text = " + ".join(map(str, specs))
    how, *more = JOININGS.specs(joining)
    if more:
        raise ValueError(f"`joining` must be one joining, got {joining!s}.")
    if how.options.get("layers", 0) is None:  # all, as in the names of arms
        how = Spec(how.name, {name: value for name, value in how.options.items() if name != "layers"})
    stage = StageSpec(grid, dim, depth, num_heads, **within)
    names = [spec.name for spec in specs]
    if _repeat_layers(specs, depth) or ("none" in names and len(names) > 1):
        raise ValueError(f"`encoding` must name each encoding once per layer, and 'none' alone, got {text}.")
    kinds = [ENCODINGS[name] for name in names]
    tables = [name for name, kind in zip(names, kinds, strict=True) if kind.joinable_as == "table"]
    if len(tables) > 1:
        raise ValueError(f"`encoding` must have one absolute encoding at most, got {' and '.join(tables)}.")
    joined = "table" if tables else "bias" if any(kind.joinable_as for kind in kinds) else None
    if joined not in JOININGS[how.name].accepts:
        known = " or ".join(repr(name) for name, kind in JOININGS.items() if joined in kind.accepts)
        reasons = {"table": "it has a table", "bias": "its bias differs from layer to layer"}
        why = reasons.get(joined or "", "there is nothing to join")
        raise ValueError(f"`joining` must be {known} with encoding {text!r}: {why}, got {how.name!r}.")
    if "layers" in how.options and not any(kind.layered for kind in kinds):
        raise ValueError(f"`layers` of the joining must be left out with encoding {text!r}, got {how!s}.")
    if joined == "table" and JOININGS[how.name].whole_grid and grid.windows:
        raise ValueError(
            f"`joining` must not be {how.name!r} where tokens attend within windows: it is for all pairs of tokens."
        )
    build_joining(how, dim, depth, num_heads, grid.prefix).check(joined, how.options)
    others = Spec("default", {name: value for name, value in how.options.items() if name == "layers"})

    def build() -> Position:
        parts = []
        for kind, spec in zip(kinds, specs, strict=True):
            options, its = dict(spec.options), how if kind.joinable_as == joined else others
            if _own_layers(spec) is not None:
                its = Spec(its.name, {**its.options, "layers": options["layers"]})
            if kind.has_layers():
                options.pop("layers", None)
            joining_module = build_joining(its, dim, depth, num_heads, grid.prefix)
            joining_module.check(kind.joinable_as, its.options)
            parts.append(kind.position(stage, joining_module, **options))
        position = combine(parts)
        position.axes = grid.ndim
        return position

    return build_within_memory(build, "encoding")


def _own_layers(spec: Spec) -> int | tuple[int, ...] | None:
    """Return the layers of an encoding if its own option `layers` names them, else None."""
    return spec.options.get("layers") if ENCODINGS[spec.name].has_layers() else None


def _repeat_layers(specs: Sequence[Spec], depth: int) -> bool:
    """Return whether a layer has an encoding of the same name twice."""
    all_pairs: set[tuple[str, int]] = set()
    for spec in specs:
        repeated = [other.name for other in specs].count(spec.name) > 1
        layers = joined_layers(depth, _own_layers(spec)) if repeated else range(depth)
        pairs = {(spec.name, layer) for layer in layers}
        if pairs & all_pairs:
            return True
        all_pairs |= pairs
    return False


def combine(parts: list[Position]) -> Position:
    """Combine positions into one, without those that are empty."""
    filled = [part for part in parts if not part.empty] or parts[:1]
    return filled[0] if len(filled) == 1 else CombinedPosition(filled)
