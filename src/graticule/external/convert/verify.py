"""The outputs of a model of timm or transformers and of the backbone that it was converted into, for one image."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.external.images import call, evaluating
from graticule.position.places import by

#: Largest difference of the outputs, relative to the largest output: timm computes some tables in float32.
_TOLERANCE = 1e-4


def check_outputs(model: nn.Module, backbone: Backbone) -> None:
    """Check that a model and the backbone compute the same for one random image, in evaluation mode.

    A model on the meta device computes nothing, so it passes.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        return
    weight, kind = tensors[0], type(model).__name__
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, backbone.in_chans, *backbone.img_size, generator=generator).to(weight.device, weight.dtype)
    copy = deepcopy(model, {id(tensor): tensor for tensor in tensors})  # some models store what they compute
    devices = [weight.device] if weight.is_cuda else []
    with torch.random.fork_rng(devices), evaluating(copy), evaluating(backbone):
        try:
            expected = outputs_of(copy, image)[0]
        except Exception as error:  # any error of another library
            raise ValueError(
                f"`model` must take an image of {by(backbone.img_size)}, got {kind}, whose forward pass fails on one; "
                "`verify=False` converts it without this check."
            ) from error
        output = backbone(image)
    scale = float(expected.abs().max())
    largest = float((output.reshape(expected.shape) - expected).abs().max())
    if not largest <= max(_TOLERANCE, 16 * torch.finfo(weight.dtype).eps) * scale:
        raise ValueError(
            f"`model` must compute what its class does, got {kind} whose output for one image differs from the "
            f"{type(backbone).__name__}'s by {largest:.2g}, where the largest is {scale:.2g}; "
            "`verify=False` converts it without this check."
        )


def outputs_of(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the output of a model as the backbone has it, and its tokens, if the model returns them.

    x: images (B, C, height, width), or videos (B, C, frames, height, width).
    """
    name, config = type(model).__name__, cast("Any", getattr(model, "config", None))
    if not name.startswith("Qwen") and not name.startswith("Pixtral"):
        output = model(x.transpose(1, 2)) if x.ndim == 5 else call(model, x)
        if isinstance(output, Tensor):
            return output.flatten(2).mT if name == "VisionTransformerSAM" and output.ndim == 4 else output, None
        if name.startswith("Sam"):
            return output.last_hidden_state.flatten(2).mT, None
        key = next(key for key in ("logits", "image_embeds", "pooler_output", "last_hidden_state") if key in output)
        return output[key], output.get("last_hidden_state")
    untyped: Any = model
    if name.startswith("Pixtral"):  # all images in one row
        tokens = untyped(x, image_sizes=[tuple(x.shape[-2:])] * len(x)).last_hidden_state
        return tokens.unflatten(1, (len(x), -1))[0], None
    side, frames = config.patch_size, config.temporal_patch_size
    rows, columns = (length // side for length in x.shape[-2:])
    cut = x.unflatten(3, (columns // 2, 2, side)).unflatten(2, (rows // 2, 2, side)).permute(0, 2, 5, 3, 6, 1, 4, 7)
    patches = cut[..., None, :, :].expand(*(-1,) * 6, frames, -1, -1).flatten(5).flatten(0, 4)
    grid = torch.tensor([[1, rows, columns]] * len(x), device=x.device)
    tokens = untyped(patches, grid_thw=grid).last_hidden_state.unflatten(0, (len(x), -1))
    tokens = tokens.unflatten(1, (rows // 2, columns // 2, 2, 2)).transpose(2, 3).flatten(1, 4)
    return tokens, tokens
