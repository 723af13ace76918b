"""Images that are augmented on the device equal the CPU's."""

import numpy as np
import torch

from graticule.lab.data.device_transforms import AugmentedImages
from graticule.lab.data.images import DatasetInfo
from graticule.lab.data.sampling import BatchIndices
from graticule.lab.recipes.load import load_recipe


def test_every_operation_of_the_recipe_gives_the_images_of_the_cpu(device):
    info = DatasetInfo("cifar10", (*"abcdefghij",), 3, (32, 32), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    pixels = torch.from_numpy(np.random.default_rng(0).integers(256, size=(400, 3, 32, 32)).astype(np.uint8))
    augmentation = load_recipe("vit_lite_cifar10").augmentation
    batches = [
        AugmentedImages(pixels, np.arange(400), info, (32, 32), augmentation, 0).to(target)
        for target in (torch.device("cpu"), device)
    ]
    expected, ours = (images[BatchIndices(np.arange(400), 1)][0].cpu() for images in batches)
    different = (expected - ours).abs() > 1e-5
    assert different.float().mean() < 1e-4 and (expected - ours).abs().max() < 1.01 / 255 / min(info.std)
