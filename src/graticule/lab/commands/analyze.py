"""`graticule analyze KIND`: what position does in the layers of a model, in figures and a table."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from graticule import analysis, external
from graticule.lab import figures, pages, training
from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.opening import choose_device, label_models, open_models, test_data
from graticule.lab.commands.options import (
    Figures,
    JsonOutput,
    NamedData,
    NamedModels,
    OfSize,
    OnDevice,
    Options,
    output_folder,
    parse,
    square,
)
from graticule.registry.checks import known_name, printable
from graticule.registry.fields import Whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


@dataclass(kw_only=True)
class AnalyzeOptions(Options):
    """Draw what position does in the layers of a model, and print a table.

        graticule analyze correlations RUN
        graticule analyze attention RUN RUN

    correlations: position correlations of every layer, rotations, and the bias of every head.

    translation: distance of every layer from translation equivariance.

    attention: score matrices, and the map of a query on an image.

    mixing: token mixing of gated MLPs, and its non-locality.

    Layers, heads and groups of channels are counted from 0, layers through all stages. graticule analyze KIND --help
    lists the options of a kind.
    """

    kind: Positional[Literal["correlations", "translation", "attention", "mixing"]]
    """kind of analysis"""
    models: Positional[list[str]]
    """runs, published folders, files of weights, names of models, timm:NAME or hf:NAME"""


@dataclass
class KindOptions(OfSize, NamedModels, Figures, JsonOutput, ABC):
    """The options of every kind of analysis."""

    models: Positional[list[str]]
    """runs, published folders, files of weights, names of models, timm:NAME or hf:NAME"""
    output: Path | None = None
    """folder for the figures and the numbers (default: the first run's, or runs/NAME)"""

    @abstractmethod
    def draw(self, models: Mapping[str, training.LoadedModel]) -> Drawings:
        """Compute the results of label -> model, and print tables."""


@dataclass
class CorrelationsOptions(KindOptions):
    """Draw the position correlations of every layer (LaPE, Eq. 12), rotations, and the bias of every head.

    graticule analyze correlations RUN
    graticule analyze correlations deit_tiny_patch16_224 --weights random
    """

    untrained: Rare[Whole] = 39
    """number of untrained models of the same shape against which the range over layers is tested; 0 for none"""

    def draw(self, models: Mapping[str, training.LoadedModel]) -> Drawings:
        """Compute the maps of position of each stage."""
        if len(models) > 1:
            raise ValueError(f"`models` must be one, got {len(models)}.")
        (opened,) = models.values()
        size = square(self.img_size, len(opened.img_size or (1, 1)))
        stages = analysis.position_maps(opened.model, size, self.untrained)
        title = opened.title if opened.run is not None else printable(opened.target)
        drawings = Drawings([{"stage": stage} for stage in range(len(stages))])
        for sheet in figures.position_sheets(stages, title):
            maps, table = sheet.maps, drawings.tables[sheet.stage]
            where = f"{maps.grid.height} x {maps.grid.width}"
            if sheet.kind == "correlations":
                if sheet.of:
                    self.say(f"stage {sheet.stage}, {where} tokens")
            elif sheet.kind == "rotary":
                self.say(f"similarity under rotation alone{sheet.of}, mean over heads")
            else:
                self.say(f"bias{sheet.of} on {where} {maps.unit}, from head to head")
            table[sheet.kind] = self.print_table(*maps.summary())
            if sheet.kind == "correlations":
                assert isinstance(maps, analysis.Correlations)
                table["verdict"] = maps.verdict
                self.say(maps.verdict)
            drawings.figures[sheet.name], drawings.arrays[sheet.name] = sheet.figure, maps.save
        return drawings


@dataclass
class TranslationOptions(NamedData, OnDevice, KindOptions):
    """Measure the distance of each layer from translation equivariance, and of the logits from invariance.

        graticule analyze translation RUN RUN
        graticule analyze translation RUN --shifts 1x0 0x2 --count 64

    Test images are shifted by whole patches. The results are one table per model, and one figure.
    """

    count: Annotated[int, Field(ge=2)] | None = None
    """number of test images, evenly spaced (default: 128, or all if there are fewer)"""
    shifts: list[str] = field(default_factory=list)
    """DOWNxRIGHT, in patches of the coarsest grid (default: 1x0 0x1 1x1)"""

    def draw(self, models: Mapping[str, training.LoadedModel]) -> Drawings:
        """Measure the error of each layer."""
        shifts = [_parse_pair(text, "shifts", _SHIFT) for text in self.shifts] or None
        sizes = {label: square(self.img_size) or opened.size for label, opened in models.items()}
        views = {label: external.view_of(models[label].model).resized_to(size).model for label, size in sizes.items()}
        for label, model in views.items():
            analysis.whole_patches(model, sizes[label])
        device = choose_device(self.device)
        drawings, errors = Drawings(), {}
        for index, (label, opened) in enumerate(models.items()):
            data, size = test_data(opened, self), sizes[label]
            images = data.spread_test_images(size, self.count or min(128, data.num_test))[0].to(device)
            error = errors[label] = analysis.translation_error(views[label].to(device), images, shifts)
            shifted = ", ".join("x".join(map(str, shift)) for shift in error.shifts)
            sides = "x".join(map(str, size))
            self.say(f"{printable(opened.target)}: {error.images} images of {sides}, shifts {shifted}")
            drawings.tables[label] = self.print_table(*error.summary())
            self.say(f"{error.heading}\n")
            drawings.arrays[_number("translation", index, models)] = error.save
        self.say(
            "0: the layer is equivariant; 1.41: the shift changes as much as another image does; - : no such token"
        )
        drawings.figures["translation"] = figures.translation_plot(errors, "Distance from translation equivariance")
        return drawings


@dataclass
class AttentionOptions(NamedData, KindOptions):
    """Draw the attention of chosen layers and heads on one test image: score matrices, and a query's map on the image.

    graticule analyze attention RUN --layers 1 --without-position
    graticule analyze attention RUN RUN --layers 0 5 --heads 0 1 --image 5
    """

    layers: list[int] = field(default_factory=lambda: [1])
    """layers, counted from 0"""
    heads: list[int] = field(default_factory=list)
    """heads, counted from 0 (default: evenly spaced ones, six columns in all)"""
    query: str | None = None
    """ROWxCOLUMN of the patch whose attention is drawn on the image, from 0x0 (default: center), or cls"""
    image: int = 0
    """index of the test image, counted from 0"""
    without_position: bool = False
    """also draw each model with its position information removed"""

    def draw(self, models: Mapping[str, training.LoadedModel]) -> Drawings:
        """Compute the attention on the test image of the first model."""
        if not self.layers:
            raise ValueError("`layers` must be one layer or more, got none.")
        patch = None if self.query in (None, "cls") else _parse_pair(str(self.query), "query", _QUERY)
        heads = self.heads or None
        maps: dict[str, list[external.AttentionMap]] = {}
        for label, opened in models.items():
            data, size = test_data(opened, self), square(self.img_size) or opened.size
            view = external.view_of(opened.model).resized_to(size)
            grid = view.grids(size)[0]
            at = patch or divmod(grid.center, grid.width)
            if not all(0 <= place < side for place, side in zip(at, grid.shape, strict=True)):
                raise ValueError(
                    f"`query` must be inside the {grid.height} x {grid.width} patches of {opened.target}, got "
                    f"{self.query}."
                )
            images = data.test_images(size, [self.image])[0]
            if not maps:
                pixels = pages.pixels_of(images[0], data.info.mean, data.info.std)
                share = (at[0] + 0.5) / grid.height, (at[1] + 0.5) / grid.width
            maps[label] = analysis.attention_maps(view.model, images, self.layers)
            if self.without_position:
                without = analysis.attention_maps(view.model, images, self.layers, without_position=True)
                maps[f"{label}\nwithout position"] = without
        title = f"Attention weights, test image {self.image}"
        query = None if self.query == "cls" else share
        sheet = figures.attention_sheet(maps, heads, title=title)
        on_image = figures.attention_on_image(maps, pixels, query, heads, title=title)
        drawings = Drawings(figures={"attention": sheet, "attention-image": on_image})
        columns = figures.sheet_heads(maps, heads)
        for index, (label, layers) in enumerate(maps.items()):
            rows = [(str(layer.layer), *[f"{layer.distance(head):.2f}" for head in columns]) for layer in layers]
            name = label.replace("\n", ", ")
            self.say(name)
            drawings.tables[name] = self.print_table(("layer", *[f"head {head}" for head in columns]), *rows)
            drawings.arrays[_number("attention", index, maps)] = partial(external.save_attention, layers)
        self.say("mean attention distance, in patches")
        return drawings


@dataclass
class MixingOptions(KindOptions):
    """Draw the token mixing of gated MLPs: the weights around a token, the bias maps, and their non-locality.

        graticule analyze mixing RUN
        graticule analyze mixing RUN --layers 0 3 --query 0x3

    If the weights are a dense matrix plus a table of displacements (encoding lrpe_m), both are drawn as well.
    """

    layers: list[int] = field(default_factory=list)
    """layers, counted from 0 (default: all, six of them drawn)"""
    groups: list[int] = field(default_factory=list)
    """groups of channels, counted from 0 (default: eight, evenly spaced)"""
    query: str | None = None
    """ROWxCOLUMN of the token within its grid or window, starting at 0x0 (default: the center)"""
    values: Literal["weights", "logits"] = "weights"
    """weights, or the logits before their softmax"""

    def draw(self, models: Mapping[str, training.LoadedModel]) -> Drawings:
        """Compute the mixing weights of each layer."""
        size = square(self.img_size)
        query = None if self.query is None else _parse_pair(self.query, "query", _QUERY)
        drawings, maps = Drawings(), {}
        for index, (label, opened) in enumerate(models.items()):
            model: Any = opened.model
            layers = maps[label] = analysis.mixing_maps(model, size, query, self.layers or None)
            chosen = layers if self.layers else [layers[layer] for layer in figures.spread(len(layers), 6)]
            title = f"Mixing {self.values}, {opened.title}"
            sheets = {"mixing": figures.mixing_sheet(chosen, self.groups, self.values, title)}
            if any(layer.bias is not None for layer in layers):
                sheets["mixing-bias"] = figures.bias_sheet(layers, f"Bias, {opened.title}")
            if parts := analysis.mixing_parts(model, size, query, [layer.layer for layer in chosen]):
                title = f"Parts of the weights, {opened.title}"
                sheets["mixing-parts"] = figures.parts_sheet(parts, (self.groups or [0])[0], title)
            drawings.figures |= {_number(name, index, models): sheet for name, sheet in sheets.items()}
            drawings.arrays[_number("mixing", index, models)] = partial(analysis.save_mixing, layers, parts=parts)
        columns = ("layer", "tokens", "groups", "distance", "g", "groups in g")
        for label, layers in maps.items():
            self.say(label)
            drawings.tables[label] = self.print_table(columns, *map(_mixing_row, layers))
        drawings.figures["mixing-reach"] = figures.non_locality_plot(maps)
        token = "the center token" if query is None else f"token {self.query}"
        self.say(
            f"distance: of the weights of {token}, in patches; g: non-locality (PosMLP, Eq. 16), smaller is less local"
        )
        return drawings


#: Kind of analysis -> its options.
KINDS: dict[str, type[KindOptions]] = {
    "correlations": CorrelationsOptions,
    "translation": TranslationOptions,
    "attention": AttentionOptions,
    "mixing": MixingOptions,
}


def read(arguments: list[str]) -> KindOptions:
    """Read the options of a kind of analysis."""
    if not arguments or arguments[0].startswith("-"):
        parse(AnalyzeOptions, "analyze", arguments)  # prints the help, or says what is missing
    kind = known_name("KIND", arguments[0], KINDS)
    return parse(KINDS[kind], f"analyze {kind}", arguments[1:])


def run(options: KindOptions) -> int:
    """Look into models: draw figures, and print tables."""
    kind = next(name for name, cls in KINDS.items() if type(options) is cls)
    opened = open_models(options.models, options, f"analyze {kind}", "*" if kind == "correlations" else "images")
    folder = output_folder(options.output, opened[0].folder)
    drawings = options.draw(dict(zip(label_models(opened), opened, strict=True)))
    written = [save(folder / f"{name}.npz") for name, save in drawings.arrays.items()]
    sheets = {folder / f"{name}.{options.format}": sheet for name, sheet in drawings.figures.items()}
    written += [figures.save_figure(sheet, path) for path, sheet in sheets.items()]
    return options.finish(drawings.tables, *written)


def _parse_pair(text: str, name: str, form: str) -> tuple[int, int]:
    """Parse two whole numbers with an x between them; `form` describes them in errors."""
    numbers = re.fullmatch(r"(-?\d+)x(-?\d+)", text.lower())
    if numbers is None:
        raise ValueError(f"`{name}` must be {form}, got {text!r}.")
    return int(numbers[1]), int(numbers[2])


def _number(name: str, index: int, several: Collection[object]) -> str:
    return name if len(several) == 1 else f"{name}-{index + 1}"


def _mixing_row(layer: analysis.MixingMap) -> tuple[str, ...]:
    g, groups = layer.non_locality()
    counted = "-" if layer.matrices is None else f"{groups} of {layer.groups}"
    grid, distance = f"{layer.grid.height}x{layer.grid.width}", f"{layer.distance():.2f}"
    return str(layer.layer), grid, str(layer.groups), distance, f"{g:.3f}" if groups else "-", counted
