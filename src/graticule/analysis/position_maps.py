"""All maps of position information of a model: correlations, similarity under rotation, and biases, by stage."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from graticule.analysis.any_view import view_of
from graticule.analysis.bias import BiasMaps, bias_maps
from graticule.analysis.correlation import position_correlations
from graticule.analysis.correlations import Correlations
from graticule.analysis.rotary_similarity import rotary_similarity
from graticule.analysis.timm_maps import timm_bias_maps, timm_correlations, timm_rotary
from graticule.analysis.timm_view import TimmView
from graticule.analysis.view import Size
from graticule.backbones import TokenModel
from graticule.encodings import AbsoluteEncoding


@dataclass(frozen=True, eq=False)
class StageMaps:
    """The maps of one stage; None for a kind that it does not have.

    correlations: of the tables as each layer sees them.
    rotary: similarity under the rotation of queries and keys alone.
    biases: of attention.
    """

    correlations: Correlations | None = None
    rotary: Correlations | None = None
    biases: BiasMaps | None = None


def position_maps(model: nn.Module, img_size: Size | None = None, untrained: int = 0) -> list[StageMaps]:
    """Compute all maps of position information of a model, one entry for each stage.

    Args:
        model: one of our backbones, a language model, or a model of timm.
        img_size: (height, width) in pixels; by default the size that the model is built for.
        untrained: number of untrained models that correlations are compared with.

    Raises:
        ValueError: if there is no map of any kind, the position is attached, or the size is refused.
    """
    if isinstance(getattr(model, "graticule", None), nn.Module):
        raise ValueError(
            f"`model` must have no attached position for position maps, got {type(model).__name__}, which has one; "
            "translation_error measures any model, attention_maps shows attention."
        )
    if not isinstance(model, TokenModel):
        view = view_of(model)
        assert isinstance(view, TimmView)
        found = _of_timm(view if img_size is None else view.sized(img_size))
    else:
        found = _of_backbone(model, img_size, untrained)
    if not any(one.correlations or one.rotary or one.biases for one in found):
        raise ValueError(
            f"`model` must have a table, a rotation or a bias of positions, got {type(model).__name__}, which has none "
            "that is known; translation_error measures any model, attention_maps shows attention."
        )
    return found


def _of_backbone(model: TokenModel, img_size: Size | None, untrained: int) -> list[StageMaps]:
    stages = range(len(getattr(model, "depths", (1,))))
    biases = [bias_maps(model, img_size, stage) for stage in stages]
    rotary = [rotary_similarity(model, img_size, stage) for stage in stages]
    tables = any(isinstance(module, AbsoluteEncoding) for module in model.modules())
    drawn = tables or not any(one is not None for one in (*biases, *rotary))
    return [
        StageMaps(
            position_correlations(model, img_size, stage, untrained) if drawn else None, rotary[stage], biases[stage]
        )
        for stage in stages
    ]


def _of_timm(view: TimmView) -> list[StageMaps]:
    biases = timm_bias_maps(view)
    first = StageMaps(timm_correlations(view), timm_rotary(view), biases[0] if biases else None)
    return [first, *(StageMaps(biases=one) for one in biases[1:])]
