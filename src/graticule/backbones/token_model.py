"""Base class of all models: the loop over the blocks, weight initialization and parameter groups."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from timm.layers import trunc_normal_
from timm.models import register_notrace_module
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from graticule.checkpoints.layouts import rename_start
from graticule.checkpoints.load import PublishedNames, register_names
from graticule.encodings.forms.mixing import MixingPosition
from graticule.position.grid import Crop, Grid
from graticule.position.layer import LayerPosition
from graticule.position.position import Position, check_fields
from graticule.registry.checks import TENSORS, Checked, sides

register_notrace_module(Position)  # its grid is not a tensor, so torch.fx records the call as one node


class TokenModel(Checked, PublishedNames, ABC):
    """Blocks over tokens, each with its `LayerPosition`: the loop, weight initialization and parameter groups."""

    #: The fields of `LayerPosition` that the model uses; here those that `run_blocks` applies between the blocks. An
    #: encoding that gives another field is refused. A class adds those that its blocks use.
    takes: ClassVar[frozenset[str]] = frozenset({"added_to_stream", "map_before", "map_after"})
    #: The fields that every layer needs.
    needs: ClassVar[frozenset[str]] = frozenset()
    #: Reason for which the layers can use no others, as a sentence.
    takes_why: ClassVar[str] = ""
    #: Names of the parameters that hold prefix tokens, (1, n, D) or None, in the order of the tokens.
    prefix_names: tuple[str, ...] = ()
    #: First components of the names of parameters here and in published checkpoints; * is one component in both.
    published_parts: ClassVar[tuple[tuple[str, str], ...]] = ()
    #: Pattern of the parameters before the first block.
    stem_pattern: ClassVar[str] = r"cls_token|dist_token|reg_token|patch_embed|stem|embed"

    grid: Grid
    pos_drop: nn.Module
    blocks: nn.Sequential | nn.ModuleList
    norm: nn.Module
    grad_checkpointing: bool = False

    def finish(self) -> None:
        """Initialize the weights and check that the layers can use the position; call it once all layers exist."""
        register_names(self)
        if not any(parameter.is_meta for parameter in self.parameters()):  # on the meta device there is nothing to draw
            self.init_weights()
        self.check_position()

    @torch.no_grad()
    def check_position(self) -> None:
        """Check that the layers can use all fields that the position gives, and get all that they need."""
        check_fields(self.position(self.grid), self.takes, self.needs, type(self).__name__, self.takes_why)

    @torch.no_grad()
    def init_weights(self, mode: str = "") -> None:
        """Initialize linear weights and prefix tokens from a normal of std 0.02, cut at 2 (absolute); biases are zero.

        DeiT's and LaPE's code do the same; timm differs in the class token (std 1e-6). `mode` exists for timm and
        must be ''. Parameters of the position keep the values of their encodings.
        """
        if mode:
            raise ValueError(f"`mode` must be '', the only initialization, got {mode!r}.")
        for name, module in self.named_modules():
            if not name.startswith("position."):
                self.init_module(name, module)
        for token in self._prefix_tokens():
            trunc_normal_(token, std=0.02)

    def init_module(self, name: str, module: nn.Module) -> None:
        """Initialize the weights of a module, but not of its submodules; `name` is its name in the model."""
        init_linear(module)

    def _prefix_tokens(self) -> list[Tensor]:
        tokens = (getattr(self, name) for name in self.prefix_names)
        return [token for token in tokens if token is not None]

    def run_blocks(
        self, x: Tensor, layers: Iterable[tuple[nn.Module, LayerPosition, tuple[Any, ...]]]
    ) -> Iterator[Tensor]:
        """Yield the tokens (B, N, D) after each block.

        Args:
            x: the input tokens of the first block, (B, N, D).
            layers: for every layer its block, its position, and the further arguments of the block.
        """
        for index, (block, position, where) in enumerate(layers):
            x = position.enter_block(x)
            if index == 0:
                x = self.start(x)
            if self.grad_checkpointing and torch.is_grad_enabled():
                x = self.recompute(block, x, position, *where)
            else:
                x = block(x, position, *where)
            x = position.leave_block(x)
            yield x

    def start(self, x: Tensor) -> Tensor:
        """Turn the tokens with their position into the input of the first block, (B, N, D)."""
        x = self.pos_drop(x)
        return x

    def no_weight_decay(self) -> set[str]:
        """Return the names of prefix tokens and position parameters, including fixed tables and LaPE's norms.

        Weights that mix tokens are not among them: by timm's rule, parameters of two or more dimensions decay, as in
        timm's gMLP and in PosMLP's code. The same encoding as a bias on attention logits is among them.
        """
        mixing = [module for module in self.position.modules() if isinstance(module, MixingPosition)]
        decayed = {id(parameter) for module in mixing for parameter in module.encodings.parameters()}
        undecayed = {name for name, parameter in self.position.named_parameters() if id(parameter) not in decayed}
        published = {published for published, name in self.position.published_names().items() if name in undecayed}
        return {f"position.{name}" for name in undecayed} | published | set(self.prefix_names)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that group the parameters: the stem, every block with its position parameters, the rest.

        timm uses them for layer-wise learning rate decay.
        """
        lists = "|".join(re.escape(name) for name in self.position.layer_lists()) or "(?!)"
        return {
            "stem": rf"^(?:{self.stem_pattern})|^position\.(?!(?:{lists})\.\d)",
            "blocks": [(rf"^(?:blocks|position\.(?:{lists}))\.(\d+)", None), (r"^norm", (99999,))],
        }

    def recompute(self, block: nn.Module, *inputs: Any) -> Tensor:
        """Return the output of a block, whose activations are computed again in the backward pass.

        Statistics of BatchNorm are not updated again.
        """
        norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
        # the compiler computes again what has no side effects
        once: dict[str, Any] = {}
        if norms and not torch.compiler.is_compiling():
            once["context_fn"] = lambda: (nullcontext(), _without_statistics(norms))
        return checkpoint(block, *inputs, use_reentrant=False, **once)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block's activations in the backward pass instead of storing them."""
        self.grad_checkpointing = enable

    def own_name(self, published: str) -> str:
        """Return our name for a parameter that published checkpoints call `published`, except position parameters."""
        for name, published_part in reversed(self.published_parts):
            published = rename_start(published, published_part, name)
        return published

    def published_name(self, name: str) -> str:
        """Return the name of a parameter in published checkpoints."""
        for part, published_part in self.published_parts:
            name = rename_start(name, part, published_part)
        return name


def init_linear(module: nn.Module) -> None:
    """Initialize the weights of a linear layer as in DeiT; other modules are unchanged."""
    init_weights(module, nn.Linear)


def init_weights(module: nn.Module, kinds: Any) -> None:
    """Initialize the weights of a layer of one of `kinds` from a normal of std 0.02, cut at 2; its bias is zero."""
    if isinstance(module, kinds):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


#: Images (C, height, width) of any sizes, and the crop of each image.
Images = list[Tensor] | tuple[Tensor, ...]
Crops = list[Crop | None] | tuple[Crop | None, ...]


def check_image(image: object, name: str = "x") -> None:
    """Check that an image, or a batch of images, is a plain tensor."""
    if not isinstance(image, Tensor):
        raise ValueError(f"`{name}` must be a tensor of normalized images, got {type(image).__name__}; {TENSORS}.")
    if image.is_nested or image.layout is not torch.strided:
        kind = "a nested" if image.is_nested else f"one of {image.layout}"
        raise ValueError(f"`{name}` must be a dense tensor of images, got {kind} tensor.")


def forward_each(model: Any, images: Images, crop: Crop | Crops | None) -> Any:
    """Return the outputs of a model for images (C, height, width), in their order, by batches of one size and crop.

    Args:
        model: the model.
        images: of any sizes.
        crop: the part of a larger image that they show, or one for each image.
    """
    if not isinstance(images, (list, tuple)):
        raise ValueError(f"`x` must be a list of images (C, height, width), got {type(images).__name__}.")
    for image in images:
        check_image(image)
    crops = list(crop) if isinstance(crop, (list, tuple)) else [crop] * len(images)
    if not images or len(crops) != len(images):
        raise ValueError(
            f"`x` must have at least one image, and `crop` one entry per image, got {len(images)} images and "
            f"{len(crops)} crops."
        )
    axes = len(model.img_size)
    if wrong := [tuple(image.shape) for image in images if image.ndim != axes + 1]:
        kind = "images" if axes == 2 else "videos or volumes"
        expected = f"(channels, {', '.join(sides(axes))})"
        raise ValueError(f"`x` must be a list of {kind} of {expected}, got one of {wrong[0]}.")
    if len(devices := {image.device for image in images}) > 1:
        raise ValueError(f"`x` must be images on one device, got {' and '.join(sorted(map(str, devices)))}.")
    if len(dtypes := {image.dtype for image in images}) > 1:
        raise ValueError(f"`x` must be images of one dtype, got {' and '.join(sorted(map(str, dtypes)))}.")
    groups: dict[tuple[torch.Size, Crop | None], list[int]] = {}
    for index, (image, part) in enumerate(zip(images, crops, strict=True)):
        groups.setdefault((image.shape, part), []).append(index)
    if not model.global_pool and len({shape for shape, _ in groups}) > 1:
        raise ValueError(
            "`global_pool` must not be '' for images of several sizes, whose numbers of tokens differ; pool the "
            "tokens, or call the model once per size."
        )
    outputs = [model(torch.stack([images[i] for i in group]), part) for (_, part), group in groups.items()]
    order = [index for group in groups.values() for index in group]
    back = sorted(range(len(order)), key=order.__getitem__)
    if isinstance(outputs[0], tuple):  # of a model with two classifiers in training
        return tuple(torch.cat(part)[back] for part in zip(*outputs, strict=True))
    return torch.cat(outputs)[back]


@contextmanager
def _without_statistics(norms: Sequence[Any]) -> Iterator[None]:
    """Keep the statistics of BatchNorm as they are; in training it uses the batch's statistics."""
    tracked = [
        (norm, norm.momentum, norm.num_batches_tracked) for norm in norms if norm.num_batches_tracked is not None
    ]
    for norm, _, count in tracked:
        norm.momentum, norm.num_batches_tracked = 0.0, count.clone()
    try:
        yield
    finally:
        for norm, momentum, count in tracked:
            norm.momentum, norm.num_batches_tracked = momentum, count
