"""The base class of all backbones: a model of stages with timm's interface, which can be published."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, ClassVar

from timm.models._features import feature_take_indices
from torch import Tensor, nn

from graticule.backbones.staged import StagedModel
from graticule.hub.config import backbone_config, record_input, written_words
from graticule.hub.kinds import HubModel
from graticule.layers.tokenizers import on_axes
from graticule.position.grid import Crop
from graticule.position.position import PositionBuilder
from graticule.registry.checks import checked, format_value
from graticule.registry.fields import Classes, Side


class Backbone(StagedModel, HubModel):
    """Base class of backbones: maps images to tokens or logits in one or several stages, with timm's interface.

    `StagedModel` describes what a subclass defines, and the arguments.
    """

    #: Name of the first layer, which timm adapts to another number of channels; empty if it is not a convolution.
    first_conv: ClassVar[str | tuple[str, ...]] = "patch_embed.proj"
    #: Names of the classifiers, for timm.
    classifiers: ClassVar[str | tuple[str, ...]] = "head"
    #: timm's configuration of a model that is built by name.
    pretrained_cfg: dict[str, Any]
    #: The model that it was converted from, for converting back; None after the position was replaced.
    converted_from: Any = None
    #: The report of the last change of position (`graticule.surgery.Certificate`); None if there was none.
    certificate: Any = None

    def finish(self) -> None:
        """Initialize the weights, describe the intermediates for timm, and check that the position can be used."""
        super().finish()
        self.feature_info = self._describe_features()

    def replace_position(self, position: PositionBuilder) -> None:
        """Replace the position by a new one; all other weights are unchanged.

        Raises:
            ValueError: if the layers cannot use it. The previous position is then kept.
        """
        if not callable(position):
            raise ValueError(
                f"`position` must be a PositionBuilder, got {format_value(position)}; graticule.change_position takes "
                "names."
            )
        before = self.position
        try:
            self.build_position(position, self.num_heads)
            self.check_position()
        except (TypeError, ValueError):
            self.position = before
            raise
        self._like_weights(self.position).train(self.training)
        self.converted_from = None
        words = written_words(position)
        if self.created is not None:
            arguments = {**self.created["arguments"], **(words or {})}
            self.created = None if words is None else {**self.created, "arguments": arguments}

    def hub_config(self, preprocessing: Mapping[str, Any]) -> dict[str, Any]:
        """Return the contents of the model's config.json (see `HubModel`)."""
        return backbone_config(self, preprocessing)

    def get_classifier(self) -> nn.Module | tuple[nn.Module, ...]:
        return self.head

    @checked
    def reset_classifier(self, num_classes: Classes, global_pool: str | None = None) -> None:
        """Replace the classifier by a new one for `num_classes`; 0 for none."""
        global_pool = self.global_pool if global_pool is None else global_pool
        self.check_pool(global_pool)
        self.global_pool = global_pool
        self.num_classes = num_classes
        self.head = self._like_weights(self._classifier())

    @checked
    def set_input_size(self, img_size: Side | tuple[Side, ...] | None = None) -> None:
        """Change the image size that position information is stored for.

        Args:
            img_size: in pixels, one side or (height, width); unchanged by default.
        """
        size: Any = on_axes(self.img_size if img_size is None else img_size, len(self.img_size))
        grid = self.grid_at(size)
        self.position.set_grid(grid)
        self.img_size, self.grid = size, grid
        record_input(self, self.in_chans, size)

    def _describe_features(self) -> list[dict[str, Any]]:
        """Describe each intermediate for timm: the module that outputs it, its channels, and its pixels per token."""
        names = {id(module): name for name, module in self.named_modules()}
        coarsest, last = max(self.coarsest_patch), len(self.depths) - 1
        return [
            {"module": names[id(self.block(stage, index))], "num_chs": dim, "reduction": coarsest >> (last - stage)}
            for stage, (dim, depth) in enumerate(zip(self.embed_dims, self.depths, strict=True))
            for index in range(depth)
            if not self.stage_lists or index == depth - 1
        ]

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        crop: Crop | None = None,
    ) -> Any:
        """Return the outputs of chosen blocks, or of chosen stages if there are several, as timm does.

        Args:
            x: images (B, C, height, width).
            indices: the last n if an int, these if a list, all if None.
            return_prefix_tokens: pair every map with its prefix tokens (B, prefix, D).
            norm: apply the final norm to the intermediates; with several stages, only to the last stage's.
            stop_early: run no block after the last one that is needed.
            output_fmt: 'NCHW' for (B, D, H, W), 'NLC' for (B, H * W, D).
            intermediates_only: return only the list, without the final tokens. These are after the final norm,
                unless `stop_early` leaves out the last stage of several.
            output_dict: return a dictionary: `image_intermediates`, and unless `intermediates_only`,
                `image_features`; with prefix tokens, `image_intermediates_prefix`.
            crop: the part of a larger image that the images show, as in `forward`.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"`output_fmt` must be 'NCHW' or 'NLC', got {output_fmt!r}.")
        ends = list(accumulate(self.depths if self.stage_lists else [1] * self.depths[0]))
        take, last = feature_indices(len(ends), indices)
        normed = not self.stage_lists  # True if the final norm applies to all intermediates
        maps: list[Tensor] = []
        prefix: list[Tensor] = []
        for layer, (tokens, grid) in enumerate(self.each_layer(x, crop), start=1):
            x, final = tokens, normed or layer == ends[-1]
            if layer in ends and ends.index(layer) in take:
                tokens = self.final(tokens, grid) if norm and final else tokens
                before, patches = grid.split(tokens)
                prefix.append(before)
                maps.append(grid.to_map(tokens).contiguous() if output_fmt == "NCHW" else patches)
            if stop_early and layer == ends[last]:
                break
        with_prefix = return_prefix_tokens and self.num_prefix_tokens > 0
        outputs: list[Any] = list(zip(maps, prefix, strict=True)) if with_prefix else list(maps)
        if intermediates_only and not output_dict:
            return outputs
        result: dict[str, Any] = {"image_intermediates": maps}
        if with_prefix:
            result["image_intermediates_prefix"] = prefix
        if not intermediates_only:
            result["image_features"] = self.final(x, grid) if final else x
        return result if output_dict else (result["image_features"], outputs)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the blocks, or stages, that the intermediates of `indices` do not need; return the kept indices."""
        take, last = feature_indices(len(self.feature_info), indices)
        if self.created is not None:  # `create_model` builds the unpruned model
            shorter = last + 1 < len(self.feature_info) or self.created.get("shorter", False)
            self.created = {**self.created, "pruned": True, "shorter": shorter}
        self.keep(last + 1)
        self.feature_info = self.feature_info[: last + 1]
        if prune_norm:
            self.remove_norm()
        if prune_head:
            self.remove_head()
        return take

    def remove_norm(self) -> None:
        self.norm = nn.Identity()

    def remove_head(self) -> None:
        """Remove the classifier, and what else computes its input from the tokens."""
        self.reset_classifier(0, "")

    def keep(self, count: int) -> None:
        """Keep only the first `count` blocks of the single stage."""
        del self.stage_blocks(0)[count:]
        self.depths = (count,)


def feature_indices(count: int, indices: int | list[int] | None) -> tuple[list[int], int]:
    """Return the indices of chosen outputs among `count`, and the largest, as timm does."""
    try:
        chosen: tuple[list[int], int] = feature_take_indices(count, indices)
    except (AssertionError, TypeError, ValueError):
        rule = f"a number from 1 to {count}, or a list of indices from 0 to {count - 1}"
        raise ValueError(f"`indices` must be {rule}, got {format_value(indices)}.") from None
    return chosen
