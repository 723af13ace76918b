"""The contract of encodings, joinings and backbones."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice, product
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
from graticule.registry.checks import BrokenContract
from graticule.registry.plugins import describe_error, plugin_line
from graticule.registry.registry import Registry
from graticule.registry.specs import Spec
from graticule.surgery.fold import fold, unfold
from graticule.testing.model_under_test import NotApplicable, check_same, refusal, run
from graticule.testing.models import Finding, inspect_model
from graticule.testing.places import LAWS as PLACE_LAWS
from graticule.testing.places import check_law, mixes

_PATCH, _DIM, _HEADS, _DEPTH, _CLASSES = 8, 24, 3, 3, 5
#: Grids of patches, (H, W), none of them square; the first is the grid of the model.
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
) -> list[Finding]:
    """Check the contract of encodings, in a small ViT, or a gMLP if it mixes tokens.

    Args:
        encoding: its name with options, such as 'fire(hidden=8)'.
        joining: the joining that passes it to the layers.
        compiled: whether to compile the model, too, which takes most of the time.
        without_effect: options that change nothing in such a small model (15 patches, 3 layers), or change only how the
            same result is computed. All other options must have an effect.

    Returns:
        The result of each law: passed, or not applicable with the reason.

    Raises:
        BrokenLaws: an AssertionError that names every law that does not hold.
    """
    options = partial(_check_options, ENCODINGS, encoding, lambda specs: _builder(specs, joining)(), without_effect)
    return _check_method(encoding, joining, compiled, options)


def check_joining(
    joining: str, encoding: str = "learnable", *, compiled: bool = True, without_effect: Collection[str] = ()
) -> list[Finding]:
    """Check a joining in the same way, with an absolute encoding."""
    options = partial(_check_options, JOININGS, joining, lambda specs: _builder(encoding, *specs)(), without_effect)
    return _check_method(encoding, joining, compiled, options)


def _check_method(encoding: str, joining: str, compiled: bool, options: Callable[[], None]) -> list[Finding]:
    """Check an encoding with a joining; `options` is the law of the options of one of them."""
    places = {name: lambda case, name=name: check_law(name, encoding, joining) for name in PLACE_LAWS}
    laws = {"layers": _layers, **LAWS, "device": _device, **places, "options": lambda case: options()}
    return _check_laws(_builder(encoding, joining), compiled, laws)


def check_backbone(name: str, *, compiled: bool = True, **kwargs: Any) -> list[Finding]:
    """Check the contract of backbones for a registered backbone.

    It includes that each field of `LayerPosition` in `takes` has an effect in each layer that gets it, so that no
    encoding is accepted and ignored. `graticule.lab.testing.check_training` trains it for a step of a recipe.

    Args:
        name: name of the model.
        compiled: whether to compile the model, too.
        kwargs: arguments of the model, such as smaller sizes.

    Returns:
        The result of each law, as `check_encoding`.

    Raises:
        BrokenLaws: an AssertionError that names every law that does not hold.
    """

    def build(**more: Any) -> Any:
        return create_model(name, **{"num_classes": _CLASSES, **kwargs, **more})

    return _check_laws(build, compiled, {**LAWS, "fields": _fields})


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
    findings = inspect_model(model, img_size, patch_size, skip)
    failed = [f"{finding.check}: {finding.detail}" for finding in findings if finding.outcome == "failed"]
    assert not failed, "; ".join(failed)
    return findings


def _builder(encoding: Any, joining: Any) -> _Build:
    pixels = tuple(_PATCH * side for side in _GRIDS[0])
    size = {"img_size": pixels, "patch_size": _PATCH, "num_classes": _CLASSES}
    name, sizes = "vit_tiny_patch16_224", {"embed_dim": _DIM, "depth": _DEPTH, "num_heads": _HEADS}
    if mixes(encoding):
        name, sizes = "gmlp_s16_224", {"embed_dim": _DIM, "num_blocks": _DEPTH, "groups": _HEADS}

    def build(**kwargs: Any) -> Any:
        return create_model(name, **{"encoding": encoding, "joining": joining, **size, **sizes, **kwargs})

    return build


class _Case:
    """A model in float64 and evaluation mode with random parameters, which no law changes, and its outputs."""

    def __init__(self, build: _Build) -> None:
        self.build = build

    @cached_property
    def model(self) -> Any:
        return _draw(self.build()).double().eval()

    @cached_property
    def images(self) -> Tensor:
        return _images(self.model, self.model.grid.shape, 2).double()

    @cached_property
    def logits(self) -> Tensor:
        return run(self.model, self.images)


_Law = Callable[[_Case], object]


class BrokenLaws(AssertionError):
    """Laws do not hold; `findings` has the result of each law, and the message those that failed."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("; ".join(f"{law.check}: {law.detail}" for law in findings if law.outcome == "failed"))
        self.findings = findings


def _check_laws(build: _Build, compiled: bool, laws: Mapping[str, _Law]) -> list[Finding]:
    """Check the laws of a model, and return their results; an error of its code is a failure, which is named once."""
    findings: list[Finding] = []
    failed: dict[str, tuple[str, list[str]]] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        case = _Case(build)
        for name, law in laws.items():
            if name == "compilation" and not compiled:
                continue
            try:
                law(case)
            except NotApplicable as reason:
                findings.append(Finding(name, "not applicable", str(reason)))
            except Exception as error:
                of_law = isinstance(error, AssertionError) and not plugin_line(error)
                text, cause = str(error) if of_law else describe_error(error), error.__cause__
                if cause is not None and describe_error(cause) in failed:
                    text = describe_error(cause)
                same = text.partition(" = ")[0] if isinstance(error, BrokenContract) else text  # on any grid
                failed.setdefault(same, (text, []))[1].append(name)
            else:
                findings.append(Finding(name, "passed", ""))
    for text, (name, *others) in failed.values():
        more = f" and {len(others)} other laws" if len(others) > 1 else "".join(f" and {other}" for other in others)
        findings.append(Finding(f"{name}{more}", "failed", text))
    if failed:
        raise BrokenLaws(findings)
    return findings


def _gradients(case: _Case) -> None:
    shape = tuple(case.logits.shape)
    assert shape == (2, _CLASSES), f"logits must be (2, {_CLASSES}), got {shape}"
    assert case.logits.isfinite().all(), "logits must be finite"
    model = copy.deepcopy(case.model).train()
    outputs = model(case.images)
    logits = outputs if isinstance(outputs, Tensor) else sum(outputs)
    # the logits may depend on the class token alone, so not on the patches after the last layer
    (logits.square().sum() + model.forward_features(case.images).square().sum()).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # some gradients are exactly zero, such as of a bias of keys, but none of a parameter of position
    without = [name for name, p in trained.items() if p.grad is None or ("position" in name and not p.grad.any())]
    assert not without, f"a gradient must reach every parameter, not {', '.join(without)}"


def _copies(case: _Case) -> None:
    model, images, logits = case.model, case.images, case.logits
    check_same(run(copy.deepcopy(model), images), logits, "a copy must compute the same")
    try:
        pickled = pickle.dumps(model)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AssertionError(f"a model must be picklable: {error}") from error
    check_same(run(pickle.loads(pickled), images), logits, "an unpickled model must compute the same")
    other = case.build().double().eval()
    other.load_state_dict(model.state_dict())
    check_same(run(other, images), logits, "a model with the same state dict must compute the same")
    for part in (other.position, other):
        if any(parameter.requires_grad for parameter in part.parameters()):
            _draw(part)
            assert not torch.equal(run(other, images), logits), "two models with other parameters must differ"
    check_same(run(model, images), logits, "a second model must not change the first: no process-wide state")


def _meta(case: _Case) -> None:
    """Check that a model from the meta device is the same model once its state dict is loaded."""
    for assign in (False, True):
        try:
            with torch.device("meta"):
                other = case.build().double().eval()
        except (NotImplementedError, RuntimeError) as error:
            raise AssertionError(f"a model must be built on the meta device: {error}") from error
        if not assign:
            other.to_empty(device="cpu")
            for tensor in (*other.parameters(), *other.buffers()):
                tensor.detach().fill_(3)  # what memory may hold
        other.load_state_dict(case.model.state_dict(), assign=assign)
        law = "a model from the meta device must compute the same once its state dict is loaded (`compute_buffers`)"
        check_same(run(other, case.images), case.logits, law, 0.0)


def _sizes(case: _Case) -> None:
    """Check that other image sizes work, also by `set_input_size`, as in a model that is built for them, and back."""
    model = case.model
    for grid in (*_GRIDS[1:], _GRIDS[0][::-1]):  # the last has as many patches as the first
        images = _images(model, grid, 1).double()
        size: Any = tuple(images.shape[2:])
        try:
            logits = run(model, images)
        except refusal():
            continue  # a clear error is allowed
        assert logits.isfinite().all(), f"logits must be finite at a grid of {grid}"
        folded = fold(copy.deepcopy(model), size)
        check_same(run(folded, images), logits, f"a model folded for a grid of {grid} must compute the same")
        moved = copy.deepcopy(model)
        for parameter in [*moved.parameters()][::2]:
            parameter.requires_grad_(False)
        trained = {name: p.requires_grad for name, p in moved.named_parameters()}
        moved.set_input_size(size)
        assert trained == {name: p.requires_grad for name, p in moved.named_parameters()}, (
            "set_input_size must keep which parameters are trained"
        )
        built = case.build(img_size=size).double().eval()
        assert _shapes(moved) == _shapes(built), (
            f"set_input_size must give the parameters of a model that is built for a grid of {grid}"
        )
        built.load_state_dict(moved.state_dict())
        resized_logits = run(moved, images)
        law = f"a grid of {grid} must have the same position after other grids as in a model that is built for it"
        check_same(resized_logits, run(built, images), f"{law}, with the same state dict")
        assert resized_logits.isfinite().all(), f"logits must be finite after set_input_size, at a grid of {grid}"
        if _seen_by_blocks(moved, size) == _seen_by_blocks(model, size):
            check_same(resized_logits, logits, f"set_input_size must compute the same at a grid of {grid}")
        moved.set_input_size(model.img_size)
        resampled = {f"position.{name}" for name in model.position.table_shapes()}  # resampling twice smooths a table
        assert _shapes(moved) == _shapes(model), "set_input_size there and back must keep all shapes"
        changed = {
            name for name, value in moved.named_parameters() if not torch.equal(value, model.get_parameter(name))
        }
        assert changed <= resampled, f"set_input_size there and back must leave {min(changed - resampled)} as it was"
        if not changed:
            check_same(run(moved, case.images), case.logits, "set_input_size must restore the first size")


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _seen_by_blocks(model: Any, size: tuple[int, ...]) -> list[Any]:
    """Return the grid or the windows of each block for images of `size`; `set_input_size` may change windows."""
    return [model.block_arguments(stage, grid) for stage, grid in enumerate(model.position_grids(model.grid_at(size)))]


def _batch(case: _Case) -> None:
    check_same(run(case.model, case.images[1:]), case.logits[1:], "an image must give the same alone and in a batch")


def _folding(case: _Case) -> None:
    images, folded = case.images, fold(copy.deepcopy(case.model))
    check_same(run(folded, images), case.logits, "a folded model must compute the same")
    check_same(run(copy.deepcopy(folded), images), case.logits, "a copy of a folded model must compute the same")
    check_same(run(unfold(folded), images), case.logits, "an unfolded model must compute the same")


def _dtypes(case: _Case) -> None:
    for dtype, rounding in ((torch.float32, 1e-3), (torch.bfloat16, 0.5)):
        for kind, model in (("", copy.deepcopy(case.model)), (" folded", fold(copy.deepcopy(case.model)))):
            with model.position.register_forward_hook(partial(_check_added, dtype)):
                logits = run(model.to(dtype), case.images.to(dtype))
            assert logits.dtype == dtype and logits.isfinite().all(), f"logits must be finite {dtype}"
            law = f"a{kind} model must compute the same in {dtype}, up to rounding"
            check_same(logits.double(), case.logits, law, rounding)


def _check_added(dtype: torch.dtype, _: nn.Module, __: Any, layers: Sequence[Any]) -> None:
    """Check the dtype of tables that are added to tokens."""
    for layer, field in product(layers, ("added_to_stream", "after_norm")):
        value = getattr(layer, field)
        assert not isinstance(value, Tensor) or value.dtype == dtype, f"`{field}` must be {dtype}, got {value.dtype}"


def _compilation(case: _Case) -> None:
    graph: Any = torch.compile(copy.deepcopy(case.model), fullgraph=True, backend="eager")
    try:
        logits = run(graph, case.images)
    except TorchDynamoException as error:
        raise AssertionError(f"a model must compile as one graph (fullgraph): {error}") from error
    check_same(logits, case.logits, "a compiled model (fullgraph) must compute the same")


@torch.no_grad()
def _subsets(case: _Case) -> None:
    """Check that patches in another order have the same outputs, or are refused."""
    if case.model.whole_grid:
        raise NotApplicable("it mixes all patches of the grid")
    try:
        logits = case.model(case.images, keep=torch.randperm(case.model.grid.patches))
    except refusal() as error:
        assert "`keep`" in str(error) or "subset" in str(error), f"`keep` must be refused with the reason: {error}"
        raise NotApplicable(f"refused: {error}") from error
    else:
        check_same(logits, case.logits, "patches in another order (`keep`) must compute the same")


#: Name of each law of a model -> its function.
LAWS: dict[str, _Law] = {
    law.__name__.strip("_"): law
    for law in (_gradients, _copies, _meta, _batch, _sizes, _folding, _dtypes, _compilation, _subsets)
}


@torch.no_grad()
def _device(case: _Case) -> None:
    """Check on the meta device, which needs no accelerator, that no tensor of the position is made on the CPU."""
    model = case.build().eval().to("meta")
    if not any(True for _ in (*model.position.parameters(), *model.position.buffers())):
        raise NotApplicable("it has neither parameters nor buffers, whose device it would follow")
    try:
        run(model, case.images.float().to("meta"))
    except RuntimeError as error:
        raise AssertionError(
            f"every tensor must be made on the device of the parameters: {describe_error(error)}"
        ) from error


@torch.no_grad()
def _layers(case: _Case) -> None:
    """Check the documented shapes of fields on some grids, and that autocast does not round tables."""
    model = case.build().eval()  # a training position may draw random numbers
    for shape in (model.grid.shape, _GRIDS[1], (1, 7)):
        try:
            grid = Grid(*shape, prefix=model.grid.prefix)
            layers = model.position(grid)
        except refusal():
            continue  # a clear error is allowed
        assert len(layers) == _DEPTH, f"there must be one LayerPosition per layer, {_DEPTH}, got {len(layers)}"
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model.position(grid)
        for layer, other in zip(layers, rounded, strict=True):
            _check_shapes(layer, grid.tokens)
            for field, value in layer._asdict().items():
                if isinstance(value, Tensor):
                    check_same(getattr(other, field), value, f"autocast must not round `{field}`")


def _check_shapes(position: Any, n: int) -> None:
    sides = {"B": 2, "N": n, "D": _DIM, "h": _HEADS, "d": _DIM // _HEADS}
    for (field, kind), value in zip(FIELD_KINDS.items(), position, strict=True):
        computed = bool(kind.function_input) and callable(value)
        result = value(torch.rand([sides[letter] for letter in kind.function_input.split()])) if computed else value
        if isinstance(result, Tensor) and kind.shapes:
            allowed = [shape.split() for shape in kind.shapes if ("B" in shape) == computed]
            letters = next((axes for axes in allowed if len(axes) == result.ndim), allowed[0])
            shape = tuple(sides[letter] for letter in letters)
            assert result.shape == shape, f"`{field}` must be {shape}, got {tuple(result.shape)}"
            assert result.is_floating_point(), f"`{field}` must be in floating point, got {result.dtype}"
    if position.positional is not None:
        for name, shape in (("weights", (_HEADS, n, n)), ("gate", (_HEADS, n, 1))):
            actual = tuple(getattr(position.positional, name).shape)
            assert actual == shape, f"`positional.{name}` must be {shape}, got {actual}"


@torch.no_grad()
def _fields(case: _Case) -> None:
    """Check that every field in `takes` changes the output of each layer that gets it, so that none is ignored."""
    model = _draw(case.build().eval())
    images, grids = _images(model, model.grid.shape, 2), model.layer_grids(model.grid)
    logits = model.forward_head(model.features_of(list(model.each_layer(images))))
    check_same(logits, run(model, images), "a model must compute its output from the tokens of `each_layer`", 1e-4)
    unknown = model.takes - FIELD_KINDS.keys()
    assert not unknown, f"`takes` must have names of fields of LayerPosition, not {', '.join(unknown)}"
    default = str((model.created or {"arguments": {"encoding": "none"}})["arguments"]["encoding"])
    for field in sorted(model.takes):
        encoding, joining = FIELDS.get(field) or (_giving(field), "default")
        for chosen in (encoding, f"{default} + {encoding}", default):  # a family may need its own encoding
            try:
                model = case.build(encoding=chosen, joining=joining)
            except refusal():
                continue  # it is refused, so it cannot be ignored
            _draw(model.eval())
            others = _draw(copy.deepcopy(model.position))(model.grid)
            for layer, position in enumerate(model.position(model.grid)):
                if getattr(position, field) is None or grids[layer].within.tokens < 2:  # one token attends to itself
                    continue
                value = getattr(others[layer], field) if field in model.needs else None
                expected, tokens = (_after(model, images, layer, **changed) for changed in ({}, {field: value}))
                assert not torch.equal(tokens, expected), (
                    f"`takes` must have only fields that every layer uses, not `{field}`, which layer {layer} ignores"
                )
            break


def _giving(field: str) -> str:
    """Return the first encoding that gives a field to layers."""
    grid = Grid(2, 2)
    for name in ENCODINGS:
        try:
            layers = build_position(grid, dim=_DIM, depth=2, num_heads=_HEADS, encoding=name)(grid)
        except refusal():
            continue
        if any(getattr(layer, field) is not None for layer in layers):
            return name
    raise AssertionError(f"`takes` must have only fields that an encoding gives to layers, not `{field}`")


def _after(model: Any, images: Tensor, layer: int, **changed: Any) -> Tensor:
    """Return the tokens after a layer, with fields of its position changed."""

    def change(_: nn.Module, args: Any, positions: Any) -> Any:
        return [*positions[:layer], positions[layer]._replace(**changed), *positions[layer + 1 :]]

    with model.position.register_forward_hook(change):
        tokens: Tensor = next(islice(model.each_layer(images), layer, None))[0]
    return tokens


def _check_options(
    registry: Registry[Any], choice: str, build: Callable[[Sequence[Spec]], Any], without_effect: Collection[str]
) -> None:
    """Check that every option has an effect, so that none is ignored and no cache omits one in its key."""
    specs = tuple(registry.specs(choice))
    expected: list[Any] = []
    for index, spec in enumerate(specs):
        for name, option in registry.options(spec.name).items():
            if name in without_effect or option is LAYERS:
                continue
            tried = []
            for value in _other_values(option.kind, spec.options.get(name, option.default)):
                changed = (*specs[:index], Spec(spec.name, {**spec.options, name: value}), *specs[index + 1 :])
                expected = expected or [*_traits(partial(build, specs))]
                try:
                    if any(map(operator.ne, _traits(partial(build, changed)), expected)):
                        break
                except refusal():
                    continue  # no valid value of this option in such a small model
                tried.append(value)
            else:
                values = " and ".join(map(repr, tried))
                assert not tried, f"the option `{name}` of {spec} must have an effect, {values} give the same"


def _traits(build: _Build) -> Iterator[Any]:
    """Yield everything that an option may change, in a comparable form."""
    torch.manual_seed(0)
    model = build()
    yield [(name, p.requires_grad, p.tolist()) for name, p in model.position.named_parameters()]
    _draw(model).eval()
    for grid in _GRIDS:
        try:
            yield run(model, _images(model, grid, 1)).tolist()
        except refusal():
            yield None


def _other_values(kind: object, value: object) -> Iterator[Any]:
    """Yield some values of an option's type other than `value`."""
    kinds = get_args(kind)
    if kinds and all(isinstance(choice, str) for choice in kinds):
        yield from (choice for choice in kinds if choice != value)
    elif kind is bool:
        yield not value
    elif kind is int:
        number = value if isinstance(value, int) else 1
        yield from (n for n in (number + 2, number + 1, 1, 2) if n != value)
    elif kind is float:
        yield 2 * value + 0.5 if isinstance(value, float | int) else 0.5
    elif int in kinds or float in kinds:
        yield from _other_values(next(choice for choice in kinds if choice is not NoneType), value)


def _images(model: Any, grid: tuple[int, ...], batch: int) -> Tensor:
    """Return random images for a grid of patches of the size that the model has."""
    patch = (side // count for side, count in zip(model.img_size, model.grid.shape, strict=True))
    return torch.randn(batch, model.in_chans, *(side * count for side, count in zip(patch, grid, strict=True)))


@torch.no_grad()
def _draw(model: Any) -> Any:
    """Set every trainable parameter to random values, so that each one has an effect."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1) * 0.5)
    return model


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
    for table, (old, new) in product(_TABLES, _SIZES):
        if table not in takes:
            continue
        resample = build_resampler(spec, table)
        again = build_resampler(str(resample), table)
        where = f"from {old} to {new}"
        for axis, (matrix, same) in enumerate(zip(resample.matrices(old, new), again.matrices(old, new), strict=True)):
            shape = new[axis], old[axis]
            actual = tuple(matrix.shape)
            assert actual == shape, f"the matrix of an axis must be (new, old) = {shape} {where}, got {actual}"
            assert matrix.dtype == torch.float64, f"the matrix of an axis must be float64, got {matrix.dtype}"
            error = (matrix.sum(1) - 1).abs().max().item()
            assert error < 1e-9, f"rows must sum to one {where}, the largest difference is {error:.1e}"
            assert torch.equal(matrix, same), f"{resample} must give the same resampler as {spec}: keep every option"
        image = torch.randn(2, *old, dtype=torch.float64, requires_grad=True)
        resampled = resample(image, new)
        assert resampled.shape == (2, *new), f"a map {where} must be {(2, *new)}, got {tuple(resampled.shape)}"
        if old == new:
            assert torch.equal(resampled, image), "a map must be unchanged at its own size"
        resampled.square().sum().backward()
        assert image.grad is not None and image.grad.any(), f"a gradient must reach the map {where}"
