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

from graticule.backbones.base import Backbone
from graticule.backbones.registry import CLASSES
from graticule.checkpoints.read import read_metadata, with_metadata
from graticule.encodings.build import build_position
from graticule.encodings.forms.absolute import FixedEncoding
from graticule.external.convert.parts import Conversion, read
from graticule.registry.checks import checked
from graticule.registry.specs import Spec
from graticule.surgery.change import change_position
from graticule.surgery.freeze import check_floating


@dataclass(frozen=True)
class Source:
    """The model that a backbone was converted from, without the values of its weights.

    skeleton: the model with its parameters on the meta device, but for those without a counterpart here.
    names: name of each tensor there -> its names in the backbone: several if its rows are split, none if it is kept as
        it is. Rows of several tensors with the same name here follow each other in this order.
    reshaped: as in `Conversion`.
    """

    skeleton: nn.Module
    names: Mapping[str, tuple[str, ...]]
    reshaped: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, model: nn.Module, names: Mapping[str, tuple[str, ...]], reshaped: Mapping[str, tuple[int, ...]]) -> Any:
        """Store the structure of a model; buffers that are not weights are kept unchanged."""
        empty = {
            id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            for name, parameter in model.named_parameters()
            if names[name]
        }
        return cls(deepcopy(model, dict[int, Any](empty)), dict(names), dict(reshaped))

    @property
    def library(self) -> str:
        """The name of the library of the model."""
        return type(self.skeleton).__module__.partition(".")[0]

    def empty(self, device: torch.device) -> nn.Module:
        """Return a copy of the model on a device, with zeros instead of its weights."""
        zeros = {
            id(parameter): nn.Parameter(torch.zeros_like(parameter, device=device), parameter.requires_grad)
            for parameter in self.skeleton.parameters()
            if parameter.is_meta
        }
        return deepcopy(self.skeleton, dict[int, Any](zeros))


def source_of(model: nn.Module, library: str, like: nn.Module | None = None) -> Source:
    """Return the model of a library that a backbone was converted from; if it was opened, from one that is `like` it.

    `like` is built as that model was, up to the sizes of images, patches and classes.
    """
    kind = type(model).__name__
    if not isinstance(model, Backbone):
        has = "; without what is around it, model.backbone is one" if hasattr(model, "backbone") else ""
        raise ValueError(f"`model` must be a backbone that `convert` made, got {kind}{has}.")
    converted = model if like is None else convert(like)
    source: Source | None = converted.converted_from
    if like is not None and source is not None and source.library != library:
        raise ValueError(f"`like` must be a model of {library}, got {type(like).__name__} of {source.library}.")
    if source is None or source.library != library:
        raise ValueError(
            f"`model` must come from `convert` of a model of {library} and have the position that it had there, got "
            f"{kind}; of a model that was saved and opened, `like` gives the model of {library}."
        )
    if like is None:
        return source
    sizes = {"img_size", "num_classes", "global_pool", *(("patch_size", "in_chans") if library != "timm" else ())}
    one, other = (
        {} if each.created is None else {"name": each.created["name"], **each.created["arguments"]}
        for each in (converted, model)
    )
    differing = sorted(key for key in {*one, *other} - sizes if one.get(key) != other.get(key))
    if not other or differing:
        what = f"another {', '.join(differing)}" if other else "no known arguments"
        raise ValueError(
            f"`like` must be built as the model that `model` was converted from, got {type(like).__name__}: the model "
            f"has {what}."
        )
    return source


def computed_names(model: Backbone) -> set[str]:
    """Return the names of buffers and fixed tables that are saved with the weights; other libraries compute them."""
    names = [name for name, _ in model.position.named_buffers()]
    names += [f"{name}.pos_embed" for name, part in model.position.named_modules() if isinstance(part, FixedEncoding)]
    return {f"position.{name}" for name in names} & model.state_dict().keys()


def in_our_shape(value: Tensor, shape: torch.Size, order: tuple[int, ...]) -> Tensor:
    """Return a tensor with another shape in our model, whose axes are stored in this order there."""
    if value.numel() != shape.numel():
        return value
    if not order:
        return value.reshape(shape)
    return value.reshape([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(len(order))])


def fill(there: nn.Module, source: Source, model: Backbone) -> nn.Module:
    """Copy the weights of a converted model to the model `there` of its library, and return that."""
    state, present = model.state_dict(), there.state_dict()
    # a classifier may have been added or removed
    names = {**source.names, **{new: (model.own_name(new),) for new in present.keys() - source.names.keys()}}
    names = {theirs: split for theirs, split in names.items() if theirs in present and state.keys() >= set(split)}
    lost = state.keys() - {own for split in names.values() for own in split} - computed_names(model)
    lost |= {theirs for theirs, _ in there.named_parameters()} - names.keys()
    if lost:
        found = ", ".join(sorted(lost)[:4])
        raise ValueError(
            f"`model` must have the tensors that {source.library}'s has, and no others, got {found} in one of them."
        )
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    joined = Counter(names.values())
    rows = dict.fromkeys(joined, 0)
    for theirs, split in names.items():
        if not split:
            value: Tensor = source.skeleton.get_parameter(theirs)
        elif len(split) > 1:
            value = torch.cat([state[own] for own in split])
        elif joined[split] > 1:
            start, rows[split] = rows[split], rows[split] + len(present[theirs])
            value = state[split[0]][start : rows[split]]
        else:
            value = state[split[0]]
            value = value.permute(source.reshaped.get(theirs) or tuple(range(value.ndim)))
        _put(there, theirs, value, trained.get(split[0], False) if split else value.requires_grad)
    return there.train(model.training)


def _put(model: nn.Module, name: str, value: Tensor, trained: bool) -> None:
    """Replace a parameter or buffer by a copy of a tensor."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    old = getattr(module, leaf)
    if value.numel() != old.numel():
        raise ValueError(
            f"`model` must have sizes that {type(model).__name__} can have, whose {name} is {tuple(old.shape)}, got "
            f"{tuple(value.shape)}."
        )
    value = value.detach().clone().reshape(old.shape)
    setattr(module, leaf, nn.Parameter(value, trained) if isinstance(old, nn.Parameter) else value)


@checked
def convert(
    model: nn.Module,
    encoding: str | Spec | None = None,
    joining: str | Spec | None = None,
    images: Tensor | None = None,
) -> Backbone:
    """Convert a model of timm or transformers into a backbone of this library, with its weights; `model` is unchanged.

    The structure is read from the modules and attributes of the model, not from its name. Every tensor of the model
    corresponds to one of the backbone, and vice versa; so its outputs are those of `model`, including those of
    `forward_features` and intermediates. It accepts any image whose sides are multiples of the patch: tables are
    resampled as with timm's `dynamic_img_size`, or as transformers' class does with `interpolate_pos_encoding`.

    The output for a model of transformers is its `logits`, else its `image_embeds`, else its `pooler_output`, else its
    `last_hidden_state`, which is that of `forward_features`. MAE's encoder has all patches here, in their order.

    With another encoding or joining the position is new and everything else is kept. The new position starts as close
    to the old one as possible (`change_position`): `joining="lape"` joins the table of the model, by norms that give
    each layer the contribution that the table made to it. `certificate` of the backbone reports what each layer keeps.

    Args:
        model: a model of timm or transformers.
        encoding: an encoding, as in `create_model`; that of the model by default.
        joining: a joining; 'default' by default.
        images: some preprocessed images, (B, C, height, width), on which a new position is fitted and the
            drift of the features is measured; by default it is fitted on the mean image.

    Raises:
        ValueError: if the class of the model, or a part of it, has no counterpart here; the part is named.
    """
    if images is not None and encoding is None and joining is None:
        raise ValueError("`images` must be left out where the position of the model stays.")
    check_floating(model)
    conversion = read(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # all random weights are replaced
        ours = _build(model, conversion)
        names = _names(model, ours, conversion)
        values = _values(model, ours, names, conversion.reshaped)
        ours.load_state_dict(with_metadata(values, read_metadata(ours.state_dict())))
    _copy_settings(model, ours, names, conversion.preprocessing)
    ours.converted_from = Source.of(model, names, conversion.reshaped)
    if encoding is None and joining is None:
        return ours
    encoding = conversion.encoding if encoding is None else encoding
    return change_position(ours, encoding, joining or conversion.joining, images)


def _build(model: nn.Module, conversion: Conversion) -> Backbone:
    """Build the backbone on the device and with the dtype of the model."""
    words: dict[str, Any] = {"encoding": conversion.encoding, "joining": conversion.joining}
    build: Any = conversion.backbone
    ours: Backbone = build(partial(build_position, **words), **conversion.arguments)
    name = conversion.backbone.__name__
    if CLASSES.get(name) is conversion.backbone:
        ours.created = {"name": name, "arguments": {**conversion.arguments, **words}}
    weight = next(model.parameters())
    return ours.to(weight.device, weight.dtype)


#: A tensor of one of three projections, which may be one tensor here.
_PART = re.compile(r"(.+\.qkv)\.([qkv])_proj\.(weight|bias)")


def _names(model: nn.Module, ours: Backbone, conversion: Conversion) -> dict[str, tuple[str, ...]]:
    """Map the name of each tensor of the model to its name in ours, or its names if it is split.

    Tensors whose rows are joined have the same name here, and follow each other in the order of their rows.
    """
    published = {theirs: f"position.{own}" for theirs, own in ours.position.published_names().items()}
    places = ours.state_dict()
    names: dict[str, tuple[str, ...]] = {}
    ranks: dict[str, int] = {}  # of tensors that are joined
    for theirs in model.state_dict():
        given = conversion.names.get(theirs, theirs)
        split = []
        for name in (given,) if isinstance(given, str) else given:
            own = published.get(name, ours.own_name(name))
            own = published.get(own, own)
            if own not in places and (part := _PART.fullmatch(own)):
                layer, which, leaf = part.groups()
                own = f"{layer}.{leaf}" if f"{layer}.{leaf}" in places else f"{layer}.{which}_bias"
                ranks[theirs] = "qkv".index(which)
            split.append(own)
        names[theirs] = tuple(split)
    names = {theirs: names[theirs] for theirs in sorted(names, key=lambda theirs: ranks.get(theirs, 0))}
    taken = Counter(own for split in names.values() for own in split)
    lost = [theirs for theirs, split in names.items() if not places.keys() >= set(split)]
    twice = [theirs for theirs, split in names.items() if theirs not in ranks and any(taken[own] > 1 for own in split)]
    empty = sorted(places.keys() - taken - computed_names(ours))
    kind = type(model).__name__
    if lost:
        raise ValueError(f"`model` must have no tensor without a counterpart here, got {kind} with {_some(lost)}.")
    if empty:
        raise ValueError(f"`model` must have all weights of {type(ours).__name__}, got {kind} without {_some(empty)}.")
    if twice:
        raise ValueError(f"`model` must have one tensor for each of ours, got {kind} with {_some(twice)}.")
    return names


def _values(
    model: nn.Module,
    ours: Backbone,
    names: Mapping[str, tuple[str, ...]],
    reshaped: Mapping[str, tuple[int, ...]],
) -> dict[str, Tensor]:
    """Return the tensors of the model under our names and in our shapes."""
    there, here = model.state_dict(), ours.state_dict()
    joined = Counter(names.values())
    found: dict[str, list[Tensor]] = {}
    for theirs, split in names.items():
        if not split:
            continue
        value, expected = there[theirs], here[split[0]].shape
        if theirs in reshaped:
            value = in_our_shape(value, expected, reshaped[theirs])
        rows = [len(here[own]) for own in split] if len(split) > 1 else [len(value)]
        if len(split) > 1 or joined[split] > 1:
            expected = torch.Size([sum(rows) if len(split) > 1 else expected[0] // joined[split], *expected[1:]])
        if value.shape != expected:
            kind = type(model).__name__
            raise ValueError(
                f"`{theirs}` of {kind} must be {tuple(expected)} to be converted, got {tuple(value.shape)}."
            )
        for own, part in zip(split, value.split(rows), strict=True):
            found.setdefault(own, []).append(part)
    values = {own: parts[0] if len(parts) == 1 else torch.cat(parts) for own, parts in found.items()}
    return {name: here[name] for name in computed_names(ours)} | values


def _copy_settings(
    model: nn.Module, ours: Backbone, names: Mapping[str, tuple[str, ...]], preprocessing: Mapping[str, Any] | None
) -> None:
    """Copy settings other than weights: the modes, `requires_grad` of the parameters, and timm's configuration."""
    ours.train(model.training)
    own = dict(ours.named_parameters())
    for theirs, parameter in model.named_parameters():
        for name in names[theirs]:
            own[name].requires_grad_(parameter.requires_grad)
    untyped: Any = ours
    for mode in ("grad_checkpointing", "distilled_training"):
        if hasattr(model, mode) and hasattr(ours, mode):
            setattr(ours, mode, getattr(model, mode))
    configuration = deepcopy(getattr(model, "pretrained_cfg", None) if preprocessing is None else dict(preprocessing))
    if isinstance(configuration, dict):
        # the size of the converted model, from which timm resolves the transforms
        configuration["input_size"] = (ours.in_chans, *ours.img_size)
        untyped.pretrained_cfg = untyped.default_cfg = configuration


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
