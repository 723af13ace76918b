"""DeiT-Ti and CeiT-T on ImageNet-1K as LaPE trains them, and DeiT-Ti with a teacher.

Reproduces: LaPE, first version (Yu et al., 2022), Table 7, rows DeiT and CeiT, for Table 1 of LaPE (2023). What that
    table leaves out is from DeiT (Touvron et al., 2021), Table 9, as listed in CPVT (Chu et al., 2023), Table 10. The
    distilled model is that of DeiT's Table 3, row class+distillation, repeated in CPVT's Table 4.
Command: graticule train deit_tiny_imagenet --data-root IMAGENET [--joining lape]
    graticule train deit_tiny_distilled_imagenet --data-root IMAGENET [--joining lape]
    [--distillation.teacher-checkpoint FILE]
    graticule train ceit_tiny_imagenet --data-root IMAGENET [--joining lape] [--model ceit_small_patch16_224]
Cost: LaPE reports 410 s per epoch on four V100s for DeiT-Ti, 34 h in all; the others are not reported. A teacher adds
    its forward pass to every step.
Result: not measured.

The learning rate of LaPE's table, 5e-4 at a batch of 1024, is read as DeiT's option before scaling: the code of DeiT
and of CeiT, which is DeiT's, and CPVT's Table 10 multiply it by batch / 512. CeiT therefore also has repeated
augmentation. LaPE's released code is DeiT's, too, but evaluates without a margin: its images are resized to 224 pixels
(--augmentation.crop-pct 1), where DeiT, and so these recipes, crop them from 256.

The teacher's weights are DeiT's, https://dl.fbaipublicfiles.com/deit/regnety_160-a5fe301d.pth (82.9 as reported there).
LaPE (2023, Table 1) reports 74.16 with the default joining and 74.97 with LaPE for the distilled model. DeiT's Table 3
gives 74.6 for the head of the distillation token alone; here and in its other tables the two heads are averaged.
"""

from __future__ import annotations

import graticule
from graticule.lab.recipes.imagenet import imagenet


@graticule.register_recipe(
    "deit_tiny_imagenet",
    "DeiT-Ti on ImageNet-1K as LaPE trains it: 71.54 with the default joining, 73.11 with LaPE (2023, Table 1).",
    model="deit_tiny_patch16_224",
)
@graticule.register_recipe(
    "deit_tiny_distilled_imagenet",
    "DeiT-Ti with a distillation token on ImageNet-1K, hard distillation from a RegNetY-160: 74.5.",
    model="deit_tiny_distilled_patch16_224",
    distilled=True,
)
@graticule.register_recipe(
    "ceit_tiny_imagenet",
    "CeiT-T on ImageNet-1K as LaPE trains it: 76.52 with the default joining, 76.87 with LaPE (2023, Table 1).",
    model="ceit_tiny_patch16_224",
)
def train(model: str, distilled: bool = False) -> graticule.Recipe:
    """Train with DeiT's settings."""
    return imagenet(model, distilled)
