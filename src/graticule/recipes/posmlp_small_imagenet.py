"""PosMLP-S on ImageNet-1K: 83.0.

Reproduces: PosMLP (Wang et al., 2022), Table 2, with the settings of config/PosMLP_S.yaml in its released code
(https://github.com/Zhicaiwww/PosMLP).
Command: graticule train posmlp_small_imagenet --data-root IMAGENET
Cost: the paper names four or eight RTX 3090 and no time.
Result: not measured. The authors' log: 82.958 at best (moving average, epoch 264), 82.568 at the end.

Section 5.2 prints other values (1e-3 to 1e-5, batches of 120 per GPU, random erasing); no released file has them. The
number of GPUs is not given for S; four, as for T. Its log has 310 epochs; its file asks for 300.
Three differences remain: the rate falls by step (there by epoch), the bias of the gate does not decay (there it does),
and checkpoints are kept by the moving average, which is evaluated (there by the raw weights).
"""

from pathlib import Path

from graticule.data import Augmentation
from graticule.tasks import Mixing, Recipe


def recipe() -> Recipe:
    """A folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG."""
    return Recipe(
        model="posmlp_small_224",
        model_kwargs=("drop_rate=0.02333", "proj_drop_rate=0.02333"),
        img_size=(224, 224),
        drop_path_rate=0.1,
        dataset="image_folder",
        data_root=Path("data/imagenet"),
        augmentation=Augmentation(
            scale=(0.08, 1.0),
            ratio=(0.67, 1.5),
            hflip=0.5,
            color_jitter=0.4,  # without effect beside RandAugment
            rand_augment="rand-m6-n3-mstd1.0-inc1",
            erasing=0.0,
            crop_pct=0.9,
            interpolation="bicubic",
            random_interpolation=True,
        ),
        mixing=Mixing(mixup=0.5, cutmix=1.0, prob=1.0, switch_prob=0.5),
        label_smoothing=0.1,
        batch_size=4 * 60,
        eval_batch_size=256,
        workers=8,
        epochs=300,
        warmup_epochs=10,
        cooldown_epochs=0,
        optimizer="adamw",
        optimizer_eps=1e-5,
        lr=1e-3,
        min_lr=1e-6,
        warmup_lr=1e-5,
        weight_decay=0.067,
        clip_grad=1.0,
        ema_decay=0.99992,
        precision="16-mixed",
    )
