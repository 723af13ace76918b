"""Data of the explorer's page: maps in steps of 1 % of their range, compressed, and the offset of each map."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graticule.analysis.explorer_maps import KINDS, MEAN, Maps, SizeMaps
from graticule.analysis.similarity import Array

#: Steps from the smallest value of a row to its largest: fewer steps make a smaller page.
STEPS = 100
#: Code of NaN.
NOTHING = 255


@dataclass(frozen=True, eq=False)
class Explored:
    """Maps and images of a model for the explorer.

    label: a short name.
    title: description of the model.
    sizes: its maps for each size of the images; the first is shown first.
    pictures: for each size, the images as PNG files.
    """

    label: str
    title: str
    sizes: list[SizeMaps]
    pictures: list[list[bytes]]


def quantized(values: Array) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return (..., M) as codes and the smallest and largest value of each row, (..., 2).

    A code c from 0 to 100 stands for low + c / 100 (high - low), so a value is off by at most 0.5 % of the range of its
    row; 255 stands for NaN.
    """
    known = np.isfinite(values)
    low = np.where(known, values, np.inf).min(-1, keepdims=True)
    high = np.where(known, values, -np.inf).max(-1, keepdims=True)
    low, high = (np.where(np.isfinite(end), end, 0.0) for end in (low, high))
    ends = np.concatenate([low, high], -1).astype(np.float32)
    span = np.where(high > low, high - low, 1.0)
    codes = np.where(known, np.rint(STEPS * (np.where(known, values, low) - low) / span), NOTHING)
    return codes.astype(np.uint8), ends


def page_data(models: Sequence[Explored], limit: int) -> tuple[dict[str, Any], str, list[str]]:
    """Return the description of the models, the maps as compressed base64, and notes on averaged maps.

    While the maps have more than `limit` characters, the largest ones are averaged over their heads.

    Raises:
        ValueError: if they still have too many.
    """
    every = {
        (number, at): list(size.maps) for number, model in enumerate(models) for at, size in enumerate(model.sizes)
    }
    notes: list[str] = []
    while True:
        about, text = _packed(models, every)
        if len(text) <= limit:
            return about, text, notes
        groups: dict[tuple[int, int, str, int | None], int] = {}
        for (number, at), maps in every.items():
            for one in maps:
                if len(one.heads) > 1:
                    key = (number, at, *one.group)
                    groups[key] = groups.get(key, 0) + one.values.size
        if not groups:
            raise ValueError(
                f"`models` must have maps of at most {limit / 1e6:.1f} MB together, got {len(text) / 1e6:.1f} MB with "
                "the heads averaged; give fewer or smaller sizes, fewer images, or one model."
            )
        number, at, kind, image = max(groups, key=lambda key: groups[key])
        every[number, at] = [
            one.averaged() if one.group == (kind, image) and len(one.heads) > 1 else one for one in every[number, at]
        ]
        height, width = models[number].sizes[at].img_size
        of_image = "" if image is None else f", image {image + 1}"
        notes.append(
            f"{models[number].label}, {height} × {width}{of_image}: {KINDS[kind].lower()} is the {MEAN}, as the maps "
            "of all heads would make the page too large."
        )


def _packed(models: Sequence[Explored], every: Mapping[tuple[int, int], list[Maps]]) -> tuple[dict[str, Any], str]:
    """Return the description of the models, and all codes and ends of ranges in one compressed text."""
    parts: list[bytes] = []
    place = 0

    def put(array: NDArray[Any]) -> int:
        """Append an array, padded to a multiple of 4 bytes; returns its offset."""
        nonlocal place
        data = array.tobytes()
        data += b"\0" * (-len(data) % 4)
        at, place = place, place + len(data)
        parts.append(data)
        return at

    described = []
    for number, model in enumerate(models):
        sizes = []
        for at, (size, pictures) in enumerate(zip(model.sizes, model.pictures, strict=True)):
            maps = [_described(one, put) for one in every[number, at]]
            sizes.append(
                {
                    "pixels": size.img_size,
                    "grids": size.grids,
                    "pictures": [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in pictures],
                    "maps": maps,
                    "notes": size.notes,
                }
            )
        described.append({"label": model.label, "title": model.title, "sizes": sizes})
    about = {"kinds": KINDS, "steps": STEPS, "models": described}
    return about, base64.b64encode(zlib.compress(b"".join(parts), 6)).decode()


def _described(one: Maps, put: Any) -> dict[str, Any]:
    """Describe maps; `put` appends their values to the data and returns the offset."""
    values = one.values.reshape(len(one.heads), -1) if one.by_displacement else one.values
    codes, ends = quantized(values)
    return {
        **{key: getattr(one, key) for key in ("kind", "layer", "image", "queries", "keys", "heads", "prefix")},
        "displacement": one.by_displacement,
        "windows": None if one.windows is None else [*one.windows.shape, put(one.windows.astype(np.int32))],
        "codes": put(codes),
        "ends": put(ends),
    }
