"""Feature maps of several resolutions: readers of a backbone, necks such as pyramids, and the models that use them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork

from graticule.backbones.base import Backbone
from graticule.hub.config import architecture_of, configuration_of, words_of
from graticule.hub.kinds import HubModel
from graticule.position.grid import Crop
from graticule.registry.checks import Checked
from graticule.registry.fields import SmallCount
from graticule.registry.registry import Registry, options_of
from graticule.registry.specs import Spec


class Levels(Checked, nn.Module):
    """A module whose output is feature maps, from the finest to the coarsest."""

    #: Channels of each map.
    channels: tuple[int, ...]
    #: Pixels per cell of each map.
    strides: tuple[int, ...]
    #: Number of last maps that are coarser than all input maps.
    extra: int = 0
    #: Names of parameters without weight decay, besides parameters of one dimension.
    not_decayed: tuple[str, ...] = ()


class FeatureReader(Levels, ABC):
    """Reads feature maps from a backbone, from the finest to the coarsest.

    A subclass is constructed with the backbone, removes the parts that it does not use, and does not store it.
    """

    @abstractmethod
    def forward(self, backbone: Backbone, images: Tensor, crop: Crop | None = None) -> list[Tensor]:
        """Return the maps (B, C, H, W) of images (B, C, height, width); `crop` is their part of larger images."""


class Neck(Levels, ABC):
    """Computes feature maps from feature maps.

    A subclass takes `inputs`, the channels of its input maps, and their `strides`; its further arguments are
    options.
    """

    @abstractmethod
    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return the maps (B, C, H, W), from the finest to the coarsest."""


class Stages(FeatureReader):
    """Reads the output of each stage, without the final norm, as in the detectors of PVT and Twins."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        backbone.prune_intermediate_layers(list(range(len(backbone.depths))), prune_norm=True)
        patch = square_patch(backbone.patch_size)
        self.channels = tuple(info["num_chs"] for info in backbone.feature_info)
        self.strides = tuple(patch << stage for stage in range(len(backbone.depths)))

    def forward(self, backbone: Backbone, images: Tensor, crop: Crop | None = None) -> list[Tensor]:
        return backbone.forward_intermediates(images, intermediates_only=True, crop=crop)


class LastMap(FeatureReader):
    """Reads the patch tokens after the last block as one map.

    Args:
        backbone: the backbone.
        norm: whether the final norm is applied, as in Segmenter; ViTDet leaves it out.
    """

    def __init__(self, backbone: Backbone, norm: bool = False) -> None:
        super().__init__()
        backbone.prune_intermediate_layers([len(backbone.feature_info) - 1], prune_norm=not norm)
        self.norm = norm
        self.channels = (backbone.num_features if norm else backbone.embed_dims[-1],)
        self.strides = (square_patch(backbone.coarsest_patch),)

    def forward(self, backbone: Backbone, images: Tensor, crop: Crop | None = None) -> list[Tensor]:
        return backbone.forward_intermediates(images, indices=1, norm=self.norm, intermediates_only=True, crop=crop)


class Features(nn.Module):
    """A backbone, a reader of its maps, and the necks after it: images in, feature maps out.

    Args:
        backbone: any backbone of the library, with any encoding and joining.
        reader: reads maps from it.
        necks: applied to the maps in this order.
    """

    def __init__(self, backbone: Backbone, reader: FeatureReader, necks: Sequence[Neck] = ()) -> None:
        super().__init__()
        self.backbone = backbone
        self.reader = reader
        self.necks = nn.ModuleList(necks)
        every: list[Levels] = [reader, *necks]
        self.channels, self.strides, self.extra = every[-1].channels, every[-1].strides, every[-1].extra
        #: Sides of images must be multiples of this.
        self.divisor = max(max(part.strides[: len(part.strides) - part.extra]) for part in every)

    @property
    def out_channels(self) -> int:
        """Channels of every map, for torchvision's detectors."""
        if len(set(self.channels)) > 1:
            raise ValueError(f"`neck` must end with maps of the same channels, such as 'fpn', got {self.channels}.")
        return self.channels[0]

    def forward(self, images: Tensor, crop: Crop | None = None) -> dict[str, Tensor]:
        """Return the maps of images (B, C, height, width), named '0', '1', ... from the finest to the coarsest.

        Args:
            images: their sides are multiples of `divisor`.
            crop: their part of larger images (see `Backbone.forward`).
        """
        maps = self.reader(self.backbone, images, crop)
        for neck in self.necks:
            maps = neck(maps)
        return {str(level): feature_map for level, feature_map in enumerate(maps)}


def square_patch(patch: tuple[int, int]) -> int:
    """Return the side of a square patch, in pixels."""
    if patch[0] != patch[1]:
        raise ValueError(f"`patch_size` must be square for dense prediction, got {patch[0]} x {patch[1]}.")
    return patch[0]


#: The arguments of a class that are not options.
_CONTEXT = frozenset({"backbone", "inputs", "strides"})
#: Readers and necks by name: the values of the argument `neck`. Only the first of several can be a reader.
NECKS: Registry[type[Levels]] = Registry("neck", Levels, lambda kind: options_of(kind, _CONTEXT), "graticule.dense")
register_neck = NECKS.register


def build_features(
    backbone: Backbone, neck: str | None, norm: bool = False, defaults: dict[str, Any] | None = None
) -> Features:
    """Build the feature maps of a backbone, whose unused parts are removed.

    Args:
        backbone: the backbone.
        neck: names with options in order, such as 'adapter + fpn(channels=128)'; None for the maps of the backbone
            itself.
        norm: whether the final norm is applied to a single map.
        defaults: default options of the reader and of the last neck, as far as they have these options.
    """
    specs = [] if neck is None else list(NECKS.specs(neck))
    left = dict(defaults or {})

    def take_options(spec: Spec) -> dict[str, Any]:
        """Return the options of a part, and the defaults that it has and no part has taken."""
        known = [name for name in left if name in NECKS.options(spec.name)]
        return {**{name: left.pop(name) for name in known}, **spec.options}

    reads = [issubclass(NECKS[spec.name], FeatureReader) for spec in specs]
    if any(reads[1:]):
        late = specs[reads.index(True, 1)].name
        raise ValueError(f"`neck` must begin with {late!r}, which reads the backbone, got {neck!r}.")
    parts: Any = NECKS
    reader: FeatureReader
    if any(reads):
        spec = specs.pop(0)
        reader = parts[spec.name](backbone, **take_options(spec))
    else:
        reader = Stages(backbone) if len(backbone.depths) > 1 else LastMap(backbone, norm)
    necks: list[Neck] = []
    for spec in specs:
        last: Levels = necks[-1] if necks else reader
        options = take_options(spec) if spec is specs[-1] else spec.options
        necks.append(parts[spec.name](last.channels, last.strides, **options))
    return Features(backbone, reader, necks)


Extra = Literal["none", "pool", "convolutions", "outputs"]


class ExtraLevels(nn.Module):
    """Adds coarser maps to a pyramid.

    'pool' adds one, every second cell of the last map (Faster and Mask R-CNN); 'convolutions' adds two by convolutions
    of stride 2, the first from the last input map, without an activation between them (RetinaNet in mmdetection);
    'outputs' the same from the last map of the pyramid, with a ReLU between them (FCOS there: add_extra_convs
    'on_output', relu_before_extra_convs).

    Args:
        extra: 'none', 'pool', 'convolutions' or 'outputs'.
        inputs: channels of the last input map.
        channels: channels of the pyramid.
    """

    def __init__(self, extra: Extra, inputs: int, channels: int) -> None:
        super().__init__()
        self.kind = extra
        self.count = {"none": 0, "pool": 1}.get(extra, 2)
        widths = {"convolutions": (inputs, channels), "outputs": (channels, channels)}.get(extra, ())
        self.convs = nn.ModuleList(nn.Conv2d(width, channels, 3, stride=2, padding=1) for width in widths)
        for parameter in self.parameters():
            nn.init.zeros_(parameter) if parameter.ndim == 1 else nn.init.kaiming_uniform_(parameter, a=1)

    def forward(self, maps: list[Tensor], last: Tensor) -> list[Tensor]:
        """Return the maps of a pyramid and the added ones; `last` is the last input map."""
        if self.kind == "pool":
            return [*maps, F.max_pool2d(maps[-1], 1, 2)]
        outputs = self.kind == "outputs"
        last = maps[-1] if outputs else last
        for step, conv in enumerate(self.convs):
            last = conv(last.relu() if outputs and step else last)
            maps = [*maps, last]
        return maps


class PyramidNeck(Neck):
    """A neck whose maps have the same channels, from the map of index `first` on, with added levels."""

    def set_levels(self, strides: Sequence[int], first: int, extra: Extra, inputs: int, channels: int) -> None:
        """Build the added levels, each of twice the stride of the previous one (see `ExtraLevels`)."""
        if not 0 <= first < len(strides):
            raise ValueError(f"`first` must be the index of one of {len(strides)} maps, got {first}.")
        self.more = ExtraLevels(extra, inputs, channels)
        self.extra = self.more.count
        self.strides = (*strides[first:], *(strides[-1] << level for level in range(1, self.extra + 1)))
        self.channels = (channels,) * len(self.strides)


@register_neck("fpn")
class FeaturePyramid(PyramidNeck):
    """Adds the upsampled coarser maps to each map, all with the same channels: torchvision's, with a choice of levels.

    .. math:: t_l = W_l x_l + \\mathrm{up}(t_{l+1}), \\quad y_l = \\mathrm{conv}_{3 \\times 3}(t_l)

    It computes the same as mmdetection's and mmsegmentation's, whose weights load by their names.

    Reference: Feature Pyramid Networks for Object Detection (Lin et al., 2017).

    Args:
        channels: channels of the pyramid.
        first: index of the first map that is used.
        extra: the added levels, see `ExtraLevels`.
        norm: whether each convolution is followed by a batch norm; it then has no bias.
    """

    def __init__(
        self,
        inputs: Sequence[int],
        strides: Sequence[int],
        channels: SmallCount = 256,
        first: int = 0,
        extra: Extra = "none",
        norm: bool = False,
    ) -> None:
        super().__init__()
        self.first = first
        self.fpn = FeaturePyramidNetwork(list(inputs[first:]), channels, norm_layer=nn.BatchNorm2d if norm else None)
        self.set_levels(strides, first, extra, inputs[-1], channels)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return the pyramid of maps (B, C, H, W)."""
        used = OrderedDict((str(level), feature_map) for level, feature_map in enumerate(maps[self.first :]))
        return self.more(list(self.fpn(used).values()), maps[-1])


@register_neck("simple_pyramid")
class SimplePyramid(PyramidNeck):
    """Computes four maps of strides p/4, p/2, p and 2p from the one map of a plain ViT with patches of p pixels.

    Transposed convolutions or a max pooling change the resolution; then a 1 x 1 and a 3 x 3 convolution follow, each
    with a norm of the channels.

    Reference: Exploring Plain Vision Transformer Backbones for Object Detection (ViTDet, Li et al., 2022), Figure 2c.

    Args:
        channels: channels of the pyramid.
        first: index of the first of the four maps that is used.
        extra: the added levels, see `ExtraLevels`.
    """

    def __init__(
        self,
        inputs: Sequence[int],
        strides: Sequence[int],
        channels: SmallCount = 256,
        first: int = 0,
        extra: Extra = "none",
    ) -> None:
        super().__init__()
        if len(inputs) > 1 or strides[0] % 4:
            raise ValueError(
                "`neck` must not be 'simple_pyramid' unless the backbone is a plain ViT, whose patches are a multiple "
                f"of 4 pixels, got {len(inputs)} maps, the first of stride {strides[0]}; use 'fpn' for a pyramid."
            )
        (dim,), stride = inputs, strides[0]
        double = partial(nn.ConvTranspose2d, kernel_size=2, stride=2)
        scales: list[tuple[int, list[nn.Module]]] = [
            (dim // 4, [double(dim, dim // 2), LayerNorm2d(dim // 2), nn.GELU(), double(dim // 2, dim // 4)]),
            (dim // 2, [double(dim, dim // 2)]),
            (dim, []),
            (dim, [nn.MaxPool2d(2)]),
        ]
        self.scales = nn.ModuleList(
            nn.Sequential(
                *layers,
                nn.Conv2d(width, channels, 1, bias=False),
                LayerNorm2d(channels),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                LayerNorm2d(channels),
            )
            for width, layers in scales[first:]
        )
        self.set_levels([stride // 4, stride // 2, stride, stride * 2], first, extra, dim, channels)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return the pyramid of the one map (B, D, H, W)."""
        scaled = [scale(maps[0]) for scale in self.scales]
        return self.more(scaled, F.max_pool2d(maps[0], 2))


class DenseModel(Checked, HubModel):
    """A model of feature maps of a backbone, `features`: how it is published, and its parameters for optimizers."""

    #: The kind under which it is published.
    kind: ClassVar[str]
    num_classes: int

    @property
    def backbone(self) -> Backbone:
        features: Any = self.features
        return features.backbone

    def hub_config(self, preprocessing: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config.json of the model (see `HubModel`)."""
        if self.created is None:
            raise ValueError(
                f"`model` must be built by create_detector or create_segmenter, whose names a file can store, got a "
                f"{type(self).__name__} that was built in another way."
            )
        return {
            "num_classes": self.num_classes,
            "pretrained_cfg": configuration_of(self.backbone, self.num_classes, preprocessing),
            "backbone": vars(architecture_of(self.backbone)),
            "parts": dict(self.created),
            "graticule": {"kind": self.kind, **words_of(self, self.backbone)},
        }

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters that the backbone or a neck excludes from weight decay."""
        parameters = dict(self.named_parameters())
        undecayed = {name for leaf in self.backbone.no_weight_decay() if (name := self._prefix + leaf) in parameters}
        parts = [(name, part) for name, part in self.named_modules() if isinstance(part, Levels)]
        return undecayed | {f"{name}.{leaf}" for name, part in parts for leaf in part.not_decayed}

    def group_matcher(self, coarse: bool = False) -> dict[str, object]:
        """Return patterns that group the parameters by layer of the backbone; all others are in the last group."""
        prefix = "^" + re.escape(self._prefix)
        matcher = self.backbone.group_matcher(coarse)
        blocks = matcher["blocks"]
        patterns = blocks if isinstance(blocks, list) else [(blocks, None)]
        return {
            "stem": _within(matcher["stem"], prefix),
            "blocks": [(_within(pattern, prefix), order) for pattern, order in patterns],
        }

    @property
    def _prefix(self) -> str:
        """The prefix of the backbone's parameters in the names of the model."""
        return next(f"{name}." for name, module in self.named_modules() if module is self.backbone)


def _within(pattern: str, prefix: str) -> str:
    """Return a pattern for names with `prefix`, from one for names without it."""
    unanchored = re.sub(r"(^|[|])[\^]", r"\1", pattern)
    return f"{prefix}(?:{unanchored})"
