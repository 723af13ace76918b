"""Conversion of normalized images back to pixels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def pixels_of(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float64]:
    """Return a normalized image (C, height, width) as (height, width, 3) from 0 to 1, or (height, width) in gray.

    Args:
        image: an image minus `mean`, divided by `std`; if it does not have three channels, the first one is shown.
        mean: of each channel.
        std: of each channel.
    """
    center, spread = (image.new_tensor(values)[:, None, None] for values in (mean, std))
    found: NDArray[np.float64] = (image * spread + center).clamp(0, 1).double().cpu().numpy()
    return np.moveaxis(found, 0, -1) if len(found) == 3 else found[0]
