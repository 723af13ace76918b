"""The flow of position through a forward pass: where tensors that are the same for all images meet the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from graticule.external.images import call, evaluating
from graticule.external.recorder import attention_arguments, logits_of

#: Values of a mask below which a pair of tokens is masked.
_MASKED = -50.0
_ADDITIONS = {"add", "add_"}
_MULTIPLICATIONS = {"mul", "mul_"}
_PRODUCTS = {"matmul", "bmm", "einsum"}
#: Functions that take the type or the shape of their second tensor, and no values.
_LIKE = {"type_as", "expand_as", "view_as", "reshape_as"}
#: Functions whose outputs are no logits any more, and no terms of them.
_CONSUMERS = {*_PRODUCTS, "linear", "layer_norm", "conv2d", "conv3d", "scaled_dot_product_attention"}


@dataclass
class PositionUse:
    """A call in which a constant, the same for all images, meets a tensor that depends on the images.

    kind: 'added' to it, 'logits' or 'weights': added to products of queries and keys before or after the softmax,
        'multiplied' by it, 'projected': it is projected on the constant, or 'relative': such a projection is added to
        logits (then there is no constant).
    constant: its value, without masks.
    shape: of the tensor that depends on the images.
    axes: the axes of the constant that have more than one value, counted from the end.
    source_parameters: names of the parameters and buffers that it is computed from.
    within: names of the modules of lists that call it, from the outermost.
    age: number of the tensor that depends on the images, in the order in which they are made.
    other: index of the multiplication whose product is added to this one.
    terms: of 'relative', the indices of the projections.
    """

    kind: Literal["added", "logits", "weights", "multiplied", "projected", "relative"]
    constant: Tensor | None
    shape: torch.Size
    axes: tuple[int, ...]
    source_parameters: frozenset[str]
    within: tuple[str, ...]
    age: int
    other: int | None = None
    terms: frozenset[int] = frozenset()


@dataclass(frozen=True)
class AttentionCall:
    """A call of softmax attention: the modules of lists that call it, and weights (B, h, N, M) if they are kept."""

    within: tuple[str, ...]
    weights: Tensor | None


@dataclass(eq=False)
class ModuleCall:
    """A call of a module with its tensors, and its output."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    output: Any = None


@dataclass(frozen=True)
class TensorFacts:
    """Facts of a tensor that depends on the images; `factor` and `terms` are indices of uses that it is made by."""

    age: int
    logits: bool = False
    weights: bool = False
    terms: frozenset[int] = frozenset()
    factor: int | None = None


#: From the index of a use and a tensor of it to the tensor that replaces it.
Change = Callable[[int, Tensor], Tensor]


class PositionTracer(TorchFunctionMode):
    """Follows the tensors of one forward pass of a model.

    Args:
        model: the model.
        change: replaces the constants of uses, and where a projection is added to logits, that.
        before: replaces the tensors that depend on the images before they are projected.
        keep: whether the weights of attention are kept.
        stem: index and value (B, D, H, W) of a map of a convolution that is replaced, if there is one of that index;
            attention then returns zeros, so that each token depends only on its patch of the map, or of the image.
        modules: whether all calls of modules are kept.

    uses, attentions, calls: in the order of their calls.
    norms: name of a module of a list -> weight, bias and eps of the LayerNorm of its input, if that is its first call.
    called: outputs of the modules of lists, the first tensor of each, in the order of their calls.
    maps: outputs (B, D, H, W) of convolutions, with the names of the modules of lists that call them, and the number
        of such modules that have returned before.
    """

    def __init__(
        self,
        model: nn.Module,
        change: Change | None = None,
        before: Change | None = None,
        keep: bool = False,
        stem: tuple[int, Tensor] | None = None,
        modules: bool = False,
    ) -> None:
        super().__init__()
        self.calls: list[ModuleCall] = []
        self.uses: list[PositionUse] = []
        self.attentions: list[AttentionCall] = []
        self.norms: dict[str, tuple[Tensor | None, Tensor | None, float]] = {}
        self.called: dict[str, Tensor] = {}
        self.maps: list[tuple[tuple[str, ...], Tensor, int]] = []
        self._model, self._change, self._before, self._keep, self._stem = model, change, before, keep, stem
        self._modules = modules
        self._names = {id(value): name for name, value in [*model.named_buffers(), *model.named_parameters()]}
        self._facts: Any = WeakTensorKeyDictionary()
        self._source_parameters: Any = WeakTensorKeyDictionary()
        self._masks: Any = WeakTensorKeyDictionary()
        self._within: list[str] = []
        self._entered: dict[str, Any] = {}
        self._count = 0

    @contextmanager
    def following(self, *inputs: Tensor) -> Iterator[None]:
        """Follow what is made of `inputs` within the block."""
        for x in inputs:
            self._facts[x] = TensorFacts(0)
        lists = [pair for pair in self._model.named_modules() if isinstance(pair[1], nn.ModuleList | nn.Sequential)]
        listed = [
            (f"{parent}.{child}".lstrip("."), part) for parent, parts in lists for child, part in parts.named_children()
        ]
        every = list(self._model.named_modules()) if self._modules else []
        with ExitStack() as hooks:
            for modules, enter, leave in ((listed, self._enter, self._leave), (every, self._call, self._return)):
                for name, module in modules:
                    before, after = partial(enter, name), partial(leave, name)
                    hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                    hooks.callback(module.register_forward_hook(after).remove)
            with self:
                yield

    def run(self, images: Tensor | Mapping[str, Any]) -> Any:
        """Call the model in evaluation mode with images, or a mapping of keyword arguments; return its output."""
        with evaluating(self._model), self.following(*nested_tensors(images)):
            return call(self._model, images)

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._within.append(name)
        inputs = (*args, *kwargs.values())
        self._entered[name] = next((value for value in inputs if isinstance(value, Tensor)), None)

    def _leave(self, name: str, module: nn.Module, args: object, output: Any) -> None:
        self._within.pop()
        first = next(nested_tensors(output), None)
        if first is not None and first in self._facts:
            self.called[name] = first.detach()

    def _call(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = tuple(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        self.calls.append(ModuleCall(name, module, inputs))

    def _return(self, name: str, module: nn.Module, args: object, output: Any) -> None:
        next(call for call in reversed(self.calls) if call.module is module and call.output is None).output = output

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [*nested_tensors(args), *nested_tensors(named)]
        if name in _LIKE:
            tensors = tensors[:1]
        if not any(x in self._facts for x in tensors):
            return self._constant(name, tensors, func(*args, **named))
        self._count += 1
        facts = self._passed_on(name, tensors)
        if name in _ADDITIONS and len(args) == 2:
            args, facts = self._added(args, facts)
        elif name in _MULTIPLICATIONS and len(args) == 2:
            args, facts = self._multiplied(args, facts)
        elif name in _PRODUCTS:
            args, facts = self._projected(name, args, facts)
        elif name == "layer_norm":
            self._normalized(args, named)
        elif func is F.scaled_dot_product_attention:
            named = self._attention(args, named)
            args = ()
        elif name == "multi_head_attention_forward":
            return self._multihead(func, args, named, facts)
        output = func(*args, **named)
        if name in ("softmax", "_softmax") and (facts.logits or output.ndim > 3) and not facts.weights:
            facts = replace(facts, logits=True, weights=True)
            self.attentions.append(AttentionCall(tuple(self._within), output.detach() if self._keep else None))
        if self._stem and (func is F.scaled_dot_product_attention or (facts.weights and "softmax" in name)):
            output = torch.zeros_like(output)
        if name == "conv2d" and self._stem and len(self.maps) == self._stem[0]:
            output = self._stem[1].view(output.shape)
        if name == "conv2d" and output.ndim > 3:
            self.maps.append((tuple(self._within), output.detach(), len(self.called)))
        for x in [args[0]] if name == "__setitem__" else nested_tensors(output):
            same = facts.logits and x.ndim >= 3 and any(x.shape[-2:] == other.shape[-2:] for other in tensors)
            keeps = same or (name in _PRODUCTS and facts.logits)
            self._facts[x] = facts if keeps else replace(facts, logits=False, weights=False)
        return output

    def _constant(self, name: str, tensors: list[Tensor], output: Any) -> Any:
        """Note what a tensor that does not depend on the images is computed from."""
        source_parameters = frozenset[str]().union(*map(self._sources_of, tensors))
        outputs = [tensors[0]] if name == "__setitem__" else list(nested_tensors(output))
        for x in outputs:
            if source_parameters and id(x) not in self._names:
                self._source_parameters[x] = source_parameters
        if name in _ADDITIONS and len(tensors) == 2 and outputs:
            for bias, mask in (tensors, tensors[::-1]):
                if _is_mask(mask) and not _is_mask(bias):
                    self._masks[outputs[0]] = (bias, mask)
        return output

    def _sources_of(self, value: Tensor) -> frozenset[str]:
        name = self._names.get(id(value))
        return self._source_parameters.get(value, frozenset()) if name is None else frozenset((name,))

    def _passed_on(self, name: str, tensors: list[Tensor]) -> TensorFacts:
        """Return the facts of a function's outputs for some tensors."""
        known = [self._facts[x] for x in tensors if x in self._facts]
        if name in _CONSUMERS:
            return TensorFacts(self._count, logits=name in _PRODUCTS and len(known) == 2)
        terms = frozenset[int]().union(*(facts.terms for facts in known))
        logits, weights = any(facts.logits for facts in known), any(facts.weights for facts in known)
        return TensorFacts(self._count, logits, weights, terms)

    def _parts(self, args: tuple[Any, ...]) -> tuple[int, Tensor, Tensor] | None:
        """Return the index of the constant among two arguments, the other one and the constant; None without one."""
        if not all(isinstance(x, Tensor) for x in args):
            return None
        constants = [at for at, x in enumerate(args) if x not in self._facts]
        return (constants[0], args[1 - constants[0]], args[constants[0]]) if constants else None

    def _added(self, args: tuple[Any, ...], facts: TensorFacts) -> tuple[tuple[Any, ...], TensorFacts]:
        if all(isinstance(x, Tensor) and x in self._facts for x in args):
            return self._added_content(args, facts)
        parts = self._parts(args)
        if parts is None:
            return args, facts
        at, x, constant = parts
        kind: Any = "weights" if self._facts[x].weights else "logits" if self._facts[x].logits else "added"
        return _with(args, at, self._record_use(kind, x, constant)), facts

    def _added_content(self, args: tuple[Any, ...], facts: TensorFacts) -> tuple[tuple[Any, ...], TensorFacts]:
        """Note two products whose sum is a rotation, and a projection that is added to logits."""
        first, second = (self._facts[x] for x in args)
        if first.factor is not None and second.factor is not None:
            self.uses[first.factor].other = second.factor
            self.uses[second.factor].other = first.factor
        for at, (added, other) in enumerate(((first, second), (second, first))):
            if added.terms and other.logits:
                return _with(args, at, self._relative(args[at])), replace(facts, terms=frozenset())
        return args, facts

    def _relative(self, terms: Tensor) -> Tensor:
        """Meet a projection that is added to logits, or passed to attention as its mask."""
        indices = self._facts[terms].terms
        source_parameters = frozenset[str]().union(*(self.uses[index].source_parameters for index in indices))
        within = tuple(self._within)
        use = PositionUse(
            "relative", None, terms.shape, (-2, -1), source_parameters, within, self._count, terms=indices
        )
        self.uses.append(use)
        return terms if self._change is None else self._change(len(self.uses) - 1, terms)

    def _multiplied(self, args: tuple[Any, ...], facts: TensorFacts) -> tuple[tuple[Any, ...], TensorFacts]:
        parts = self._parts(args)
        if parts is None:
            return args, facts
        at, x, constant = parts
        before = len(self.uses)
        args = _with(args, at, self._record_use("multiplied", x, constant))
        return args, replace(facts, factor=before) if len(self.uses) > before else facts

    def _projected(self, name: str, args: tuple[Any, ...], facts: TensorFacts) -> tuple[tuple[Any, ...], TensorFacts]:
        first = 1 if name == "einsum" else 0
        operands = args[first] if len(args) == first + 1 else args[first:]
        if self._keep and self.attentions and operands[0] in self._facts and self._facts[operands[0]].weights:
            self.attentions[-1] = replace(self.attentions[-1], weights=operands[0].detach())  # as they are used
        parts = self._parts(tuple(operands)) if len(operands) == 2 else None
        if parts is None or parts[2].ndim < 3 or not self._sources_of(parts[2]):
            return args, facts
        at, x, constant = parts
        index = len(self.uses)
        changed = self._record_use("projected", x, constant)
        if len(self.uses) == index:
            return args, facts
        x = x if self._before is None else self._before(index, x)
        both = (changed, x) if at == 0 else (x, changed)
        return (*args[:first], *both), replace(facts, terms=frozenset((index,)))

    def _normalized(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        names = ("input", "normalized_shape", "weight", "bias", "eps")
        arguments = {"eps": 1e-5, **dict(zip(names, args, strict=False)), **named}
        for name in self._within:
            if args[0] is self._entered[name]:
                self.norms.setdefault(name, (arguments.get("weight"), arguments.get("bias"), arguments["eps"]))

    def _attention(self, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """Meet the mask of PyTorch's attention; returns all of its arguments by name."""
        named = attention_arguments(args, named)
        query, key, mask = named["query"], named["key"], named.get("attn_mask")
        if isinstance(mask, Tensor) and mask.is_floating_point():
            shape = torch.Size((*query.shape[:-1], key.shape[-2]))
            if mask not in self._facts:
                named["attn_mask"] = self._record_use("logits", query, mask, shape)
            elif self._facts[mask].terms:
                named["attn_mask"] = self._relative(mask)
        weights = logits_of(**named).softmax(-1) if self._keep else None
        self.attentions.append(AttentionCall(tuple(self._within), weights))
        return named

    def _multihead(self, func: Any, args: tuple[Any, ...], named: dict[str, Any], facts: TensorFacts) -> Any:
        named = {**named, "need_weights": self._keep or named.get("need_weights", True)}
        if self._keep:
            named["average_attn_weights"] = False
        output, weights = func(*args, **named)
        output = torch.zeros_like(output) if self._stem else output
        self._facts[output] = facts
        self.attentions.append(AttentionCall(tuple(self._within), weights if self._keep else None))
        return output, weights

    def _record_use(self, kind: Any, x: Tensor, constant: Tensor, shape: torch.Size | None = None) -> Tensor:
        """Note the use of a constant with x, if it has a value of its own for each token, and change it."""
        shape = x.shape if shape is None else shape
        bias, mask = self._masks.get(constant, (constant, None))
        source_parameters = self._sources_of(bias)
        floats = bias.is_floating_point() or bias.is_complex()
        axes = _axes(bias, len(shape), bool(source_parameters)) if floats and not _is_mask(bias) else ()
        if not _is_position(kind, axes, len(shape)):
            return constant
        within = tuple(self._within)
        self.uses.append(PositionUse(kind, bias.detach(), shape, axes, source_parameters, within, self._facts[x].age))
        if self._change is None:
            return constant
        changed = self._change(len(self.uses) - 1, bias)
        return changed if mask is None else changed + mask


def _is_position(kind: str, axes: tuple[int, ...], dims: int) -> bool:
    """Return whether a constant with values along `axes` can tell tokens apart."""
    if kind in ("logits", "weights"):
        return -2 in axes and -1 in axes
    others = [axis for axis in axes if axis != -1]
    if kind == "multiplied":
        return bool(others) and -1 in axes and dims >= 3
    return len(axes) > 1 if dims > 3 else bool(others) and dims in (2, 3)


def _axes(constant: Tensor, dims: int, named: bool) -> tuple[int, ...]:
    """Return the axes, counted from the end, along which a constant has more than one value.

    The values of parameters may be equal, as in a table that is zero; so their axes count whatever the values,
    except the first one of all, which may be the batch.
    """
    if constant.ndim > dims:
        return ()
    axes = []
    for axis in range(-constant.ndim, 0):
        if constant.shape[axis] == 1 or constant.stride(axis) == 0:
            continue
        if constant.is_meta or (named and axis > -dims) or not bool((constant == constant.narrow(axis, 0, 1)).all()):
            axes.append(axis)
    return tuple(axes)


def _is_mask(value: Tensor) -> bool:
    """Return whether a tensor has only the values zero and far below zero."""
    if value.dtype == torch.bool:
        return True
    if not value.is_floating_point() or value.ndim < 2 or value.is_meta:
        return False
    low = value <= _MASKED
    return bool(low.any()) and bool((low | (value == 0)).all())


def _with(args: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*args[:at], value, *args[at + 1 :])


def nested_tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested arguments."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping | tuple | list):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from nested_tensors(value)
