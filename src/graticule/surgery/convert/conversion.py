"""Description of a model of timm as one of ours, and the registry of the functions that read timm's models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from graticule.backbones import Backbone

Reader = Callable[[Any], "Conversion"]
Function = TypeVar("Function", bound=Reader)


@dataclass(frozen=True)
class Conversion:
    """Description of a model of timm as one of ours, read from its attributes.

    backbone: the class of our model.
    arguments: those of its constructor except `position`, as plain values, which can be written to a file.
    encoding: the encoding of the model, as text.
    joining: the joining of the model, as text.
    names: name of a tensor in timm -> name in our model, for those that `own_name` of the backbone and
        `published_names` of the position do not give; several names if the rows of the tensor are split among
        several tensors here.
    reshaped: names in timm of tensors that have another shape here, with the same values in the same order.
    """

    backbone: type[Backbone]
    arguments: Mapping[str, Any]
    encoding: str
    joining: str = "default"
    names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    reshaped: frozenset[str] = frozenset()


#: The function that reads the models of a class of timm. A subclass computes something else, so it has its own entry.
CONVERSIONS: dict[type[nn.Module], Reader] = {}


def register_conversion(*kinds: type[nn.Module]) -> Callable[[Function], Function]:
    """Return a decorator that registers a function that reads models of these classes of timm.

    The function takes a model and returns its `Conversion`; it calls `refuse` for parts that cannot be converted.
    """

    def add(reader: Function) -> Function:
        CONVERSIONS.update(dict.fromkeys(kinds, reader))
        return reader

    return add


def read(model: nn.Module) -> Conversion:
    """Describe a model of timm as one of ours.

    Raises:
        ValueError: if there is no conversion for its class, or for a part of it.
    """
    if isinstance(model, Backbone):
        raise ValueError(
            f"`model` must be a model of timm, got {type(model).__name__}, which is one of ours already; "
            "graticule.surgery.change_position gives it another position."
        )
    reader = CONVERSIONS.get(type(model))
    if reader is None:
        known = ", ".join(sorted(kind.__name__ for kind in CONVERSIONS))
        raise ValueError(
            f"`model` must be of one of timm's classes {known}, got {type(model).__name__} of "
            f"{type(model).__module__}; graticule.attach gives a transformer of any library a position."
        )
    return reader(model)


def refuse(model: nn.Module, attribute: str, value: Any, rule: str) -> ValueError:
    """Return the error for a part of a model that cannot be converted.

    Args:
        model: the model, or a module of it.
        attribute: the name of the part that cannot be converted.
        value: its value; for a module, its class is named.
        rule: the rule that it violates, such as 'must be False'.
    """
    shown = type(value).__name__ if isinstance(value, nn.Module) else repr(value)
    return ValueError(f"`{attribute}` of {type(model).__name__} {rule} to be converted, got {shown}.")


def check_kind(model: nn.Module, attribute: str, *kinds: type[nn.Module]) -> None:
    """Check that an attribute of a module, given as a path, is exactly of one of these classes.

    Raises:
        ValueError: if it is not.
    """
    found = model.get_submodule(attribute)
    if type(found) not in kinds:
        names = " or ".join(dict.fromkeys(kind.__name__ for kind in kinds))
        raise refuse(model, attribute, found, f"must be {names}")
