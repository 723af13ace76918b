"""The explorer: a page that shows, for a chosen token of an image, the maps of its position in each layer."""

from __future__ import annotations

import base64
import io
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from graticule.analysis.similarity import Array
from graticule.external.traced_model import view_of
from graticule.lab.pages.explorer_maps import KINDS, MEAN, Maps, SizeMaps, explorer_maps
from graticule.lab.pages.report import TEMPLATES
from graticule.registry.checks import checked
from graticule.registry.fields import NotNegative
from graticule.system.files import write_bytes


def pixels_of(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float64]:
    """Return a normalized image (C, height, width) as (height, width, 3) from 0 to 1, or (height, width) in gray.

    Args:
        image: an image minus `mean`, divided by `std`; if it does not have three channels, the first one is shown.
        mean: of each channel.
        std: of each channel.
    """
    center, spread = (image.new_tensor(values)[:, None, None] for values in (mean, std))
    pixels: NDArray[np.float64] = (image * spread + center).clamp(0, 1).double().cpu().numpy()
    return np.moveaxis(pixels, 0, -1) if len(pixels) == 3 else pixels[0]


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
    images: for each size, the images as PNG files.
    """

    label: str
    title: str
    sizes: list[SizeMaps]
    images: list[list[bytes]]


def quantize(values: Array) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
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


def page_data(models: Sequence[Explored], limit: int) -> tuple[dict[str, Any], str, str]:
    """Return the description of the models, the maps as compressed base64, and a note on averaged maps, or "".

    Maps that have more than `limit` characters are averaged over their heads.

    Raises:
        ValueError: if they still have too many.
    """
    maps = {(number, at): size.maps for number, model in enumerate(models) for at, size in enumerate(model.sizes)}
    about, text = _pack(models, maps)
    if len(text) <= limit:
        return about, text, ""
    about, text = _pack(models, {place: [item.averaged() for item in of_size] for place, of_size in maps.items()})
    if len(text) > limit:
        raise ValueError(
            f"`models` must have maps of at most {limit / 1e6:.1f} MB together, got {len(text) / 1e6:.1f} MB with "
            "the heads averaged; give fewer or smaller sizes, fewer images, or one model."
        )
    return about, text, f"Each map is the {MEAN}, since the maps of all heads would make the page too large."


def _pack(models: Sequence[Explored], maps: Mapping[tuple[int, int], list[Maps]]) -> tuple[dict[str, Any], str]:
    """Return the description of the models, and all codes and ends of ranges in one compressed text."""
    data = bytearray()

    def put(array: NDArray[Any]) -> int:
        """Append an array, padded to a multiple of 4 bytes; returns its offset."""
        offset = len(data)
        data.extend(array.tobytes())
        data.extend(b"\0" * (-len(data) % 4))
        return offset

    described = [
        {
            "label": model.label,
            "title": model.title,
            "sizes": [
                {
                    "pixels": size.img_size,
                    "grids": size.grids,
                    "images": [f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in pngs],
                    "maps": [_describe(item, put) for item in maps[number, at]],
                    "notes": size.notes,
                }
                for at, (size, pngs) in enumerate(zip(model.sizes, model.images, strict=True))
            ],
        }
        for number, model in enumerate(models)
    ]
    about = {"kinds": KINDS, "steps": STEPS, "models": described}
    return about, base64.b64encode(zlib.compress(bytes(data), 6)).decode()


def _describe(item: Maps, append: Callable[[NDArray[Any]], int]) -> dict[str, Any]:
    """Describe maps; `put` appends their values to the data and returns the offset."""
    codes, ends = quantize(item.values.reshape(len(item.heads), -1) if item.by_displacement else item.values)
    return {
        **{key: getattr(item, key) for key in ("kind", "layer", "image", "queries", "keys", "heads", "prefix")},
        "displacement": item.by_displacement,
        "windows": None if item.windows is None else [*item.windows.shape, append(item.windows.astype(np.int32))],
        "codes": append(codes),
        "ends": append(ends),
    }


#: Maximum number of characters of a page.
LARGEST = 15_000_000
#: Characters of a page without its maps: BokehJS, the plots and the script.
_PAGE = 1_500_000


def explorer_page(models: Sequence[Explored], about: str = "") -> str:
    """Return the page as HTML; maps are averaged over their heads if it would have more than `LARGEST` characters.

    Args:
        models: one, or two that are shown side by side.
        about: a line at the end, such as how and when the page was made.

    Raises:
        ValueError: if there are no or too many models, or their maps are too large.
    """
    if not 1 <= len(models) <= 2:
        raise ValueError(f"`models` must be one or two, got {len(models)}.")
    from bokeh.embed import components
    from bokeh.resources import Resources

    total = sum(len(png) * 4 // 3 for model in models for pngs in model.images for png in pngs)
    described, maps, note = page_data(models, LARGEST - _PAGE - total)
    kinds = [{item.kind for size in model.sizes for item in size.maps} for model in models]
    panels = [["image", *(kind for kind in KINDS if kind in of_model)] for of_model in kinds]
    names = [f"{number}-{kind}" for number, of_model in enumerate(panels) for kind in of_model]
    script, divs = components({name: _plot(name, name.endswith("-image")) for name in names}, wrap_script=False)
    assert TEMPLATES.loader is not None
    return TEMPLATES.get_template("explorer.html").render(
        models=models,
        panels=panels,
        titles={"image": "Image", **KINDS},
        divs=divs,
        bokeh="\n".join(Resources(mode="inline", components=["bokeh"], minified=True).js_raw),
        plots=script,
        script=TEMPLATES.loader.get_source(TEMPLATES, "explorer.js")[0],
        described=json.dumps(described, separators=(",", ":")).replace("<", "\\u003c"),  # safe in a script element
        maps=maps,
        note=note,
        about=about,
    )


def write_explorer(models: Sequence[Explored], path: str | Path, about: str = "") -> Path:
    """Write the page to `path`, completely or not at all; returns the path. See `explorer_page` for the arguments."""
    return write_bytes(path, explorer_page(models, about).encode("utf-8"))


def _plot(name: str, is_image: bool) -> Any:
    """Return the plot of an image with the grid of tokens, or of a map; the script of the page fills it in."""
    from bokeh.models import BasicTicker, ColorBar, ColumnDataSource, LinearColorMapper, NumeralTickFormatter, Range1d
    from bokeh.plotting import figure

    plot = figure(
        name=name,
        x_range=Range1d(0, 1),
        y_range=Range1d(1, 0),
        x_axis_type=None,
        y_axis_type=None,
        tools="",
        toolbar_location=None,
        frame_width=200,
        frame_height=200,
        min_border=2,
        min_border_right=20,  # room for half of the last label of the color bar
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color="#888888",
        output_backend="canvas",
    )
    if is_image:
        source = ColumnDataSource({"url": [], "y": [], "w": [], "h": []}, name=f"{name} image")
        plot.image_url("url", 0, "y", "w", "h", source=source)
        lines = ColumnDataSource({"x0": [], "y0": [], "x1": [], "y1": []}, name=f"{name} lines")
        plot.segment("x0", "y0", "x1", "y1", source=lines, line_color="#ffffff", line_alpha=0.45)
    else:
        colors = LinearColorMapper(palette="Viridis256", low=0, high=1, nan_color="#00000000", name=f"{name} colors")
        values = ColumnDataSource({"image": [np.zeros((1, 1), np.float32)], "w": [1], "h": [1]}, name=f"{name} values")
        plot.image("image", 0, 0, "w", "h", source=values, color_mapper=colors)
        bar = ColorBar(
            color_mapper=colors,
            ticker=BasicTicker(desired_num_ticks=4),
            formatter=NumeralTickFormatter(format="0.[00000]"),
            height=8,
            padding=8,  # room for half of the first label
            background_fill_color=None,
        )
        plot.add_layout(bar, "below")
    token = ColumnDataSource({"x": [], "y": []}, name=f"{name} token")
    for color, width in (("#000000", 4), ("#ffffff", 2)):  # visible on dark and on light
        plot.rect("x", "y", 1, 1, source=token, fill_color=None, line_color=color, line_width=width)
    return plot


#: Smaller images are enlarged to about this many pixels, without smoothing.
_SIDE = 224


@checked
def compute_maps(
    model: nn.Module,
    images: Sequence[Tensor],
    mean: Sequence[float],
    std: Sequence[NotNegative],
    label: str,
    title: str = "",
) -> Explored:
    """Compute the maps and images of a model for the explorer; `write_explorer` makes a page of one or two models.

    Args:
        model: one of our backbones, or another model of images, as of timm or transformers; not changed.
        images: for each size of the images, (B, C, height, width), normalized; the same images in each. The first size
            is shown first.
        mean: of each channel, as used to normalize the images.
        std: of each channel.
        label: a short name.
        title: description of the model.

    Raises:
        ValueError: if there are no images, the model refuses a size, or it has no maps of position or attention.
    """
    if any(batch.ndim != 4 for batch in images):
        raise ValueError("`images` must be (B, C, height, width) at each size, got volumes.")
    if not images or any(len(batch) != len(images[0]) or not len(batch) for batch in images):
        counts = [len(batch) for batch in images]
        raise ValueError(f"`images` must have the same number at each size, at least one, got {counts or 'no sizes'}.")
    sizes = [explorer_maps(view_of(model, tuple(batch.shape[2:])), batch) for batch in images]
    return Explored(label, title, sizes, [[_png(image, mean, std) for image in batch] for batch in images])


def _png(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> bytes:
    """Return an image (C, height, width) as a PNG file, in gray unless it has three channels."""
    drawing = Image.fromarray((pixels_of(image, mean, std) * 255).round().astype(np.uint8))
    factor = max(1, _SIDE // min(drawing.size))
    buffer = io.BytesIO()
    size = drawing.width * factor, drawing.height * factor
    drawing.resize(size, Image.Resampling.NEAREST).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
