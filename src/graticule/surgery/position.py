"""Give an existing model another encoding or joining."""

from __future__ import annotations

from typing import TypeVar

from graticule.backbones import Backbone
from graticule.backbones.registry import take_position
from graticule.checkpoints import transfer
from graticule.encodings import FoldedPosition
from graticule.specs import Spec

Model = TypeVar("Model", bound=Backbone)


def change_position(model: Model, encoding: str | Spec, joining: str | Spec = "default") -> Model:
    """Replace the position of `model` by a new one, in place; returns the model.

    All weights outside of the position stay. Of the position, what both have is kept, such as the table of an absolute
    encoding; the rest is new.

    Args:
        model: one of our backbones, not folded.
        encoding: as `create_model` takes it.
        joining: as `create_model` takes it.

    Raises:
        ValueError: if the model cannot use them. It is then as it was.
    """
    if isinstance(model.position, FoldedPosition):
        raise ValueError("`model` must not be folded, to get another position; call graticule.unfold(model) first.")
    before = model.state_dict()
    given = {"encoding": encoding, "joining": joining}
    model.replace_position(take_position(given, defaults=model.encoding_options))
    transfer(model, before)
    return model
