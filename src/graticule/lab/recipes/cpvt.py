"""CPVT and PVT on ImageNet-1K, PVT with and without PEG.

Reproduces: CPVT (Chu et al., 2023), Tables 2, 3, 4 and 13, with the settings of Table 10. PVT as published is from
    Wang et al. (2021); CPVT trains it "with the same settings".
Command: graticule train cpvt_tiny_imagenet --data-root IMAGENET [--encoding "peg(places=[0, 1, 2, 3, 4])"]
    [--model cpvt_tiny_gap_patch16_224]; then graticule evaluate RUN --sizes 160 224 384 448 512; also small and base
    graticule train cpvt_tiny_distilled_imagenet --data-root IMAGENET [--encoding "peg(places=[0, 1, 2, 3, 4])"]
    [--model deit_tiny_distilled_patch16_224 --encoding peg] [--distillation.teacher-checkpoint FILE]
    graticule train pvt_tiny_imagenet --data-root IMAGENET [--model pvt_tiny_peg] [--model pvt_tiny_gap]
    [--model pvt_tiny_peg_gap]
Cost: the paper reports 1.3 (Ti), 1.6 (S) and 2.5 days (B) on eight V100s, and nothing for the others. A teacher adds
    its forward pass to every step.
Result: not measured.

The paper disagrees with itself: Table 10 names LAMB and a batch of 1024, section 4.1 AdamW (for all except base) and a
batch of 2048, and appendix B.2 says "exactly the same hyperparameters as DeiT except for the base model", which "is
not always stably trained using AdamW". These recipes use AdamW and DeiT's batch, and LAMB for base; the learning rate
is 5e-4 per 512 images in all three.

Table 3's DeiT-Ti with global average pooling is graticule train deit_tiny_imagenet --global-pool avg --model-kwargs
fc_norm=False: with the norm before the pooling, as in CPVT, it differs from the model with a class token only in the
pooling.

Distillation (section 4.5): the teacher's weights are DeiT's, https://dl.fbaipublicfiles.com/deit/regnety_160-a5fe301d.pth.
The paper does not say whether the student has a distillation token, and how many PEGs it has. Here it has no token,
and its one classifier learns from labels and teacher, as in DeiT's Eq. 3; --model deit_tiny_distilled_patch16_224 has
a token. It has one PEG: Table 4 marks rows with five, and this one is not marked.

PVT's code has the same settings, but its tables decay (--decay-position, which also decays the class token). Its
ten epochs of cool-down, like DeiT's, are never reached. pvt_small is the same; pvt_medium has --drop-path-rate 0.3
--clip-grad 1 there.
"""

from __future__ import annotations

from typing import Any

import graticule
from graticule.lab.recipes.imagenet import imagenet


@graticule.register_recipe(
    "cpvt_tiny_imagenet",
    "CPVT-Ti on ImageNet-1K: 72.4 with one PEG, 73.4 with five, 74.9 with five and global average pooling.",
    model="cpvt_tiny_patch16_224",
)
@graticule.register_recipe(
    "cpvt_small_imagenet",
    "CPVT-S on ImageNet-1K: 79.9 with one PEG, 80.5 with five, 81.5 with five and global average pooling.",
    model="cpvt_small_patch16_224",
)
@graticule.register_recipe(
    "cpvt_base_imagenet",
    "CPVT-B on ImageNet-1K, with LAMB: 81.9 with one PEG, 82.3 with five, 82.7 with five and global average pooling.",
    model="cpvt_base_patch16_224",
    optimizer="lamb",
)
@graticule.register_recipe(
    "cpvt_tiny_distilled_imagenet",
    "CPVT-Ti on ImageNet-1K with hard distillation from a RegNetY-160: 75.9.",
    model="cpvt_tiny_patch16_224",
    distilled=True,
)
@graticule.register_recipe(
    "pvt_tiny_imagenet",
    "PVT-tiny on ImageNet-1K: 75.0 as published, 77.3 with PEG, 75.9 with GAP, 78.1 with both.",
    model="pvt_tiny",
)
def train(model: str, **values: Any) -> graticule.Recipe:
    """Train with DeiT's settings."""
    return imagenet(model, **values)
