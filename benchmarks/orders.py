"""How much an untrained model knows of the order of frames: the spread of its features over films of the same frames.

    python benchmarks/orders.py

Films of a group of `moving_digits` have the same frames in the order of each class, so without the order their features
are the same. `spread`: of the features over the films of a group, as a share of that over all films. `by class`: the
part of it that is the same for all groups, which a classifier can use at once; it is estimated by products of different
groups, and is 0 if there is none. Medians over five draws of the weights, with their range.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import graticule
from graticule.lab.data.module import DataModule

SIZE = (6, 32, 32)
MODEL: dict[str, Any] = {"img_size": SIZE, "patch_size": (1, 8, 8), "in_chans": 1, "global_pool": "avg"}
MODEL |= {"depth": 3, "embed_dim": 48, "num_heads": 2}
CHOICES = ("none", "learnable", "factorized", "factorized(std=1)", "per_frame(of='learnable')", "relative_bias")
CHOICES += ("rope", "rope_mixed", "peg")


def shares(features: Tensor, classes: int) -> tuple[float, float]:
    """Return both shares from the features of films, group by group, (N, D)."""
    groups = features.unflatten(0, (-1, classes))  # (n, classes, D)
    of_order = (groups - groups.mean(1, keepdim=True)).flatten(1)  # (n, classes * D)
    own, count = of_order.square().sum(1).mean(), len(groups)
    same = (of_order.sum(0).square().sum() / count - own) / (count - 1)
    whole = (features - features.mean(0)).square().sum(1).mean() * classes
    return float((own / whole).sqrt()), float((same.clamp_min(0) / whole).sqrt())


@torch.no_grad()
def main() -> None:
    """Print a table for each data set."""
    for dataset, classes in (("moving_digits", 4), ("moving_digits_order", 2)):
        data = DataModule(dataset, size=SIZE)
        data.setup()
        films = data.test_images(SIZE, range(400))[0].double()
        print(f"{dataset}: 400 films\n{'encoding':36s}{'spread':30s}by class")
        for encoding, normed in [(name, norm) for name in CHOICES for norm in (False, True)]:
            found = []
            for seed in range(5):
                torch.manual_seed(seed)
                name, more = "vit_nano_patch4_28", {"encoding": encoding, "qk_norm": normed, "num_classes": classes}
                model = graticule.create_model(name, **MODEL, **more).double().eval()
                features = model.forward_head(model.forward_features(films), pre_logits=True)
                found.append(shares(features, classes))
            ranges = [sorted(each) for each in zip(*found, strict=True)]
            columns = [f"{each[0]:.1e} {each[2]:.1e} {each[-1]:.1e}" for each in ranges]
            print(f"{encoding + ', qk_norm' * normed:36s}{columns[0]:30s}{columns[1]}", flush=True)


if __name__ == "__main__":
    main()
