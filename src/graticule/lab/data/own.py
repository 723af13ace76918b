"""The data sets of the package, by name; importing this file registers them."""

from __future__ import annotations

from functools import partial

from graticule.lab.data.cifar import cifar
from graticule.lab.data.coco import coco, coco_train
from graticule.lab.data.digits import digits
from graticule.lab.data.fashion_mnist import fashion_mnist
from graticule.lab.data.folder import image_folder
from graticule.lab.data.hugging_face import hugging_face
from graticule.lab.data.mask_folder import ade20k, camvid, mask_folder
from graticule.lab.data.registry import DATASETS, Loader, add_own
from graticule.lab.data.scenes import scenes, scenes_sides
from graticule.lab.data.voc import voc_detection, voc_segmentation

_OURS: dict[str, Loader] = {
    "digits": lambda split, root: digits(split),
    "fashion_mnist": fashion_mnist,
    "cifar10": partial(cifar, "cifar10"),
    "cifar100": partial(cifar, "cifar100"),
    "image_folder": image_folder,
    "hugging_face": hugging_face,
    "scenes": lambda split, root: scenes(split),
    "scenes_sides": lambda split, root: scenes_sides(split),
    "coco": coco,
    "coco_train": coco_train,
    "voc_detection": voc_detection,
    "ade20k": ade20k,
    "camvid": camvid,
    "voc_segmentation": voc_segmentation,
    "mask_folder": mask_folder,
}
add_own("dataset", DATASETS, _OURS)
