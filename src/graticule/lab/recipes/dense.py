"""Detectors on COCO and segmentation models on ADE20K, as LaPE, CPVT and PosMLP report them.

Reproduces: LaPE (Yu et al., 2023), Tables 3 and 4; CPVT (Chu et al., 2023), Table 13; PosMLP (Wang et al., 2022),
    Tables 8 and 9. Few values are printed there; each recipe names those that are, and the public configuration that
    the others were compared with: of ViT-Adapter (Chen et al., 2023), Segmenter (Strudel et al., 2021) and PVT (Wang et
    al., 2021), in their repositories as of 2026-11-22, with the base files of mmdetection and mmsegmentation.
Command: graticule train vit_adapter_tiny_mask_rcnn_coco --data-root COCO --start-from RUN [--joining lape]
    graticule train seg_tiny_mask_ade20k --data-root ADE --start-from RUN [--joining lape]
    graticule train coco_pvt_tiny_retinanet --data-root COCO --start-from RUN [--model pvt_tiny_peg]
    [--model pvt_tiny_gap] [--model pvt_tiny_peg_gap]; the same for coco_pvt_tiny_retinanet_3x and
    ade20k_pvt_tiny_semantic_fpn
    graticule train posmlp_tiny_mask_rcnn_coco --data-root COCO --start-from RUN [--encoding "ggqpe+learnable"]
    where RUN is a classification run, or a checkpoint of timm, such as the file of deit_tiny_patch16_224.
Cost: LaPE's paper names four V100s and no time; the others name neither.
Result: not measured.

The published batch of detectors is two images on each of eight GPUs. Steps are rounded to epochs: 160,000 steps of 16
images are 126.7 epochs of ADE20K's 20,210 images, and 127 are trained; 40,000 of 32 are 63.3, and 64 are trained.

docs/papers.md has what differs from these files. In addition, all sixteen images of a step are wide or all are
tall (there the two of a GPU). BatchNorm is synchronized over GPUs there: pass --sync-batchnorm with several GPUs.

"1x" and "3x" are mmdetection's schedules: 12 epochs, a tenth of the rate after 8 and 11 of them (PosMLP prints the 12),
and 36 epochs, a tenth after 27 and 33. Also mmdetection's are 500 steps of warm-up from a thousandth of the rate, and
flips.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import graticule

#: mmdetection's schedules: epochs, and those after which the rate is divided by ten.
ONE, THREE = (12, (8, 11)), (36, (27, 33))
#: The sizes of multi-scale training: shorter sides, and the longest.
SCALES = tuple(f"{side}x1333" for side in range(480, 801, 32))
#: The table of ViT-Adapter's code, which resamples it without antialias.
_ADAPTED_TABLE = "learnable(resampler='bicubic(antialias=False)')"


def _coco(epochs: tuple[int, tuple[int, ...]], **others: Any) -> graticule.DetectionRecipe:
    """Return a run on COCO: batches of 16, images of at most 800 x 1333."""
    return graticule.DetectionRecipe(
        dataset="coco",
        data_root=Path("data/coco"),
        img_size=(224, 224),  # size of the initial weights; position information is resampled
        fit=(800, 1333),
        by_shape=True,
        batch_size=16,
        eval_batch_size=1,
        workers=8,
        epochs=epochs[0],
        schedule="step",
        decay_epochs=epochs[1],
        warmup_steps=500,
        warmup_lr=1e-7,  # a thousandth
        lr=1e-4,
        **others,
    )


@graticule.register_recipe(
    "vit_adapter_tiny_mask_rcnn_coco",
    "ViT-Adapter-Ti with Mask R-CNN on COCO, 3x + MS: 45.6 / 40.7 default, 46.3 / 41.2 LaPE (box / mask).",
    model="deit_tiny_patch16_224",
    drop_path_rate=0.1,
)
@graticule.register_recipe(
    "vit_adapter_small_mask_rcnn_coco",
    "ViT-Adapter-S with Mask R-CNN on COCO, 3x + MS: 48.3 / 42.8 default, 48.7 / 43.0 LaPE (box / mask).",
    model="deit_small_patch16_224",
    drop_path_rate=0.2,
    precision="16-mixed",
)
def adapter_detection(model: str, drop_path_rate: float, precision: Any = "32-true") -> graticule.DetectionRecipe:
    """Return the recipe of ViT-Adapter's configurations of Mask R-CNN with DeiT.

    Printed by LaPE (section 4.2): Mask R-CNN on COCO 2017 with mmdetection, "the same official settings", five seeds,
    121 to 125. All other values are from czczup/ViT-Adapter, in detection/configs/mask_rcnn/
    mask_rcnn_deit_adapter_{tiny,small}_fpn_3x_coco.py, with its schedule_3x.py and coco_instance.py; only the small
    model is trained in 16 bits there.
    """
    return _coco(
        THREE,
        model=model,
        model_kwargs=("init_values=1.0",),
        encoding=_ADAPTED_TABLE,
        neck=f"adapter(added='last', window=14, drop_path={drop_path_rate}) + fpn",
        head="mask_rcnn",
        drop_path_rate=drop_path_rate,
        augmentation=graticule.DenseAugmentation(sizes=SCALES, part=0.5, crop=(1024, 1024), hflip=0.5),
        weight_decay=0.05,
        precision=precision,
        seed=121,
    )


@graticule.register_recipe(
    "coco_pvt_tiny_retinanet",
    "PVT-tiny with RetinaNet on COCO, 1x: 36.7; 38.0 with PEG, 38.7 with PEG and average pooling before.",
    epochs=ONE,
)
@graticule.register_recipe(
    "coco_pvt_tiny_retinanet_3x",
    "PVT-tiny with RetinaNet on COCO, 3x + MS: 39.4; 41.8 with PEG.",
    epochs=THREE,
    sizes=tuple(f"{side}x1333" for side in (640, 672, 704, 736, 768, 800)),
)
def pvt_detection(epochs: tuple[int, tuple[int, ...]], sizes: tuple[str, ...] = ()) -> graticule.DetectionRecipe:
    """Return the recipe of PVT's configuration of RetinaNet; the sizes of 3x are PVT's, 640 to 800.

    Printed by CPVT (B.6 and Table 13): RetinaNet on COCO, 1x, and 3x with multi-scale training. Rate, decay and
    schedule of 1x are from whai362/PVT, detection/configs/retinanet_pvt_t_fpn_1x_coco.py, stochastic depth is from its
    detection/pvt.py. PVT has no public file for 3x; 640 to 800 are the sizes of its paper. Models with PEG and
    average pooling are Twins-PCPVT, whose code (Meituan-AutoML/Twins c1ff671) has files for 1x and 3x that differ: for
    3x sizes of 480 to 800, with probability 1/2 of 400 to 600 and crops before, and a decay of 0.05; for both a
    stochastic depth of 0.2.
    """
    return _coco(
        epochs,
        model="pvt_tiny",
        head="retinanet",
        drop_path_rate=0.1,
        augmentation=graticule.DenseAugmentation(sizes=sizes, hflip=0.5),
        weight_decay=1e-4,
    )


@graticule.register_recipe(
    "posmlp_tiny_mask_rcnn_coco", "PosMLP-T with Mask R-CNN on COCO, 1x: 41.6 / 38.4 (box / mask).", size="tiny"
)
@graticule.register_recipe(
    "posmlp_small_mask_rcnn_coco", "PosMLP-S with Mask R-CNN on COCO, 1x: 43.2 / 39.4 (box / mask).", size="small"
)
@graticule.register_recipe(
    "posmlp_tiny_retinanet_coco", "PosMLP-T with RetinaNet on COCO, 1x: 41.9.", size="tiny", head="retinanet"
)
@graticule.register_recipe(
    "posmlp_small_retinanet_coco", "PosMLP-S with RetinaNet on COCO, 1x: 42.4.", size="small", head="retinanet"
)
def posmlp_detection(size: str, head: str = "mask_rcnn") -> graticule.DetectionRecipe:
    """Train with the values of section 5.5 of PosMLP.

    Printed there: mmdetection, 12 epochs, two images per GPU, 800 x 1333, AdamW with a rate of 1e-4 and a decay of
    0.067, and windows that are shifted as in Swin. Not printed, and without a detection configuration in
    Zhicaiwww/PosMLP: the number of GPUs (eight here, as in mmdetection's), the steps of the schedule, and stochastic
    depth, 0.1 here, as in its config/PosMLP_{T,S}.yaml.
    """
    return _coco(
        ONE,
        model=f"posmlp_{size}_224",
        model_kwargs=("shift=swin",),
        head=head,
        drop_path_rate=0.1,
        augmentation=graticule.DenseAugmentation(hflip=0.5),
        weight_decay=0.067,
    )


def _ade20k(**others: Any) -> graticule.SegmentationRecipe:
    """Return a run on ADE20K: crops of 512 x 512 of images of 512 x 2048, scaled by 0.5 to 2."""
    return graticule.SegmentationRecipe(
        dataset="ade20k",
        data_root=Path("data/ade/ADEChallengeData2016"),
        fit=(512, 2048),
        augmentation=graticule.DenseAugmentation(
            scale=(0.5, 2.0), crop=(512, 512), crop_majority=0.75, hflip=0.5, photometric=True
        ),
        eval_batch_size=1,
        workers=8,
        schedule="poly",
        **others,
    )


@graticule.register_recipe(
    "vit_adapter_tiny_upernet_ade20k",
    "ViT-Adapter-Ti with UperNet on ADE20K, 160k steps: 40.66 default, 41.52 LaPE.",
    model="deit_tiny_patch16_224",
    drop_path_rate=0.1,
    lr=1.2e-4,
)
@graticule.register_recipe(
    "vit_adapter_small_upernet_ade20k",
    "ViT-Adapter-S with UperNet on ADE20K, 160k steps: 45.07 default, 45.55 LaPE.",
    model="deit_small_patch16_224",
    drop_path_rate=0.2,
    lr=6e-5,
)
def adapter_segmentation(model: str, drop_path_rate: float, lr: float) -> graticule.SegmentationRecipe:
    """Return the recipe of ViT-Adapter's configurations of UperNet with DeiT.

    Printed by LaPE (section 4.3): UperNet on ADE20K with mmsegmentation, five runs, whose seeds it does not name (121
    is the first of section 4.2). All other values are from czczup/ViT-Adapter,
    segmentation/configs/ade20k/upernet_deit_adapter_{tiny,small}_512_160k_ade20k.py, with mmsegmentation's
    upernet_r50.py; the table is for 224 x 224, resampled for each batch.
    """
    return _ade20k(
        model=model,
        model_kwargs=("init_values=1.0",),
        encoding=_ADAPTED_TABLE,
        neck=f"adapter(added='each', drop_path={drop_path_rate})",
        decoder="uperhead",
        auxiliary="fcn",
        img_size=(224, 224),
        drop_path_rate=drop_path_rate,
        batch_size=16,
        epochs=127,
        lr=lr,
        min_lr=0.0,
        warmup_steps=1500,
        warmup_lr=1e-6 * lr,
        weight_decay=0.01,
        decay_position=True,
        layer_decay=0.95,
        window=512,
        stride=341,
        precision="16-mixed",
        seed=121,
    )


@graticule.register_recipe(
    "seg_tiny_mask_ade20k",
    "Segmenter Seg-T-Mask/16 on ADE20K: 36.53 default, 37.91 LaPE.",
    model="deit_tiny_patch16_224",
)
@graticule.register_recipe(
    "seg_small_mask_ade20k",
    "Segmenter Seg-S-Mask/16 on ADE20K: 42.37 default, 42.81 LaPE.",
    model="deit_small_patch16_224",
)
def segmenter(model: str) -> graticule.SegmentationRecipe:
    """Return the recipe of Segmenter's code on ADE20K: SGD with momentum, 64 epochs.

    Printed by LaPE (section 4.3): the mask transformer, patches of 16, ADE20K, five runs, whose seeds it does not name
    (121 is the first of section 4.2). All other values are from segm/config.yml, segm/train.py and
    segm/data/config/ade20k.py of rstrudel/segmenter, and Nesterov's momentum is timm's, which it uses as this
    library does; tables are resampled bilinearly, as there. Its backbones of these sizes are ViTs of ImageNet-21k; LaPE
    starts from DeiT. Its loss is the mean over the pixels of a batch that are not ignored, here over all of them. LaPE
    runs Segmenter in mmsegmentation, with "the same settings introduced in the original papers"; the configurations of
    mmsegmentation have other values (docs/papers.md).
    """
    return _ade20k(
        model=model,
        encoding="learnable(resampler='bilinear(antialias=False)')",
        decoder="segmenter_mask(drop=0.1)",
        img_size=(512, 512),
        drop_path_rate=0.1,
        batch_size=8,
        epochs=64,
        optimizer="sgd",
        lr=1e-3,
        min_lr=1e-5,
        poly_power=0.9,
        weight_decay=0.0,
        window=512,
        stride=512,
        seed=121,
    )


@graticule.register_recipe(
    "ade20k_pvt_tiny_semantic_fpn",
    "PVT-tiny with Semantic FPN on ADE20K: 35.7; 38.0 with PEG, 38.8 with PEG and average pooling before.",
)
def semantic_fpn() -> graticule.SegmentationRecipe:
    """Return the recipe of PVT's configuration of Semantic FPN: 40,000 steps of 32 images.

    Printed by CPVT (B.6): Semantic FPN on ADE20K. All other values are from whai362/PVT, in
    segmentation/configs/sem_fpn/PVT/fpn_pvt_t_ade20k_40k.py, its ade20k.py and its pvt.py (stochastic depth), with
    mmsegmentation's fpn_r50.py.
    """
    return _ade20k(
        model="pvt_tiny",
        decoder="fpn",
        img_size=(224, 224),
        drop_path_rate=0.1,
        batch_size=32,
        epochs=64,
        lr=2e-4,
        min_lr=0.0,
        poly_power=0.9,
        weight_decay=1e-4,
    )
