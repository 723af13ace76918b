"""Page of the explorer: one HTML file with the maps of one or two models, drawn by Bokeh from data in the file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from graticule.analysis.explorer_data import Explored, page_data
from graticule.analysis.explorer_maps import KINDS
from graticule.files import write_bytes

#: Maximum number of characters of a page.
LARGEST = 15_000_000
#: Characters of a page without its maps: BokehJS, the plots and the script.
_PAGE = 1_500_000

_TEMPLATES = Environment(loader=PackageLoader("graticule.analysis"), autoescape=True, undefined=StrictUndefined)


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
    page = _TEMPLATES.get_template("explorer.html")
    source = PackageLoader("graticule.analysis").get_source(_TEMPLATES, "explorer.js")[0]
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
        picture = ColumnDataSource({"url": [], "w": [], "h": []}, name=f"{name} picture")
        plot.image_url("url", 0, 0, "w", "h", source=picture)
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
