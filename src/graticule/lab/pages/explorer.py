"""The explorer: a page that shows, for a chosen token of an image, the maps of its position in each layer."""

from __future__ import annotations

import base64
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from graticule.analysis.similarity import Array
from graticule.external.open_view import view_of
from graticule.lab.pages.explorer_maps import KINDS, MEAN, Maps, SizeMaps, explorer_maps
from graticule.lab.pages.report import TEMPLATES
from graticule.registry.checks import checked
from graticule.system.files import write_bytes


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
        size = " × ".join(map(str, models[number].sizes[at].img_size))
        of_image = "" if image is None else f", image {image}"
        notes.append(
            f"{models[number].label}, {size}{of_image}: {KINDS[kind].lower()} is the {MEAN}, as the maps "
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


#: Maximum number of characters of a page.
LARGEST = 15_000_000
#: Characters of a page without its maps: BokehJS, the plots and the script.
_PAGE = 1_500_000


def explorer_page(models: Sequence[Explored], about: str = "", limit: int = LARGEST) -> str:
    """Return the page as HTML.

    Args:
        models: one, or two that are shown side by side.
        about: a line at the end, such as how and when the page was made.
        limit: maximum number of characters of the page; the largest maps are averaged over their heads to stay below
            it.

    Raises:
        ValueError: if there are no or too many models, or their maps are too large.
    """
    if not 1 <= len(models) <= 2:
        raise ValueError(f"`models` must be one or two, got {len(models)}.")
    from bokeh import __version__
    from bokeh.embed import components
    from bokeh.resources import Resources

    pictures = sum(len(one) * 4 // 3 for model in models for size in model.pictures for one in size)
    described, maps, notes = page_data(models, limit - _PAGE - pictures)
    shown = [_kinds(model) for model in models]
    plots = {
        f"{number}-{kind}": _plot(f"{number}-{kind}", kind == "image")
        for number, kinds in enumerate(shown)
        for kind in ("image", *kinds)
    }
    script, divs = components(plots, wrap_script=False)
    page = TEMPLATES.get_template("explorer.html")
    assert TEMPLATES.loader is not None
    source = TEMPLATES.loader.get_source(TEMPLATES, "explorer.js")[0]
    return page.render(
        models=models,
        shown=shown,
        titles={"image": "Image", **KINDS},
        divs=divs,
        bokeh="\n".join(Resources(mode="inline", components=["bokeh"], minified=True).js_raw),
        version=__version__,
        plots=script,
        script=source,
        described=_safe(described),
        maps=maps,
        notes=notes,
        about=about,
    )


def write_explorer(models: Sequence[Explored], path: str | Path, about: str = "", limit: int = LARGEST) -> Path:
    """Write the page to `path`, completely or not at all; returns the path. See `explorer_page` for the arguments."""
    return write_bytes(path, explorer_page(models, about, limit).encode("utf-8"))


def _kinds(model: Explored) -> list[str]:
    """Return the kinds of maps that a model has at any size."""
    found = {one.kind for size in model.sizes for one in size.maps}
    return [kind for kind in KINDS if kind in found]


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
        picture = ColumnDataSource({"url": [], "y": [], "w": [], "h": []}, name=f"{name} picture")
        plot.image_url("url", 0, "y", "w", "h", source=picture)
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
            padding=4,
            background_fill_color=None,
        )
        plot.add_layout(bar, "below")
    token = ColumnDataSource({"x": [], "y": []}, name=f"{name} token")
    for color, width in (("#000000", 4), ("#ffffff", 2)):  # visible on dark and on light
        plot.rect("x", "y", 1, 1, source=token, fill_color=None, line_color=color, line_width=width)
    return plot


def _safe(value: object) -> str:
    """Return JSON that is safe in a script element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


#: Smaller pictures are enlarged to about this many pixels, without smoothing.
_SIDE = 224


@checked
def explored(
    model: nn.Module,
    images: Sequence[Tensor],
    mean: Sequence[float],
    std: Sequence[float],
    label: str,
    title: str = "",
) -> Explored:
    """Compute the maps and images of a model for the explorer; `write_explorer` makes a page of one or two models.

    Args:
        model: one of our backbones, or another model of images, as of timm or transformers; not changed.
        images: for each size of the images, (B, C, height, width), or films with a depth, normalized; the same images
            in each. The first size is shown first.
        mean: of each channel, as used to normalize the images.
        std: of each channel.
        label: a short name.
        title: description of the model.

    Raises:
        ValueError: if there are no images, the model refuses a size, or it has no maps of position or attention.
    """
    if not images or any(len(one) != len(images[0]) or not len(one) for one in images):
        counts = [len(one) for one in images]
        raise ValueError(f"`images` must have the same number at each size, at least one, got {counts or 'no sizes'}.")
    sizes = [explorer_maps(view_of(model, tuple(one.shape[2:])), one) for one in images]
    drawn = zip(images, sizes, strict=True)
    return Explored(label, title, sizes, [[_png(_strip(one, size), mean, std) for one in each] for each, size in drawn])


def _strip(image: Tensor, size: SizeMaps) -> Tensor:
    """Return an image (C, height, width), or the first frames of the patches of a film, one below the other."""
    return image if image.ndim == 3 else image[:, :: image.shape[1] // size.img_size[0]].flatten(1, 2)


def _png(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> bytes:
    """Return an image (C, height, width) as a PNG file, in gray unless it has three channels."""
    drawn = Image.fromarray((pixels_of(image, mean, std) * 255).round().astype(np.uint8))
    factor = max(1, _SIDE // min(drawn.size))
    enlarged = drawn.resize((drawn.width * factor, drawn.height * factor), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    enlarged.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
