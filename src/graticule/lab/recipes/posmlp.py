"""PosMLP on ImageNet-1K, and gMLP on half of it with PosMLP's gating units.

Reproduces: PosMLP (Wang et al., 2022), Table 2, with the settings of config/PosMLP_T.yaml and PosMLP_S.yaml in its
    released code (https://github.com/Zhicaiwww/PosMLP); and Table 1, rows gMLP, with the settings of section 5.2. What
    that section leaves out is from DeiT (Touvron et al., 2021), Table 9.
Command: graticule train posmlp_tiny_imagenet --data-root IMAGENET
    [--train-share 0.5 for the half of Tables 1 and 3 to 7: 77.40] [--encoding glrpe ...]
    [--model-kwargs combine=add ...]
    graticule train posmlp_tiny_printed_imagenet --data-root IMAGENET; also small and base
    graticule train gmlp_small_imagenet --data-root IMAGENET [--encoding ggqpe] (--train-share 1 for all images)
Cost: the paper names four or eight RTX 3090 and no time.
Result: not measured. The authors' logs: T 81.976 at best (moving average, epoch 254), 81.676 at the end; S 82.958
    (moving average, epoch 264) and 82.568; none for B.

PosMLP: section 5.2 prints other values: 300 epochs, 1e-3 to 1e-5, batches of 120 per GPU, and "the same data
augmentations used in DeiT", with random erasing. No released file has them. The recipes whose names have `printed` do,
with eight GPUs, for which DeiT's rule, 5e-4 per 512 images, gives about that rate; their other values are from the
files. The files give images per GPU. The code's README trains T on four GPUs and says that the experiments ran on
eight; four is taken for T and S, a guess for S. T's log has 300 epochs and its file has ten more at the lowest rate;
S's log has 310 and its file has 300. There is no file for B: it has the values of S, the nearest, with the widths
of Table 11, a guess.
docs/papers.md has the remaining differences.

gMLP: the paper gives 1e-3 at a batch of 120 on each of four or eight GPUs, and no rule between the two; a batch of 960
is used, with that rate. Stochastic depth and the decay of the moving average are not given: gMLP's 0.05 (Liu et al.,
2021, Table 1) and DeiT's 0.99996 are used. The paper does not say which half of the images it uses.
"""

from __future__ import annotations

from typing import Any

import graticule
from graticule.lab.recipes.imagenet import imagenet


@graticule.register_recipe("posmlp_tiny_imagenet", "PosMLP-T on ImageNet-1K: 82.1.", size="tiny")
@graticule.register_recipe("posmlp_small_imagenet", "PosMLP-S on ImageNet-1K: 83.0.", size="small")
@graticule.register_recipe("posmlp_base_imagenet", "PosMLP-B on ImageNet-1K: 83.6.", size="base")
@graticule.register_recipe(
    "posmlp_tiny_printed_imagenet", "PosMLP-T on ImageNet-1K, values as printed: 82.1.", size="tiny", printed=True
)
@graticule.register_recipe(
    "posmlp_small_printed_imagenet", "PosMLP-S on ImageNet-1K, values as printed: 83.0.", size="small", printed=True
)
@graticule.register_recipe(
    "posmlp_base_printed_imagenet", "PosMLP-B on ImageNet-1K, values as printed: 83.6.", size="base", printed=True
)
def posmlp(size: str, printed: bool = False) -> graticule.Recipe:
    """Train with the settings of the released configurations, or of section 5.2 where it prints them."""
    tiny = size == "tiny" and not printed  # T's file differs from S's
    unprinted: dict[str, Any] = {"crop_pct": 0.9, "random_interpolation": True}
    released: dict[str, Any] = {
        "augmentation": {
            **unprinted,
            "ratio": (0.67, 1.5),
            "color_jitter": 0.4,  # without effect with RandAugment
            "rand_augment": "rand-m6-n3-mstd1.0-inc1",
            "erasing": 0.0,
        },
        "aug_repeats": 1,
        "mixing": graticule.ImageMixing(mixup=0.5, cutmix=1.0, prob=1.0, switch_prob=0.5),
        "min_lr": 1e-6,
    }
    return imagenet(
        f"posmlp_{size}_224",
        model_kwargs=("drop_rate=0.02333", "proj_drop_rate=0.02333"),
        batch_size=8 * 120 if printed else 4 * (128 if tiny else 60),
        warmup_epochs=10,
        cooldown_epochs=10 if tiny else 0,
        optimizer_eps=1e-5,
        lr=2e-3 if tiny else 1e-3,
        warmup_lr=1e-5,
        weight_decay=0.067,
        clip_grad=1.0,
        ema_decay=0.99992,
        **({"augmentation": unprinted} if printed else released),
    )


@graticule.register_recipe(
    "gmlp_small_imagenet", "gMLP-S on half of ImageNet-1K: 72.14 with its SGU, 74.02 with GGQPE, 74.56 with GLRPE."
)
def gmlp() -> graticule.Recipe:
    """Train with DeiT's settings on half of the images."""
    return imagenet(
        "gmlp_s16_224",
        drop_path_rate=0.05,
        train_share=0.5,
        batch_size=8 * 120,
        lr=1e-3,
        weight_decay=0.067,
        ema_decay=0.99996,
    )
