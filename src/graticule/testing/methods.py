"""The contract of encodings, joinings and backbones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from types import NoneType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from graticule.backbones.registry import create_model
from graticule.encodings.build import build_position
from graticule.position.grid import Grid
from graticule.position.joining import JOININGS
from graticule.position.layer import FIELD_KINDS
from graticule.position.position import ENCODINGS, LAYERS
from graticule.position.resampling import RESAMPLERS, build_resampler
from graticule.registry.registry import Registry
from graticule.registry.specs import Spec
from graticule.surgery.fold import fold, unfold
from graticule.testing.model_under_test import check_same, run
from graticule.testing.models import Finding, inspect_model
from graticule.testing.places import check_places, mixes

_PATCH, _DIM, _HEADS, _DEPTH, _CLASSES = 8, 24, 3, 3, 5
#: Grids of patches, (H, W): the first is that of the model, none is square.
_GRIDS = ((3, 5), (4, 2), (5, 7))

#: Field of `LayerPosition` -> an encoding and a joining that give it to layers; others are looked for.
FIELDS = {
    "added_to_stream": ("learnable", "shared"),
    "map_before": ("peg(places=-1)", "default"),
    "after_norm": ("learnable", "lape"),
    "inputs": ("convolutional_projection(places=-1)", "default"),
    "bias": ("relative_bias", "default"),
    "key_bias": ("irpe(on='q')", "default"),
    "value_bias": ("irpe(on='v')", "default"),
    "positional": ("gpsa", "default"),
    "rotary": ("rope_1d", "default"),
    "queries_keys": ("learnable", "queries_keys"),
    "query_scale": ("log_n(reference=2)", "default"),
    "map_after": ("peg", "default"),
    "mixing": ("sgu", "default"),
    "spatial_bias": ("sgu", "default"),
}

#: Builds a model; keyword arguments replace the default ones.
_Build = Callable[..., Any]


def check_encoding(
    encoding: str, joining: str = "default", *, compiled: bool = True, without_effect: Collection[str] = ()
) -> None:
    """Check the contract of encodings, in a small ViT, or a gMLP if it mixes tokens.

    Args:
        encoding: its name with options, such as 'fire(hidden=8)'.
        joining: the joining that passes it to the layers.
        compiled: whether to compile the model, too, which takes most of the time.
        without_effect: options that change nothing in such a small model (15 patches, 3 layers), or change only how the
            same result is computed. All other options must have an effect.

    Raises:
        AssertionError: naming the law that does not hold.
    """
    _check_model(_builder(encoding, joining), compiled)
    _check_layers(_builder(encoding, joining)())
    _check_subsets(_builder(encoding, joining))
    check_places(encoding, joining)
    sums = ENCODINGS.specs(encoding)
    for at, spec in enumerate(sums):

        def build(changed: Spec, at: int = at) -> Any:
            return _builder((*sums[:at], changed, *sums[at + 1 :]), joining)()

        _check_options(ENCODINGS, spec, build, without_effect)


def check_joining(
    joining: str, encoding: str = "learnable", *, compiled: bool = True, without_effect: Collection[str] = ()
) -> None:
    """Check a joining in the same way, with an absolute encoding."""
    _check_model(_builder(encoding, joining), compiled)
    _check_layers(_builder(encoding, joining)())
    _check_subsets(_builder(encoding, joining))
    check_places(encoding, joining)
    (spec,) = JOININGS.specs(joining)
    _check_options(JOININGS, spec, lambda changed: _builder(encoding, changed)(), without_effect)


def check_backbone(name: str, *, compiled: bool = True, **kwargs: Any) -> None:
    """Check the contract of backbones for a registered backbone.

    It includes that each field of `LayerPosition` in `takes` has an effect in each layer that gets it, so that no
    encoding is accepted and ignored. `graticule.lab.testing.check_training` trains it for a step of a recipe.

    Args:
        name: name of the model.
        compiled: whether to compile the model, too.
        kwargs: arguments of the model, such as smaller sizes.

    Raises:
        AssertionError: naming the law that does not hold.
    """

    def build(**more: Any) -> Any:
        return create_model(name, **{"num_classes": _CLASSES, **kwargs, **more})

    _check_model(build, compiled)
    _check_subsets(build)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _check_fields(build)


def check_model(
    model: nn.Module,
    img_size: tuple[int, int] | None = None,
    patch_size: tuple[int, int] | None = None,
    skip: Collection[str] = (),
) -> list[Finding]:
    """Check the position code of any model of images, of this library or not, as `graticule check` does.

    Args:
        model: a model of images (B, C, height, width); it is not changed.
        img_size: (height, width) in pixels; by default the model's own.
        patch_size: (height, width) of a patch; by default the model's own.
        skip: names of checks to leave out, such as 'export', which takes most of the time.

    Returns:
        The result of each check: passed, or not applicable with the reason.

    Raises:
        AssertionError: naming every check that failed, and its failure.
    """
    found = inspect_model(model, img_size, patch_size, skip)
    failed = [f"{one.check}: {one.detail}" for one in found if one.outcome == "failed"]
    assert not failed, "; ".join(failed)
    return found


def _builder(encoding: Any, joining: Any) -> _Build:
    """Return a function that builds a small model."""
    size = {
        "img_size": tuple(_PATCH * side for side in _GRIDS[0]),
        "patch_size": _PATCH,
        "num_classes": _CLASSES,
    }
    name, sizes = "vit_tiny_patch16_224", {"embed_dim": _DIM, "depth": _DEPTH, "num_heads": _HEADS}
    if mixes(encoding):
        name, sizes = "gmlp_s16_224", {"embed_dim": _DIM, "num_blocks": _DEPTH, "groups": _HEADS}

    def build(**kwargs: Any) -> Any:
        return create_model(name, **{"encoding": encoding, "joining": joining, **size, **sizes, **kwargs})

    return build


def _check_model(build: _Build, compiled: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _drawn(build()).double()
        images = torch.randn(2, model.in_chans, *model.img_size, dtype=torch.float64)
        _check_gradients(model, images)
        model.eval()
        logits = run(model, images)
        assert logits.shape == (2, _CLASSES), f"logits must be (2, {_CLASSES}), got {tuple(logits.shape)}"
        assert logits.isfinite().all(), "logits must be finite"
        _check_copies(build, model, images, logits)
        _check_other_grids(build, model, images)
        _check_folding(model, images, logits)
        _check_dtypes(model, images, logits)
        if compiled:
            graph: Any = torch.compile(copy.deepcopy(model), fullgraph=True, backend="eager")
            try:
                found = run(graph, images)
            except TorchDynamoException as error:
                raise AssertionError(f"a model must compile as one graph (fullgraph): {error}") from error
            check_same(found, logits, "a compiled model (fullgraph) must compute the same")


@torch.no_grad()
def _check_layers(model: Any) -> None:
    """Check that the fields of each layer have the shapes documented in `LayerPosition`, on some grids.

    And that autocast does not round tables, which are computed once for all images.
    """
    model.eval()  # a training position may draw random numbers
    for shape in (model.grid.shape, _GRIDS[1], (1, 7)):
        try:
            grid = Grid(*shape, prefix=model.grid.prefix)
            layers = model.position(grid)
        except ValueError:
            continue  # a clear error is allowed
        _check_shapes(layers, grid.tokens)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model.position(grid)
        for layer, other in zip(layers, rounded, strict=True):
            for field, value in layer._asdict().items():
                if isinstance(value, Tensor):
                    check_same(getattr(other, field), value, f"autocast must not round `{field}`")


def _check_shapes(positions: list[Any], n: int) -> None:
    batch = 2
    assert len(positions) == _DEPTH, f"there must be one LayerPosition per layer, {_DEPTH}, got {len(positions)}"
    sides = {"B": batch, "N": n, "D": _DIM, "h": _HEADS, "d": _DIM // _HEADS}
    for position in positions:
        for (field, kind), value in zip(FIELD_KINDS.items(), position, strict=True):
            computed = bool(kind.function_input) and callable(value)
            made = value(torch.rand([sides[letter] for letter in kind.function_input.split()])) if computed else value
            if isinstance(made, Tensor) and kind.shapes:
                allowed = [shape.split() for shape in kind.shapes if ("B" in shape) == computed]
                letters = next((each for each in allowed if len(each) == made.ndim), allowed[0])
                shape = tuple(sides[letter] for letter in letters)
                assert tuple(made.shape) == shape, f"`{field}` must be {shape}, got {tuple(made.shape)}"
        if position.positional is not None:
            for name, shape in (("weights", (_HEADS, n, n)), ("gate", (_HEADS, n, 1))):
                found = tuple(getattr(position.positional, name).shape)
                assert found == shape, f"`positional.{name}` must be {shape}, got {found}"


@torch.no_grad()
def _check_fields(build: _Build) -> None:
    """Check that every field in `takes` changes the output of each layer that gets it, for an encoding that gives it.

    So no encoding is accepted and ignored.
    """
    model = build().eval()
    _drawn(model)
    images, grids = torch.randn(2, model.in_chans, *model.img_size), model.layer_grids(model.grid)
    logits = model.forward_head(model.features_of(list(model.each_layer(images))))
    check_same(logits, run(model, images), "a model must compute its output from that of `each_layer`", 1e-4)
    unknown = model.takes - FIELD_KINDS.keys()
    assert not unknown, f"`takes` must have names of fields of LayerPosition, not {', '.join(unknown)}"
    own = str((model.created or {"arguments": {"encoding": "none"}})["arguments"]["encoding"])
    for field in sorted(model.takes):
        encoding, joining = choice_giving(field)
        for chosen in (encoding, f"{own} + {encoding}", own):  # a family may need its own encoding
            try:
                model = build(encoding=chosen, joining=joining)
            except ValueError:
                continue  # it is refused, so it cannot be ignored
            _drawn(model.eval())
            others = _drawn(copy.deepcopy(model.position))(model.grid)
            for layer, given in enumerate(model.position(model.grid)):
                if getattr(given, field) is None or grids[layer].within.tokens < 2:  # one token attends to itself
                    continue
                value = getattr(others[layer], field) if field in model.needs else None
                expected, found = (_after(model, images, layer, **each) for each in ({}, {field: value}))
                assert not torch.equal(found, expected), (
                    f"`takes` must have only fields that every layer uses, not `{field}`, which layer {layer} ignores"
                )
            break


def choice_giving(field: str) -> tuple[str, str]:
    """Return an encoding and a joining that give a field to layers: those of `FIELDS`, or the first encoding."""
    return FIELDS.get(field) or (_giving(field), "default")


def _giving(field: str) -> str:
    """Return the first encoding that gives a field to layers."""
    grid = Grid(2, 2)
    for name in ENCODINGS:
        try:
            layers = build_position(grid, dim=_DIM, depth=2, num_heads=_HEADS, encoding=name)(grid)
        except ValueError:
            continue
        if any(getattr(layer, field) is not None for layer in layers):
            return name
    raise AssertionError(f"`takes` must have only fields that an encoding gives to layers, not `{field}`")


def _after(model: Any, images: Tensor, layer: int, **changed: Any) -> Tensor:
    """Return the tokens after a layer, with fields of its position changed."""

    def change(_: nn.Module, args: Any, found: Any) -> Any:
        return [*found[:layer], found[layer]._replace(**changed), *found[layer + 1 :]]

    with model.position.register_forward_hook(change):
        tokens: Tensor = next(islice(model.each_layer(images), layer, None))[0]
    return tokens


def _check_options(
    registry: Registry[Any], spec: Spec, build: Callable[[Spec], Any], without_effect: Collection[str]
) -> None:
    """Check that every option has an effect, so that none is ignored and no cache omits one in its key."""

    def traits(changed: Spec) -> list[Any]:
        """Return everything that an option may change, in a comparable form."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = build(changed)
            found: list[Any] = [(name, p.requires_grad, p.tolist()) for name, p in model.position.named_parameters()]
            _drawn(model).eval()
            patch = [side // n for side, n in zip(model.img_size, model.grid.shape, strict=True)]
            for grid in _GRIDS:
                images = torch.randn(1, model.in_chans, *(side * n for side, n in zip(patch, grid, strict=True)))
                try:
                    found.append(run(model, images).tolist())
                except ValueError:
                    found.append(None)
            return found

    expected: list[Any] | None = None
    for name, option in registry.options(spec.name).items():
        if name in without_effect or option is LAYERS:
            continue
        tried = []
        for other in _other_values(option.kind, spec.options.get(name, option.default)):
            try:
                found = traits(Spec(spec.name, {**spec.options, name: other}))
            except ValueError:
                continue  # no valid value of this option in such a small model
            expected = traits(spec) if expected is None else expected
            if found != expected:
                break
            tried.append(other)
        else:
            values = " and ".join(map(repr, tried))
            assert not tried, f"the option `{name}` of {spec} must have an effect, {values} give the same"


def _other_values(kind: object, value: object) -> Iterator[Any]:
    """Yield some values of an option's type other than `value`."""
    kinds = get_args(kind)
    if kinds and all(isinstance(one, str) for one in kinds):
        yield from (one for one in kinds if one != value)
    elif kind is bool:
        yield not value
    elif kind is int:
        given = value if isinstance(value, int) else 1
        yield from (n for n in (given + 2, given + 1, 1, 2) if n != value)
    elif kind is float:
        yield 2 * value + 0.5 if isinstance(value, float | int) else 0.5
    elif int in kinds or float in kinds:
        yield from _other_values(next(one for one in kinds if one is not NoneType), value)


@torch.no_grad()
def _drawn(model: Any) -> Any:
    """Set every trainable parameter to random values, so that each one has an effect."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1) * 0.5)
    return model


def _check_gradients(model: Any, images: Tensor) -> None:
    model.train()
    found = model(images)
    logits = found if isinstance(found, Tensor) else sum(found)
    # the logits may depend on the class token alone, so not on the patches after the last layer
    (logits.square().sum() + model.forward_features(images).square().sum()).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # some gradients are exactly zero, such as of a bias of keys, but none of a parameter of position
    without = [name for name, p in trained.items() if p.grad is None or ("position" in name and not p.grad.any())]
    assert not without, f"a gradient must reach every parameter, not {', '.join(without)}"
    model.zero_grad()


@torch.no_grad()
def _check_subsets(build: _Build) -> None:
    """Check that patches in another order have the same outputs, or are refused."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _drawn(build()).double().eval()
        images = torch.randn(2, model.in_chans, *model.img_size, dtype=torch.float64)
        order = torch.randperm(model.grid.patches)
    if model.whole_grid:
        return
    try:
        check_same(
            model(images, keep=order), run(model, images), "patches in another order (`keep`) must compute the same"
        )
    except ValueError as error:
        assert "`keep`" in str(error) or "subset" in str(error), f"`keep` must be refused with the reason: {error}"


def _check_other_grids(build: _Build, model: Any, first: Tensor) -> None:
    """Check that another image size works, that `set_input_size` gives the same there, and restores the first size.

    Its parameters are those of a model that is built for that size, and as many are trained as before.
    """
    patch = [side // n for side, n in zip(model.img_size, model.grid.shape, strict=True)]
    for grid in _GRIDS[1:]:
        size = tuple(side * n for side, n in zip(patch, grid, strict=True))
        images = torch.randn(1, model.in_chans, *size, dtype=torch.float64)
        try:
            logits = run(model, images)
        except ValueError:
            continue  # a clear error is allowed
        assert logits.isfinite().all(), f"logits must be finite at a grid of {grid}"
        folded = fold(copy.deepcopy(model), size)
        check_same(run(folded, images), logits, f"a model folded for a grid of {grid} must compute the same")
        moved, frozen = copy.deepcopy(model), [name for name, _ in model.named_parameters()][::2]
        for name in frozen:
            moved.get_parameter(name).requires_grad_(False)
        before = {name: p.requires_grad for name, p in moved.named_parameters()}
        moved.set_input_size(size)
        found = run(moved, images)
        after = {name: p.requires_grad for name, p in moved.named_parameters()}
        assert after == before, "set_input_size must keep which parameters are trained"
        shapes, built = (
            {name: p.shape for name, p in each.named_parameters()} for each in (moved, build(img_size=size))
        )
        assert shapes == built, f"set_input_size must give the parameters of a model that is built for a grid of {grid}"
        assert found.isfinite().all(), f"logits must be finite after set_input_size, at a grid of {grid}"
        if _seen_by_blocks(moved, size) == _seen_by_blocks(model, size):
            check_same(found, logits, f"set_input_size must compute the same at a grid of {grid}")
        moved.set_input_size(model.img_size)
        held = {f"position.{name}" for name in model.position.table_shapes()}  # resampling twice smooths a table
        before, after = dict(model.named_parameters()), dict(moved.named_parameters())
        for name, value in before.items():
            same = after[name].shape == value.shape and (name in held or torch.equal(after[name], value))
            assert same, f"set_input_size there and back must leave {name} as it was"
        if all(torch.equal(after[name], value) for name, value in before.items()):
            check_same(run(moved, first), run(model, first), "set_input_size must restore the first size")


def _seen_by_blocks(model: Any, size: tuple[int, ...]) -> list[Any]:
    """Return the grid or the windows of each block for images of `size`; `set_input_size` may change windows."""
    return [model.where(stage, grid) for stage, grid in enumerate(model.position_grids(model.grid_at(size)))]


def _check_copies(build: _Build, model: nn.Module, images: Tensor, logits: Tensor) -> None:
    check_same(run(copy.deepcopy(model), images), logits, "a copy must compute the same")
    try:
        pickled = pickle.dumps(model)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AssertionError(f"a model must be picklable: {error}") from error
    check_same(run(pickle.loads(pickled), images), logits, "an unpickled model must compute the same")
    other = build().double().eval()
    other.load_state_dict(model.state_dict())
    check_same(run(other, images), logits, "a model with the same state dict must compute the same")
    for part in (other.position, other):
        if any(parameter.requires_grad for parameter in part.parameters()):
            _drawn(part)
            assert not torch.equal(run(other, images), logits), "two models with other parameters must differ"
    check_same(run(model, images), logits, "a second model must not change the first: no process-wide state")


def _check_folding(model: nn.Module, images: Tensor, logits: Tensor) -> None:
    folded = fold(copy.deepcopy(model))
    check_same(run(folded, images), logits, "a folded model must compute the same")
    check_same(run(copy.deepcopy(folded), images), logits, "a copy of a folded model must compute the same")
    check_same(run(unfold(folded), images), logits, "an unfolded model must compute the same")


def _check_dtypes(model: nn.Module, images: Tensor, expected: Tensor) -> None:
    for dtype, rounding in ((torch.float32, 1e-3), (torch.bfloat16, 0.5)):
        for kind, each in (("", copy.deepcopy(model)), (" folded", fold(copy.deepcopy(model)))):
            logits = run(each.to(dtype), images.to(dtype))
            assert logits.dtype == dtype and logits.isfinite().all(), f"logits must be finite {dtype}"
            law = f"a{kind} model must compute the same in {dtype}, up to rounding"
            check_same(logits.double(), expected, law, rounding)


_TABLES: tuple[Literal["positions", "displacements"], ...] = ("positions", "displacements")
#: Sides of grids before and after. Tables of displacements have odd sides.
_SIZES = (((7, 5), (7, 5)), ((7, 5), (13, 9)), ((13, 9), (5, 7)), ((7, 5), (3, 11)))


def check_resampler(resampler: str) -> None:
    """Check the contract of resamplers, for each kind of table that the resampler takes.

    Args:
        resampler: its name with options, such as 'bicubic(antialias=False)'.

    Raises:
        AssertionError: naming the law that does not hold.
    """
    (spec,) = RESAMPLERS.specs(resampler)
    takes = RESAMPLERS[spec.name].takes
    assert takes and takes <= set(_TABLES), f"`takes` must be of positions, displacements, got {takes}"
    for table in _TABLES:
        if table not in takes:
            continue
        one = build_resampler(spec, table)
        again = build_resampler(str(one), table)
        for old, new in _SIZES:
            where = f"from {old} to {new}"
            matrices = one.matrices(old, new)
            for matrix, shape, same in zip(
                matrices, ((new[0], old[0]), (new[1], old[1])), again.matrices(old, new), strict=True
            ):
                found = tuple(matrix.shape)
                assert found == shape, f"the matrix of an axis must be (new, old) = {shape} {where}, got {found}"
                assert matrix.dtype == torch.float64, f"the matrix of an axis must be float64, got {matrix.dtype}"
                ones = torch.ones(shape[0], dtype=matrix.dtype)
                error = (matrix.sum(1) - ones).abs().max().item()
                assert error < 1e-9, f"rows must sum to one {where}, the largest difference is {error:.1e}"
                assert torch.equal(matrix, same), f"{one} must give the same resampler as {spec}: keep every option"
            image = torch.randn(2, *old, dtype=torch.float64, requires_grad=True)
            made = one(image, new)
            assert tuple(made.shape) == (2, *new), f"a map {where} must be {(2, *new)}, got {tuple(made.shape)}"
            if old == new:
                assert torch.equal(made, image), "a map must be unchanged at its own size"
            made.square().sum().backward()
            assert image.grad is not None and image.grad.any(), f"a gradient must reach the map {where}"
