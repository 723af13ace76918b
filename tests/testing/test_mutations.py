"""Ten mutations of each encoding: those that change outputs fail the contract, or are excused with the reason."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from graticule import Grid
from graticule.position.layer import FIELD_KINDS, LayerPosition
from graticule.position.position import ENCODINGS
from graticule.position.tokens import Subset
from graticule.testing import methods
from graticule.testing.methods import BrokenLaws, check_encoding
from graticule.testing.places import reorder

#: The values of the mutation with a cache of the process.
STORED: dict[Any, Tensor] = {}


def changed(layers: list[LayerPosition], change: Callable[[Tensor, Any], Tensor]) -> list[LayerPosition]:
    """Return layers with all their tensors changed, also those of rotations and factors."""

    def within(value: Any, key: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return change(value, key)
        if hasattr(value, "_fields"):
            return value._replace(**{name: within(part, (*key, name)) for name, part in value._asdict().items()})
        return value

    return [within(layer, (index,)) for index, layer in enumerate(layers)]


def exchange_sides(position: Any, grid: Any, layers: Any) -> Any:
    if not isinstance(grid, Grid) or grid.crop is not None:
        return layers
    return position.forward(replace(grid, shape=grid.shape[:-2] + grid.shape[:-3:-1]))


def moved(grid: Grid, layers: Any, patches: Tensor) -> Any:
    """Return the position of other patches; points have no rows."""
    if not isinstance(grid, Grid):
        return layers
    tokens = torch.cat([torch.arange(grid.prefix), patches.flatten() + grid.prefix])
    return [reorder(layer, Subset(tokens, grid.tokens)) for layer in layers]


def flip_rows(position: Any, grid: Any, layers: Any) -> Any:
    return moved(grid, layers, torch.arange(grid.patches).view(-1, *grid.plane.shape[-2:]).flip(1))


def shift_by_one(position: Any, grid: Any, layers: Any) -> Any:
    return moved(grid, layers, torch.arange(grid.patches).roll(1))


def transpose_pairs(position: Any, grid: Any, layers: Any) -> Any:
    of_pairs = ("bias", "mixing", "positional")
    return changed(
        layers, lambda value, key: value.mT if key[1] in of_pairs and value.shape[-1:] == value.shape[-2:-1] else value
    )


def return_float32(position: Any, grid: Any, layers: Any) -> Any:
    return changed(layers, lambda value, _: value.float())


def add_an_axis(position: Any, grid: Any, layers: Any) -> Any:
    return changed(layers, lambda value, _: value[None])


def use_the_first_sample(position: Any, grid: Any, layers: Any) -> Any:
    def of_first(function: Any) -> Any:
        return lambda x, **part: function(x[:1].expand_as(x), **part)

    return [
        layer._replace(**{
            name: of_first(value)
            for name, value in layer._asdict().items()
            if FIELD_KINDS[name].function_input and callable(value) and not hasattr(value, "_fields")
        })
        for layer in layers
    ]  # fmt: skip


def add_a_zero_on_the_cpu(position: Any, grid: Any, layers: Any) -> Any:
    return changed(layers, lambda value, _: value + torch.zeros(value.shape, dtype=value.dtype, device="cpu"))


def scale_with_the_grid(position: Any, grid: Any, layers: Any) -> Any:
    return changed(layers, lambda value, _: value * grid.patches)


def keep_the_first_values(position: Any, grid: Any, layers: Any) -> Any:
    def stored(value: Tensor, key: Any) -> Tensor:
        return STORED.setdefault((key, value.shape, value.dtype, value.device), value.detach()) + 0 * value

    return changed(layers, stored)


def double(position: Any, grid: Any, layers: Any) -> Any:
    """Return another right encoding, of which no law may say anything."""
    return changed(layers, lambda value, _: 2 * value)


MUTATIONS = {
    mutation.__name__: mutation
    for mutation in (
        exchange_sides,
        flip_rows,
        shift_by_one,
        transpose_pairs,
        return_float32,
        add_an_axis,
        use_the_first_sample,
        add_a_zero_on_the_cpu,
        scale_with_the_grid,
        keep_the_first_values,
    )
}


@dataclass(frozen=True)
class Mutation:
    """A hook of a position that changes what layers get; it can be copied and pickled."""

    name: str

    def __call__(self, position: Any, args: Any, kwargs: Any, layers: Any) -> Any:
        grid = args[0] if args else kwargs["grid"]
        return {**MUTATIONS, "double": double}[self.name](position, grid, layers)


def mutant(kind: Any, name: str) -> Any:
    """Return an encoding whose positions are those of `kind`, mutated."""

    def position(cls: Any, stage: Any, joining: Any, **options: Any) -> Any:
        built = kind.position(stage, joining, **options)
        built.register_forward_hook(Mutation(name), with_kwargs=True)
        return built

    return type(kind.__name__, (kind,), {"position": classmethod(functools.wraps(kind.position.__func__)(position))})


def outputs(encoding: str, seed: int = 0) -> list[Any]:
    """Return the outputs of the same model on three grids; a text where an error comes."""
    torch.manual_seed(seed)
    model = methods._draw(methods._builder(encoding, "default")()).double().eval()
    results: list[Any] = []
    for h, w in methods._GRIDS:
        images = torch.randn(2, 3, 8 * h, 8 * w, dtype=torch.float64)
        try:
            with torch.no_grad():
                results.append(model(images))
        except (RuntimeError, ValueError, TypeError) as error:
            results.append(type(error).__name__)
    return results


def outcome(encoding: str, name: str, monkeypatch: Any) -> str:
    """Return 'equal', 'noticed' or 'survived' of a mutation."""
    monkeypatch.setitem(ENCODINGS.data, "mutant", mutant(ENCODINGS[encoding], name))
    STORED.clear()
    outputs("mutant", 1)  # with the first parameters of the process
    pairs = zip(outputs("mutant"), outputs(encoding), strict=True)
    same = all(a == b if isinstance(a, str) or isinstance(b, str) else torch.allclose(a, b, 0, 1e-12) for a, b in pairs)
    STORED.clear()
    if same and name != "add_a_zero_on_the_cpu":  # which differs on an accelerator only
        return "equal"
    try:
        check_encoding("mutant", compiled=False, without_effect=ENCODINGS.options("mutant"))
    except BrokenLaws:
        return "noticed"
    return "equal" if same else "survived"


#: Mutation -> the encodings in which it survives, and why no law can tell it from a right encoding.
EXCUSED = {
    "return_float32": (  # attention casts it to the dtype of its queries, so only a model in float64 loses digits
        "alibi kerple bucketed_bias fire global_filter gpsa gqpe_bias liere log_n sgu gsgu lrpe glrpe lrpe_m "
        "mirrored_bias mlp_bias shared_mlp_bias continuous_bias token_mlp mrope pope relative_bias "
        "shared_relative_bias rope rope_1d rope_mixed rope_golden_gate sandwich"
    ),
    "transpose_pairs": (  # the sign of an offset is a convention, and learned weights of pairs have no preferred one
        "bucketed_bias causal gpsa gqpe ggqpe gqpe_bias sgu gsgu lrpe glrpe lrpe_m mlp_bias "
        "shared_mlp_bias continuous_bias relative_bias shared_relative_bias"
    ),
    "scale_with_the_grid": (  # weights that mix all patches, or a factor for their number, may depend on that number
        "global_filter gpsa gqpe ggqpe log_n sgu gsgu lrpe glrpe lrpe_m token_mlp"
    ),
    "shift_by_one": "global_filter",  # a shifted filter is another filter
    "flip_rows": "global_filter",  # the same
}


def survivors(encoding: str, monkeypatch: Any) -> set[str]:
    """Return the mutations of an encoding that survive."""
    return {name for name in MUTATIONS if outcome(encoding, name, monkeypatch) == "survived"}


@pytest.mark.parametrize("encoding", [
    encoding if encoding in ("factorized", "relative_bias") else pytest.param(encoding, marks=pytest.mark.slow)
    for encoding in ENCODINGS
])  # fmt: skip
def test_each_mutation_that_changes_outputs_is_noticed_or_excused(monkeypatch, encoding):
    excused = {name for name, encodings in EXCUSED.items() if encoding in encodings.split()}
    assert survivors(encoding, monkeypatch) == excused


def test_another_right_encoding_is_no_fault(monkeypatch):
    assert outcome("relative_bias", "double", monkeypatch) == "survived"
