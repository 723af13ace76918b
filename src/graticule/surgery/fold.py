"""Fold position information that depends on parameters and grid alone into constants, and unfold it."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from graticule.backbones.language import LanguageModel
from graticule.checkpoints.read import check_whole
from graticule.position.folded import Folded, FoldedPosition, FoldedSizes
from graticule.position.position import Position
from graticule.registry.checks import checked
from graticule.registry.fields import Side

Model = TypeVar("Model", bound=nn.Module)


@checked
def fold(
    model: Model, img_size: Side | tuple[Side, Side] | tuple[Side, Side, Side] | None = None, sizes: int | None = None
) -> Model:
    """Replace the position information of `model` by constants, in place, and return the model in evaluation mode.

    The constants are LaPE's LN_l(w_l), gathered bias tables, resampled or computed tables: at inference the method then
    has no extra cost. The original is kept inside, and `unfold` restores it. A folded model cannot be trained, and
    refuses other grids unless `sizes` is given. Folding a folded model folds it again, for `img_size`:
    do so after writes through `parameter.data`, which PyTorch does not count, and after each change of the parameters
    of a compiled model, whose program does not look for changes.
    Functions of the tokens (a PEG, Shaw's encoding) are unchanged.

    Reference: Position Embedding Needs an Independent Layer Normalization (Yu et al., 2022), section 3.4.

    Args:
        model: one of our backbones, or a module that contains some.
        img_size: in pixels, one side or (height, width), or (depth, height, width); by default the size of the
            model.
        sizes: fold for each size at its first image, and cache the constants of this many sizes, the last ones used;
            `img_size` must then be left out. Compiled and exported models compute position from the parameters.

    Raises:
        ValueError: if there is no backbone in `model`, or it does not accept `img_size`. The model is then unchanged.
    """
    backbones = _backbones(model)
    if not backbones:
        raise ValueError(f"`model` must be or contain a backbone with a `position`, got {type(model).__name__}.")
    check_whole(model, values=False)
    folded: list[Folded]
    if sizes is not None:
        if img_size is not None or any(isinstance(backbone, LanguageModel) for backbone in backbones):
            reason = "with `img_size`" if img_size is not None else "for a language model, which has one size"
            raise ValueError(f"`sizes` must be left out {reason}, got {sizes}.")
        folded = [FoldedSizes(_original(backbone), sizes) for backbone in backbones]
    else:
        grids = [_grid(backbone, img_size) for backbone in backbones]
        folded = [FoldedPosition(_original(backbone), grid) for backbone, grid in zip(backbones, grids, strict=True)]
    for backbone, position in zip(backbones, folded, strict=True):
        backbone.position = position
        # a table may be passed through layers of the backbone, whose weights are loaded after the position's
        if _fold_again not in backbone._load_state_dict_post_hooks.values():
            backbone.register_load_state_dict_post_hook(_fold_again)
    return model.eval()


@checked
def unfold(model: Model) -> Model:
    """Restore the position information that `fold` replaced, in place, and return the model."""
    for backbone in _backbones(model):
        if isinstance(backbone.position, Folded):
            backbone.position = backbone.position.original
    return model


def _fold_again(backbone: Any, _: object) -> None:
    if isinstance(backbone.position, Folded):
        backbone.position.fold()


def _backbones(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(getattr(module, "position", None), Position)]


def _original(backbone: Any) -> Position:
    position: Position = backbone.position
    return position.original if isinstance(position, Folded) else position


def _grid(backbone: Any, img_size: Any) -> Any:
    if img_size is None:
        return backbone.grid
    if isinstance(backbone, LanguageModel):
        raise ValueError(f"`img_size` must be left out with a language model, got {img_size}.")
    return backbone.grid_at((img_size,) * backbone.grid.ndim if isinstance(img_size, int) else img_size)
