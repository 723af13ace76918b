"""Swin Transformer V2: cosine attention within shifted windows, norms after the residual branches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from timm.layers.helpers import to_2tuple
from timm.models.swin_transformer_v2 import PatchMerging, checkpoint_filter_fn
from torch import Tensor, nn

from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.backbones.swin import SwinTransformer, WindowSize
from graticule.backbones.window_attention import WindowAttention
from graticule.checkpoints.layouts import rename_library
from graticule.checkpoints.load import renamed_state_dict
from graticule.checkpoints.read import unusable
from graticule.layers.block import PostNormBlock
from graticule.layers.parts import QueryValueBias
from graticule.position.position import PositionBuilder
from graticule.registry.fields import Side


class SwinTransformerV2(SwinTransformer):
    """Swin V2 as published: cosine attention, biases of a small network ('continuous_bias'), norms after the branches.

    The released code masks a shifted window by adding -100 to the logits of tokens that are not neighbors. A logit is a
    cosine times a learned scale of up to 100, plus a bias of up to 16, so logits span up to 216, and tokens can attend
    across the border of the image to the opposite side. This is the default here, too, as the published weights were
    trained with it; with `mask=None` such tokens do not attend to each other.

    The coordinates of 'continuous_bias' are relative to the window that a model is built for. Models that were
    fine-tuned with larger windows keep the window sizes of their pretraining, `pretrained_window_sizes`;
    `set_input_size` never changes them, as in the paper. timm's `set_input_size` changes them with the window unless
    the model has `pretrained_window_sizes`.

    A table that a joining adds in every layer (LaPE) is added to the input of attention, which has no norm before it.
    The names of the parameters are timm's, except in position encodings; `load_state_dict` accepts timm's.

    Reference: Swin Transformer V2: Scaling Up Capacity and Resolution (Liu et al., 2022).

    Args:
        window_size: in patches, as in `SwinTransformer`.
        mask: number that is added to the logits of tokens that are not neighbors; None excludes them.
        pretrained_window_sizes: the windows of each stage that the coordinates of 'continuous_bias' are relative to, a
            side or (rows, columns) each; by default those that the model is built for.
        others: as `SwinTransformer`.
    """

    published_parts = (  # in timm
        *SwinTransformer.published_parts,
        *((f"layers.*.blocks.*.attn.qkv.{part}", f"layers.*.blocks.*.attn.{part}") for part in ("q_bias", "v_bias")),
    )
    default_encoding = "continuous_bias"
    timm_filter = staticmethod(checkpoint_filter_fn)

    def __init__(
        self,
        position: PositionBuilder,
        img_size: Side | tuple[Side, Side] = 256,
        window_size: WindowSize = 8,
        mask: float | None = -100.0,
        pretrained_window_sizes: Sequence[int] | tuple[tuple[int, int], ...] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            position,
            img_size=img_size,
            window_size=window_size,
            block_layer=PostNormBlock,
            attn_layer=partial(CosineWindowAttention, mask=mask),
            merging_layer=PatchMerging,
            **kwargs,
        )
        if pretrained_window_sizes is not None:
            self._set_references(pretrained_window_sizes)

    def _set_references(self, windows: Sequence[int] | tuple[tuple[int, int], ...]) -> None:
        """Set the windows that the coordinates of each stage's biases are relative to."""
        pairs = [to_2tuple(window) for window in windows]
        if len(pairs) != len(self.depths) or min(map(min, pairs)) < 1:
            raise ValueError(
                f"`pretrained_window_sizes` must have a positive value for each of the {len(self.depths)} stages, got "
                f"{tuple(windows)}."
            )
        references = [(name, value) for name, value in self.position.named_buffers() if _is_reference(name)]
        if not references:
            raise ValueError(
                "`pretrained_window_sizes` must be left out without the encoding 'continuous_bias', got "
                f"{tuple(windows)}."
            )
        for name, value in references:
            value.copy_(torch.tensor(pairs[int(name.split(".")[1])]))

    def init_module(self, name: str, module: nn.Module) -> None:
        """Initialize linear weights as in Swin; norms of blocks start at zero, so that each block is the identity."""
        super().init_module(name, module)
        if re.fullmatch(r"layers\.\d+\.blocks\.\d+\.norm[12]", name):
            for parameter in module.parameters():
                nn.init.zeros_(parameter)

    def no_weight_decay(self) -> set[str]:
        """Return the names of position parameters, and of the learned scales of the logits, as in the authors' code."""
        scales = {name for name, _ in self.named_parameters() if name.endswith(".logit_scale")}
        return super().no_weight_decay() | scales

    def own_layout(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict of Microsoft's code under our names, with the windows that its coordinates are for."""
        state = rename_library(state)
        renamed = super().own_layout(state)
        for published, name in self.position.published_names().items():
            table = state.get(published.removesuffix("cpb_mlp.0.weight") + "relative_coords_table")
            if table is not None and not unusable(table) and table.ndim == 4:
                # the last is log2(1 + 8 (side - 1) / (reference - 1)) / log2(8), NaN on a side of one patch
                lengths = torch.tensor(table.shape[1:3]).double()
                reference = 1 + 4 * (lengths - 1) / (8 ** table[0, -1, -1].double() - 1)
                renamed[f"position.{name.removesuffix('cpb_mlp.0.weight')}reference"] = (
                    reference.nan_to_num(1).round().long()
                )
        return renamed

    def released_layout(self) -> dict[str, Tensor]:
        state = renamed_state_dict(self)
        for name in [name for name in state if _is_reference(name)]:
            del state[name]
        return state


def _is_reference(name: str) -> bool:
    return name.endswith(".reference")


class CosineWindowAttention(WindowAttention):
    """Attention by cosines within windows; keys have no bias.

    Reference: Swin Transformer V2 (Liu et al., 2022), Eq. 2.

    Args:
        mask: number that is added to the logits of tokens of a window that are not neighbors; None excludes them.
        others: as `Attention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        mask: float | None = None,
    ) -> None:
        super().__init__(dim, num_heads, False, attn_drop, proj_drop, cosine=True)
        if qkv_bias:
            self.qkv = QueryValueBias(dim)
        self.mask = mask

    def masking(self, dtype: torch.dtype) -> float:
        """Return `mask`."""
        return super().masking(dtype) if self.mask is None else self.mask


_SMALL: dict[str, Any] = {"depths": (2, 2, 18, 2)}
_BASE: dict[str, Any] = {"embed_dim": 128, "num_heads": (4, 8, 16, 32), **_SMALL}
_LARGE: dict[str, Any] = {"embed_dim": 192, "num_heads": (6, 12, 24, 48), **_SMALL}
_PARAMETERS = {"tiny": 28_347_154, "small": 49_728_418, "base": 87_918_816, "large": 196_739_932}
_ARGUMENTS: dict[str, dict[str, Any]] = {"tiny": {}, "small": _SMALL, "base": _BASE, "large": _LARGE}


def _size(name: str, side: int, tag: str, more: int = 0, cfg: dict[str, Any] | None = None, **windows: Any) -> Size:
    """Describe a published model for images of `side` pixels, with `more` parameters in its head."""
    arguments = {"img_size": side, **_ARGUMENTS[name], **windows}
    return Size(
        _PARAMETERS[name] + more, arguments, hub=tag, cfg={"pool_size": (side // 32, side // 32), **(cfg or {})}
    )


_MODELS: dict[str, Size] = {
    f"swinv2_{name}_window{window}_256": _size(name, 256, "ms_in1k", window_size=window)
    for name in ("tiny", "small", "base")
    for window in (8, 16)
}
for _name in ("base", "large"):
    _classes = 21_841
    _more = (_ARGUMENTS[_name]["embed_dim"] * 8 + 1) * (_classes - 1000)
    _MODELS[f"swinv2_{_name}_window12_192"] = _size(
        _name, 192, "ms_in22k", _more, {"num_classes": _classes}, window_size=12
    )
    for _side, _window in ((256, 16), (384, 24)):
        _MODELS[f"swinv2_{_name}_window12to{_window}_192to{_side}"] = _size(
            _name,
            _side,
            "ms_in22k_ft_in1k",
            cfg={"crop_pct": 1.0} if _side == 384 else None,
            window_size=_window,
            pretrained_window_sizes=(12, 12, 12, 6),
        )
register_sizes(SwinTransformerV2, _MODELS)
register_small(
    "Swin V2", "swinv2_tiny_window8_256", img_size=32, embed_dim=12, depths=(2, 2), num_heads=(1, 2), window_size=4
)
