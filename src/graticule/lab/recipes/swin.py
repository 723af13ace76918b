"""Swin on ImageNet-1K: T and S as LaPE trains them, and T with PEG as CPVT trains it.

Reproduces: LaPE (Yu et al., 2023), Table 1, with the settings of the first version's (2022) Table 7, row Swin; and CPVT
    (Chu et al., 2023), Table 15 and appendix B.5 (82.25), "with the same training settings" as Swin's code (Liu et al.,
    2021). What LaPE's table leaves out is from that code too.
Command: graticule train swin_tiny_imagenet --data-root IMAGENET [--encoding learnable] [--encoding learnable
    --joining lape] [--encoding learnable+relative_bias --joining lape]; also swin_small_imagenet
    graticule train swin_tiny_peg_imagenet --data-root IMAGENET [--encoding peg]
    [--model swin_tiny_patch4_window7_224]
Cost: not reported.
Result: not measured.

LaPE does not describe how w reaches the later stages: here the chain of norms continues through the patch merging
(`graticule.position.joining.Lape`).

Swin's code, and so CPVT's recipe, has a batch of 1024, with which all three learning rates are scaled; LaPE's has 512.
Since October 2022, after CPVT and LaPE's first version, that code begins its cosine after the warm-up; here it spans
all epochs, as before.
CPVT's section 4.6 removes "its learnable PE" and does not say whether that includes Swin's bias tables. By default they
stay beside the PEG; with --encoding peg there are none; with --model swin_tiny_patch4_window7_224 there is no PEG.
"""

from __future__ import annotations

import graticule
from graticule.lab.recipes.imagenet import imagenet


@graticule.register_recipe(
    "swin_tiny_imagenet",
    "Swin-T on ImageNet-1K as LaPE trains it: 81.12 with its bias, 80.92 learnable, 81.25 LaPE, 81.49 with both.",
    model="swin_tiny_patch4_window7_224",
    batch_size=512,
)
@graticule.register_recipe(
    "swin_small_imagenet",
    "Swin-S on ImageNet-1K as LaPE trains it: 83.17 with its bias, 82.81 learnable, 83.26 LaPE, 83.39 with both.",
    model="swin_small_patch4_window7_224",
    batch_size=512,
    drop_path_rate=0.3,
)
@graticule.register_recipe(
    "swin_tiny_peg_imagenet",
    "Swin-T with PEG and global average pooling on ImageNet-1K: 82.3, against 81.3 (81.1 in a rerun) without PEG.",
    model="swin_tiny_peg_patch4_window7_224",
    batch_size=1024,
)
def train(model: str, batch_size: int, drop_path_rate: float = 0.2) -> graticule.Recipe:
    """Train with the settings of Swin's code."""
    return imagenet(
        model,
        drop_path_rate=drop_path_rate,
        augmentation={"color_jitter": 0.4},
        aug_repeats=1,
        batch_size=batch_size,
        warmup_epochs=20,
        lr=5e-4 * batch_size / 512,
        min_lr=5e-6 * batch_size / 512,
        warmup_lr=5e-7 * batch_size / 512,
        clip_grad=5.0,
    )
