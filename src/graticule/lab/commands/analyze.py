"""`graticule analyze KIND`: what position does in the layers of a model, in figures and a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from graticule.analysis.attention import attention_maps
from graticule.analysis.equivariance import translation_error, whole_patches
from graticule.analysis.mixing import MixingMap, mixing_maps, mixing_parts, save_mixing
from graticule.analysis.position_maps import position_maps
from graticule.analysis.similarity import Correlations as Similarities
from graticule.external.attention_map import AttentionMap, save_attention
from graticule.external.traced_model import view_of
from graticule.lab.commands.declared import (
    KINDS,
    Analyze,
    AnalyzeAttention,
    AnalyzeCorrelations,
    AnalyzeMixing,
    AnalyzeTranslation,
)
from graticule.lab.commands.opening import Opened, choose_device, label_models, open_models, test_data
from graticule.lab.commands.options import output_folder, parse_size
from graticule.lab.figures.attention_sheet import attention_on_image, attention_sheet, sheet_heads
from graticule.lab.figures.layers import non_locality_plot, translation_plot
from graticule.lab.figures.mixing_sheet import bias_sheet, mixing_sheet, parts_sheet
from graticule.lab.figures.position_sheets import position_sheets
from graticule.lab.figures.save import save_figure
from graticule.lab.figures.style import spread
from graticule.lab.pages.explorer import pixels_of
from graticule.registry.checks import printable

#: The forms of a query and of a shift.
_QUERY, _SHIFT = "ROWxCOLUMN, such as 0x3", "DOWNxRIGHT in patches, such as 1x0 or -1x2"


@dataclass
class Drawings:
    """The result of an analysis, which is computed before a file is written.

    tables: for --json.
    figures: name -> figure.
    arrays: name of a .npz file, without the suffix -> its writer, which returns the path.
    """

    tables: Any = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    arrays: dict[str, Callable[[Path], Path]] = field(default_factory=dict)


def _draw_correlations(options: AnalyzeCorrelations, models: Mapping[str, Opened]) -> Drawings:
    """Compute the maps of position of each stage."""
    if len(models) > 1:
        raise ValueError(f"`models` must be one, got {len(models)}.")
    (opened,) = models.values()
    size = parse_size(options.img_size, len(opened.img_size or (1, 1)))
    stages = position_maps(opened.model, size, options.untrained)
    title = opened.title if opened.run is not None else printable(opened.target)
    drawings = Drawings([{"stage": stage} for stage in range(len(stages))])
    for sheet in position_sheets(stages, title):
        maps, table = sheet.maps, drawings.tables[sheet.stage]
        where = f"{maps.grid.height} x {maps.grid.width}"
        if sheet.kind == "correlations":
            if sheet.of:
                options.say(f"stage {sheet.stage}, {where} tokens")
        elif sheet.kind == "rotary":
            options.say(f"similarity under rotation alone{sheet.of}, mean over heads")
        else:
            options.say(f"bias{sheet.of} on {where} {maps.unit}, from head to head")
        table[sheet.kind] = options.print_table(*maps.summary())
        if sheet.kind == "correlations":
            assert isinstance(maps, Similarities)
            table["verdict"] = maps.verdict
            options.say(maps.verdict)
        drawings.figures[sheet.name], drawings.arrays[sheet.name] = sheet.figure, maps.save
    return drawings


def _draw_translation(options: AnalyzeTranslation, models: Mapping[str, Opened]) -> Drawings:
    """Measure the error of each layer."""
    shifts = [_parse_pair(text, "shifts", _SHIFT) for text in options.shifts] or None
    sizes = {label: parse_size(options.img_size) or opened.size for label, opened in models.items()}
    views = {label: view_of(opened.model).resized_to(sizes[label]).model for label, opened in models.items()}
    for label, model in views.items():
        whole_patches(model, sizes[label])
    device = choose_device(options.device)
    drawings, errors = Drawings(), {}
    for index, (label, opened) in enumerate(models.items()):
        data, size = test_data(opened, options), sizes[label]
        images = data.spread_test_images(size, options.count or min(128, data.num_test))[0].to(device)
        error = errors[label] = translation_error(views[label].to(device), images, shifts, options.border)
        shifted = ", ".join("x".join(map(str, shift)) for shift in error.shifts)
        sides = "x".join(map(str, size))
        options.say(f"{printable(opened.target)}: {error.images} images of {sides}, shifts {shifted}")
        drawings.tables[label] = options.print_table(*error.summary())
        options.say(f"{error.verdict()}\n")
        drawings.arrays[_number("translation", index, models)] = error.save
    options.say("0: the layer is equivariant; 1.41: the shift changes as much as another image does; - : no such token")
    drawings.figures["translation"] = translation_plot(errors, "Distance from translation equivariance")
    return drawings


def _draw_attention(options: AnalyzeAttention, models: Mapping[str, Opened]) -> Drawings:
    """Compute the attention on the test image, which is that of the first model."""
    if not options.layers:
        raise ValueError("`layers` must be one layer or more, got none.")
    patch = None if options.query in (None, "cls") else _parse_pair(str(options.query), "query", _QUERY)
    heads = options.heads or None
    maps: dict[str, list[AttentionMap]] = {}
    for label, opened in models.items():
        data, size = test_data(opened, options), parse_size(options.img_size) or opened.size
        view = view_of(opened.model).resized_to(size)
        grid = view.grids(size)[0]
        at = patch or divmod(grid.center, grid.width)
        if not all(0 <= place < side for place, side in zip(at, grid.shape, strict=True)):
            raise ValueError(
                f"`query` must be inside the {grid.height} x {grid.width} patches of {opened.target}, got "
                f"{options.query}."
            )
        images = data.test_images(size, [options.image])[0]
        if not maps:
            pixels = pixels_of(images[0], data.info.mean, data.info.std)
            share = (at[0] + 0.5) / grid.height, (at[1] + 0.5) / grid.width
        maps[label] = attention_maps(view.model, images, options.layers)
        if options.without_position:
            without = attention_maps(view.model, images, options.layers, without_position=True)
            maps[f"{label}\nwithout position"] = without
    title = f"Attention weights, test image {options.image}"
    query = None if options.query == "cls" else share
    sheet = attention_sheet(maps, heads, title=title)
    on_image = attention_on_image(maps, pixels, query, heads, title=title)
    drawings = Drawings(figures={"attention": sheet, "attention-image": on_image})
    columns = sheet_heads(maps, heads)
    for index, (label, layers) in enumerate(maps.items()):
        rows = [(str(layer.layer), *[f"{layer.distance(head):.2f}" for head in columns]) for layer in layers]
        name = label.replace("\n", ", ")
        options.say(name)
        drawings.tables[name] = options.print_table(("layer", *[f"head {head}" for head in columns]), *rows)
        drawings.arrays[_number("attention", index, maps)] = partial(save_attention, layers)
    options.say("mean attention distance, in patches")
    return drawings


def _draw_mixing(options: AnalyzeMixing, models: Mapping[str, Opened]) -> Drawings:
    """Compute the mixing weights of each layer."""
    size = parse_size(options.img_size)
    query = None if options.query is None else _parse_pair(options.query, "query", _QUERY)
    drawings, maps = Drawings(), {}
    for index, (label, opened) in enumerate(models.items()):
        model: Any = opened.model
        layers = maps[label] = mixing_maps(model, size, query, options.layers or None)
        chosen = layers if options.layers else [layers[layer] for layer in spread(len(layers), 6)]
        title = f"Mixing {options.values}, {opened.title}"
        sheets = {"mixing": mixing_sheet(chosen, options.groups, options.values, title)}
        if any(layer.bias is not None for layer in layers):
            sheets["mixing-bias"] = bias_sheet(layers, f"Bias, {opened.title}")
        if parts := mixing_parts(model, size, query, [layer.layer for layer in chosen]):
            title = f"Parts of the weights, {opened.title}"
            sheets["mixing-parts"] = parts_sheet(parts, (options.groups or [0])[0], title)
        drawings.figures |= {_number(name, index, models): sheet for name, sheet in sheets.items()}
        drawings.arrays[_number("mixing", index, models)] = partial(save_mixing, layers, parts=parts)
    columns = ("layer", "tokens", "groups", "distance", "g", "groups in g")
    for label, layers in maps.items():
        options.say(label)
        drawings.tables[label] = options.print_table(columns, *map(_mixing_row, layers))
    drawings.figures["mixing-reach"] = non_locality_plot(maps)
    token = "the center token" if query is None else f"token {options.query}"
    options.say(
        f"distance: of the weights of {token}, in patches; g: non-locality (PosMLP, Eq. 16), smaller is less local"
    )
    return drawings


#: Kind of analysis -> its function, which prints the tables.
_DRAW: dict[str, Callable[[Any, Mapping[str, Opened]], Drawings]] = {
    "correlations": _draw_correlations,
    "translation": _draw_translation,
    "attention": _draw_attention,
    "mixing": _draw_mixing,
}


def run(options: Analyze) -> int:
    """Look into models: draw figures, and print tables."""
    kind = next(name for name, cls in KINDS.items() if type(options) is cls)
    opened = open_models(options.models, options, f"analyze {kind}", images=kind != "correlations")
    folder = output_folder(options.output, opened[0].folder)
    drawings = _DRAW[kind](options, dict(zip(label_models(opened), opened, strict=True)))
    written = [save(folder / f"{name}.npz") for name, save in drawings.arrays.items()]
    written += [save_figure(sheet, folder / f"{name}.{options.format}") for name, sheet in drawings.figures.items()]
    return options.finish(drawings.tables, *written)


def _parse_pair(text: str, name: str, form: str) -> tuple[int, int]:
    """Parse two whole numbers with an x between them; `form` describes them in errors."""
    numbers = re.fullmatch(r"(-?\d+)x(-?\d+)", text.lower())
    if numbers is None:
        raise ValueError(f"`{name}` must be {form}, got {text!r}.")
    return int(numbers[1]), int(numbers[2])


def _number(name: str, index: int, several: Collection[object]) -> str:
    return name if len(several) == 1 else f"{name}-{index + 1}"


def _mixing_row(layer: MixingMap) -> tuple[str, ...]:
    g, groups = layer.non_locality()
    counted = "-" if layer.matrices is None else f"{groups} of {layer.groups}"
    grid, distance = f"{layer.grid.height}x{layer.grid.width}", f"{layer.distance():.2f}"
    return str(layer.layer), grid, str(layer.groups), distance, f"{g:.3f}" if groups else "-", counted
