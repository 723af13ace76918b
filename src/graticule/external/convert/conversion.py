"""Convert a model of timm or transformers into one of ours, with its weights, and copy the weights back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graticule.backbones.base import Backbone
from graticule.backbones.registry import CLASSES
from graticule.checkpoints.obstacles import check_intact
from graticule.encodings.build import build_position
from graticule.encodings.forms.absolute import FixedEncoding
from graticule.external.convert.parts import Conversion, read
from graticule.external.convert.verify import check_outputs
from graticule.registry.checks import checked
from graticule.registry.specs import Spec
from graticule.surgery.change import change_position


@dataclass(frozen=True)
class ConvertedFrom:
    """The model that a backbone was converted from, without the values of its weights.

    skeleton: the model with its parameters on the meta device, but for those without a counterpart here.
    names: name of each tensor there -> its names in the backbone: several if its rows are split, none if it is kept as
        it is. Rows of several tensors with the same name here follow each other in this order.
    arguments: arguments of the backbone, when it was converted.
    """

    skeleton: nn.Module
    names: Mapping[str, tuple[str, ...]]
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, model: nn.Module, names: Mapping[str, tuple[str, ...]], backbone: Backbone) -> Any:
        """Store the structure of a model; buffers that are not weights are kept unchanged."""
        empty = {
            id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            for name, parameter in model.named_parameters()
            if names[name]
        }
        return cls(deepcopy(model, dict[int, Any](empty)), dict(names), arguments_of(backbone))

    @property
    def library(self) -> str:
        return type(self.skeleton).__module__.partition(".")[0]

    def empty(self, device: torch.device) -> nn.Module:
        """Return a copy of the model on a device, with zeros instead of its weights."""
        zeros = {
            id(parameter): nn.Parameter(torch.zeros_like(parameter, device=device), parameter.requires_grad)
            for parameter in self.skeleton.parameters()
            if parameter.is_meta
        }
        return deepcopy(self.skeleton, dict[int, Any](zeros))


def arguments_of(model: Backbone) -> dict[str, Any]:
    """Return the name, the arguments and the pooling of a backbone, as far as they are known."""
    created = model.created or {"arguments": {}}
    return {**created["arguments"], "name": created.get("name"), "global_pool": model.global_pool}


def computed_names(model: Backbone) -> set[str]:
    """Return the names of buffers and fixed tables that are saved with the weights; other libraries compute them."""
    names = [name for name, _ in model.position.named_buffers()]
    names += [f"{name}.pos_embed" for name, part in model.position.named_modules() if isinstance(part, FixedEncoding)]
    return {f"position.{name}" for name in names} & model.state_dict().keys()


def parts_of(names: Mapping[str, tuple[str, ...]], state: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return views of our tensors, or of rows of one, with the rows of each tensor of the other library."""
    joined, rank, parts = Counter(names.values()), Counter[tuple[str, ...]](), {}
    for name, targets in names.items():
        count = joined[targets]
        parts[name] = [state[target] if count == 1 else state[target].chunk(count)[rank[targets]] for target in targets]
        rank[targets] += 1
    return parts


def join(parts: list[Tensor]) -> Tensor:
    """Return one tensor with the rows of all."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@checked
def convert(
    model: nn.Module,
    encoding: str | Spec | None = None,
    joining: str | Spec | None = None,
    images: Tensor | None = None,
    verify: bool = True,
) -> Backbone:
    """Convert a model of timm or transformers into a backbone of this library, with its weights; `model` is unchanged.

    The structure is read from the modules and attributes of the model, not from its name, and nothing is assumed: all
    that was not read is compared with what the class of the model builds from that, so a model that was changed since
    is refused. Every tensor of the model corresponds to one of the backbone, and vice versa; so its outputs are those
    of `model`, including `forward_features` and intermediates, and so are its rates of dropout and stochastic depth in
    training. It accepts any image whose sides are multiples of the patch: tables are
    resampled as with timm's `dynamic_img_size`, or as transformers' class does with `interpolate_pos_encoding`.

    The output for a model of transformers is its `logits`, else its `image_embeds`, else its `pooler_output`, else its
    `last_hidden_state`, which `forward_features` returns. MAE's encoder has all patches here, in their order.

    With another encoding or joining the position is new and everything else is kept. The new position starts as close
    to the old one as possible (`change_position`): `joining="lape"` joins the table of the model, by norms that give
    each layer the contribution that the table made to it. `certificate` of the backbone reports what each layer keeps.

    Args:
        model: a model of timm or transformers.
        encoding: an encoding, as in `create_model`; the model's by default.
        joining: a joining; 'default' by default.
        images: some preprocessed images, (B, C, height, width), on which a new position is fitted and the
            drift of the features is measured; by default it is fitted on the mean image.
        verify: compare the outputs of `model` and of the backbone for one random image of its size, on its device and
            in evaluation mode. It costs one pass of each; False leaves that out, and a model on the meta device
            computes nothing. The other checks take place either way.

    Raises:
        ValueError: if the class of the model, or a part of it, has no counterpart here, or was changed; the part is
            named. Also if the outputs differ by more than rounding.
    """
    if images is not None and encoding is None and joining is None:
        raise ValueError("`images` must be left out where the position of the model stays.")
    check_intact(model, "wrapped", "compiled", "quantized", "pruned", "parametrized", values=False)
    conversion = read(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        with _Undrawn() as undrawn:
            backbone = _build(model, conversion)
        names = _names(model, backbone, conversion)
        _copy_values(model, parts_of(names, backbone.state_dict()))
        for name in undrawn.names(backbone) - {target for targets in names.values() for target in targets}:
            backbone.get_parameter(name).zero_()
    _copy_settings(model, backbone, names)
    if verify:
        check_outputs(model, backbone)
    backbone.converted_from = ConvertedFrom.of(model, names, backbone)
    if encoding is None and joining is None:
        return backbone
    encoding = conversion.encoding if encoding is None else encoding
    return change_position(backbone, encoding, joining or "default", images)


#: Functions that draw a tensor at random, and those that scale it afterwards.
_DRAWS = {"uniform_", "normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "erfinv_"}
_SCALES = {"mul_", "div_", "add_", "clamp_"}


class _Undrawn(TorchFunctionMode):
    """Leave parameters as uninitialized memory where they would be random, and other tensors at zero.

    Most of the time of converting a ViT-B was for random values, all of which are replaced.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, Tensor] = {}

    def names(self, model: nn.Module) -> set[str]:
        """Return the names of the uninitialized parameters of a model."""
        return {name for name, value in model.named_parameters() if id(value) in self._tensors}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _DRAWS or (name in _SCALES and id(args[0]) in self._tensors):
            tensor: Tensor = next(iter((*args, *(kwargs or {}).values())))
            if isinstance(tensor, nn.Parameter):
                self._tensors[id(tensor)] = tensor
                return tensor
            return tensor if name == "erfinv_" else tensor.zero_()
        return func(*args, **(kwargs or {}))


def _build(model: nn.Module, conversion: Conversion) -> Backbone:
    """Build the backbone on the device and with the dtype of the model."""
    words: dict[str, Any] = {"encoding": conversion.encoding, "joining": "default"}
    build: Any = conversion.backbone
    result: Backbone = build(partial(build_position, **words), **conversion.arguments)
    name = conversion.backbone.__name__
    if CLASSES.get(name) is conversion.backbone:
        result.created = {"name": name, "arguments": {**conversion.arguments, **words}}
    weight = next(model.parameters())
    return result.to(weight.device, weight.dtype)


#: A tensor of one of three projections, which may be one tensor here.
_PROJECTION = re.compile(r"(.+\.qkv)\.([qkv])_proj\.(weight|bias)")


def _names(model: nn.Module, backbone: Backbone, conversion: Conversion) -> dict[str, tuple[str, ...]]:
    """Map the name of each tensor of the model to its name in ours, or its names if it is split.

    Tensors whose rows are joined have the same name here, and follow each other in the order of their rows.
    """
    published = {name: f"position.{target}" for name, target in backbone.position.published_names().items()}
    state = backbone.state_dict()
    names: dict[str, tuple[str, ...]] = {}
    ranks: dict[str, int] = {}  # of tensors that are joined
    for name in model.state_dict():
        described = conversion.names.get(name, name)
        targets = []
        for part in (described,) if isinstance(described, str) else described:
            target = published.get(part, backbone.own_name(part))
            target = published.get(target, target)
            if target not in state and (projection := _PROJECTION.fullmatch(target)):
                layer, which, leaf = projection.groups()
                target = f"{layer}.{leaf}" if f"{layer}.{leaf}" in state else f"{layer}.{which}_bias"
                ranks[name] = "qkv".index(which)
            targets.append(target)
        names[name] = tuple(targets)
    names = {name: names[name] for name in sorted(names, key=lambda name: ranks.get(name, 0))}
    counts = Counter(target for targets in names.values() for target in targets)
    lost = [name for name, targets in names.items() if not state.keys() >= set(targets)]
    twice = [name for name, targets in names.items() if name not in ranks and any(counts[key] > 1 for key in targets)]
    empty = sorted(state.keys() - counts - computed_names(backbone))
    kind = type(model).__name__
    if lost:
        raise ValueError(f"`model` must have no tensor without a counterpart here, got {kind} with {_some(lost)}.")
    kinds = {name: f"{value.dtype} on {value.device}" for name, value in model.named_parameters()}
    most = Counter(kinds.values()).most_common(1)[0][0]
    for name in (name for name, text in kinds.items() if text != most):
        other = f"{name} in {kinds[name]} and others in {most}"
        raise ValueError(f"`model` must have all its weights in one dtype on one device, got {kind} with {other}.")
    if empty:
        name = type(backbone).__name__
        raise ValueError(f"`model` must have all weights of {name}, got {kind} without {_some(empty)}.")
    if twice:
        raise ValueError(f"`model` must have one tensor for each of ours, got {kind} with {_some(twice)}.")
    return names


#: Axes of our convolution of patches in the order in which a linear layer has them: (D, height, width, channels).
LINEAR = (0, 2, 3, 1)


def _copy_values(model: nn.Module, parts: Mapping[str, list[Tensor]]) -> None:
    """Copy the tensors of the model to our parts; tables may have other axes than ours before the channels."""
    for name, value in model.state_dict().items():
        if not parts[name]:
            continue
        shape = join(parts[name]).shape
        if value.numel() == shape.numel():
            if value.ndim == 2 and len(shape) == 4:
                value = value.reshape([shape[axis] for axis in LINEAR]).permute(0, 3, 1, 2)
            elif value.shape[-1:] == shape[-1:]:
                value = value.reshape(shape)
        if value.shape != shape:
            kind = type(model).__name__
            raise ValueError(f"`{name}` of {kind} must be {tuple(shape)} to be converted, got {tuple(value.shape)}.")
        several = len(parts[name]) > 1
        rows = value.split([len(part) for part in parts[name]]) if several else [value]
        for part, part_rows in zip(parts[name], rows, strict=True):
            part.copy_(part_rows)


def _copy_settings(model: Any, backbone: Backbone, names: Mapping[str, tuple[str, ...]]) -> None:
    """Copy settings other than weights: the modes, `requires_grad` of the parameters, and timm's configuration."""
    backbone.train(model.training)
    trained: dict[str, bool] = {}
    for name, parameter in model.named_parameters():
        for target in names[name]:
            if trained.setdefault(target, parameter.requires_grad) != parameter.requires_grad:
                raise ValueError(
                    f"`model` must train all parts of {target} or none, which are one tensor here, got {name} with "
                    f"requires_grad {parameter.requires_grad} and others with {not parameter.requires_grad}."
                )
            backbone.get_parameter(target).requires_grad_(parameter.requires_grad)
    untyped: Any = backbone
    for mode in ("grad_checkpointing", "distilled_training"):
        if hasattr(model, mode) and hasattr(backbone, mode):
            setattr(backbone, mode, getattr(model, mode))
    configuration = deepcopy(getattr(model, "pretrained_cfg", None))
    if hasattr(model, "config"):  # of transformers, which may state the names of the classes
        labels = [str(label) for _, label in sorted((model.config.id2label or {}).items())]
        are_names = any(label != f"LABEL_{index}" for index, label in enumerate(labels))
        configuration = {"label_names": labels} if are_names else {}
    if isinstance(configuration, dict):
        # the size of the converted model, from which timm resolves the transforms
        configuration["input_size"] = (backbone.in_chans, *backbone.img_size)
        untyped.pretrained_cfg = untyped.default_cfg = configuration


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
