"""The backbones of LaPE's Tables 1 and 2, on ImageNet-1K and CIFAR, as LaPE trains them; and DeiT-Ti with a teacher.

Reproduces: LaPE (Yu et al., 2023), Tables 1 and 2, with the settings of Table 7 of its first version (2022); the mean
    of seeds 121 to 125 on CIFAR; the paper names no seed for ImageNet. What that table leaves out is from the code or
    the tables that each function names.
    The chain of norms, `lape`, is of 2023; in the first version all layers share w, `lape_sharing`.
Command: graticule train deit_tiny_imagenet --data-root IMAGENET [--joining lape]; also ceit_tiny_imagenet
    [--model ceit_small_patch16_224]
    graticule train deit_tiny_distilled_imagenet --data-root IMAGENET [--joining lape]
    [--distillation.teacher-checkpoint FILE]
    graticule train t2t_vit_7_imagenet --data-root IMAGENET [--joining lape] [--joining "lape_sharing(layers=3)"]
    graticule train swin_tiny_imagenet --data-root IMAGENET [--encoding learnable] [--encoding learnable
    --joining lape] [--encoding learnable+relative_bias --joining lape]; also swin_small_imagenet
    graticule train swin_tiny_peg_imagenet --data-root IMAGENET [--encoding peg]
    [--model swin_tiny_patch4_window7_224]
    graticule train cct_cifar10 --data-root FOLDER
    Table 7 of LaPE: graticule train deit_tiny_imagenet --data-root IMAGENET [--encoding "relative_bias(std=0)"]
    [--encoding sinusoidal_2d] [--joining shared] [--joining unshared] [--joining lape]; its Table 8 with --joining
    "lape(decomposition='w')" ... (graticule models lists the eight).
    Table 5 of the first version: graticule compare vit_lite_cifar100 --seeds 121 122 123 124 125 --choices
    joining=default "joining=lape_sharing(decomposition='w')" "joining=lape_sharing(decomposition='scalar_w')" ...
    Its Table 6: the same with --choices joining=default "joining=lape_sharing(layers=1)" ...
    "joining=lape_sharing(layers=7)"
Cost: LaPE reports 410 s per epoch on four V100s for DeiT-Ti, 34 h in all; the others are not reported. A teacher adds
    its forward pass to every step.
Result: not measured.
"""

from __future__ import annotations

from pathlib import Path

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
def deit(model: str, distilled: bool = False) -> graticule.Recipe:
    """Train with DeiT's settings (Touvron et al., 2021), Table 9, as listed in CPVT (Chu et al., 2023), Table 10.

    The learning rate of LaPE's table, 5e-4 at a batch of 1024, is read as DeiT's option before scaling: the code of
    DeiT and of CeiT, which is DeiT's, and CPVT's Table 10 multiply it by batch / 512. CeiT therefore also has repeated
    augmentation. LaPE's released code is DeiT's, too; docs/papers.md has what differs.

    The distilled model is of DeiT's Table 3, row class+distillation, repeated in CPVT's Table 4. The teacher's
    weights are DeiT's, https://dl.fbaipublicfiles.com/deit/regnety_160-a5fe301d.pth (82.9 as reported there). LaPE
    (2023, Table 1) reports 74.16 with the default joining and 74.97 with LaPE. DeiT's Table 3 gives 74.6 for the head
    of the distillation token alone; here and in its other tables the two heads are averaged.
    """
    return imagenet(model, distilled)


@graticule.register_recipe(
    "t2t_vit_7_imagenet",
    "T2T-ViT-7 on ImageNet-1K as LaPE trains it: 71.69 with the default joining, 71.92 with LaPE (2023, Table 1).",
)
def t2t_vit() -> graticule.Recipe:
    """Train with the settings of T2T-ViT's code (Yuan et al., 2021).

    The encoding is the fixed sinusoidal one. The first version of LaPE joins the first three layers (71.88 with
    "lape_sharing(layers=3)"); the second names no number of layers. LaPE's table has a batch of 1024; the code's
    command has 512 with the same rate. The 10 warm-up epochs count within the 300; the 10 of cool-down come after. As
    in that code, the moving average of the weights is evaluated, at a crop of 0.9.
    """
    batch_size = 1024
    return imagenet(
        "t2t_vit_7",
        augmentation={"color_jitter": 0.4, "crop_pct": 0.9, "random_interpolation": True},
        aug_repeats=1,
        batch_size=batch_size,
        warmup_epochs=10,
        cooldown_epochs=10,
        lr=1e-3 * batch_size / 1024,
        weight_decay=0.03,
        ema_decay=0.99996,
    )


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
def swin(model: str, batch_size: int, drop_path_rate: float = 0.2) -> graticule.Recipe:
    """Train with the settings of Swin's code (Liu et al., 2021).

    LaPE does not describe how w reaches the later stages: here the chain of norms continues through the patch merging
    (`graticule.position.joining.Lape`).

    The model with PEG is of CPVT (Chu et al., 2023), Table 15 and appendix B.5 (82.25), "with the same training
    settings". CPVT's section 4.6 removes "its learnable PE" and does not say whether that includes Swin's bias tables.
    By default they stay beside the PEG; with --encoding peg there are none; with --model swin_tiny_patch4_window7_224
    there is no PEG.

    Swin's code, and so CPVT's recipe, has a batch of 1024, with which all three learning rates are scaled; LaPE's has
    512. The cosine spans all epochs, as in that code before October 2022 (docs/papers.md).
    """
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


def cifar(model: str, classes: int) -> graticule.Recipe:
    """Train on CIFAR-10 or CIFAR-100 with the settings of the code of Compact Transformers (Hassani et al., 2021).

    ViT-Lite and CVT have configs/datasets/cifar10.yml and cifar100.yml, CCT has
    configs/pretrained/cct_7-3x1_cifar10_300epochs.yml and cct_7-3x1_cifar100_300epochs.yml.

    The text of LaPE's first version says SGD for CIFAR; the code that it builds on uses AdamW, and so do these recipes
    (--optimizer sgd for SGD). The 10 warm-up epochs count within the 300; the 10 of cool-down come after them. Its
    models exclude nothing but vectors from decay, so tables and class tokens decay. CCT's random erasing differs
    between the data sets, 0 and 0.25, since 6bd53cc (September 2021).
    """
    ten = classes == 10
    return graticule.Recipe(
        model=model,
        img_size=(32, 32),
        drop_path_rate=0.1,
        dataset=f"cifar{classes}",
        data_root=Path("data"),
        augmentation=graticule.Augmentation(
            scale=(0.8, 1.0),
            hflip=0.5,
            rand_augment="rand-m9-mstd0.5-inc1",
            color_jitter=0.4,
            erasing=0.0 if ten and model.startswith("cct") else 0.25,
            interpolation="bicubic",
            random_interpolation=True,
        ),
        mixing=graticule.ImageMixing(mixup=0.8, cutmix=1.0, prob=1.0, switch_prob=0.5, off_epoch=175 if ten else 0),
        label_smoothing=0.1,
        batch_size=128,
        epochs=300,
        warmup_epochs=10,
        cooldown_epochs=10,
        optimizer="adamw",
        lr=55e-5 if ten else 6e-4,
        min_lr=1e-5,
        warmup_lr=1e-5 if ten else 1e-6,
        weight_decay=0.06,
        decay_position=True,
        precision="16-mixed",
        workers=4,
        seed=121,
    )


#: LaPE's Table 2 (2023): recipe -> model, its name there, top-1 with the default joining, and with LaPE.
_TABLE_2 = {
    "vit_lite_cifar10": ("vit_lite_7_4_32", "ViT-Lite-7/4", "93.448", "94.290"),
    "vit_lite_cifar100": ("vit_lite_7_4_32", "ViT-Lite-7/4", "74.984", "75.534"),
    "cvt_cifar10": ("cvt_7_4_32", "CVT-7/4", "94.302", "94.690"),
    "cvt_cifar100": ("cvt_7_4_32", "CVT-7/4", "77.452", "78.052"),
    "cct_cifar10": ("cct_7_3x1_32", "CCT-7/3x1", "96.034", "96.530"),
    "cct_cifar100": ("cct_7_3x1_32", "CCT-7/3x1", "80.928", "81.986"),
}
for _name, (_model, _title, _default, _lape) in _TABLE_2.items():
    _classes = int(_name.partition("_cifar")[2])
    _scores = f"{_default} with the default joining, {_lape} with LaPE (2023, Table 2)"
    _about = f"{_title} on CIFAR-{_classes} as LaPE trains it: {_scores}."
    graticule.register_recipe(_name, _about, model=_model, classes=_classes)(cifar)
