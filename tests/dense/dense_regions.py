"""Weights of Mask R-CNN under the names of mmdetection's checkpoints."""

import math

import torch


def published_heads(model, classes, channels, hidden=32, inner=16):
    """Return the state dict of a model with random heads of `classes` classes, under mmdetection's names."""
    generator = torch.Generator().manual_seed(classes)

    box, mask = "roi_head.bbox_head", "roi_head.mask_head"
    heads = [
        ("rpn_head.rpn_conv", (channels, channels, 3, 3)),
        ("rpn_head.rpn_cls", (4, channels, 1, 1)),
        ("rpn_head.rpn_reg", (16, channels, 1, 1)),
        (f"{box}.shared_fcs.0", (hidden, channels * 49)),
        (f"{box}.shared_fcs.1", (hidden, hidden)),
        (f"{box}.fc_cls", (classes + 1, hidden)),
        (f"{box}.fc_reg", (4 * classes, hidden)),
        *((f"{mask}.convs.{n}.conv", (inner, inner if n else channels, 3, 3)) for n in range(3)),
        (f"{mask}.upsample", (inner, inner, 2, 2)),
        (f"{mask}.conv_logits", (classes, inner, 1, 1)),
    ]
    prefix = "model.backbone."
    own = {name: value.clone() for name, value in model.state_dict().items() if name.startswith(prefix)}
    # a simple pyramid has no published form, so it keeps its names
    state = {name.replace(f"{prefix}backbone.", "backbone."): value for name, value in own.items()}
    for name, shape in heads:
        weight = torch.randn(shape, generator=generator) / math.prod(shape[1:]) ** 0.5
        state |= {f"{name}.weight": weight, f"{name}.bias": torch.randn(shape[0], generator=generator)}
    return state
