"""Catalog of names and sizes for `graticule models`, in a file, so that listing them builds no model.

`python -m evidence.names` writes `catalog.json`, and a test compares it with the registries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from graticule.registry.fields import schema_of
from graticule.registry.plugins import registered_plugins
from graticule.registry.registry import Option

FILE = Path(__file__).with_name("catalog.json")


class Size(TypedDict):
    """Size of a backbone for images of its own size.

    multiply_adds: of one image, including computations once per grid, such as a bias.
    dim, layers: one number per stage.
    image, grid: (height, width), in pixels and in patches.
    patch: (height, width) in pixels, of which the sides of images are multiples.
    """

    parameters: int
    multiply_adds: int | None
    dim: list[int]
    layers: list[int]
    image: list[int]
    grid: list[int]
    patch: list[int]


class LanguageSize(TypedDict):
    """Size of a language model with bytes as tokens and the context of the default recipe."""

    parameters: int
    dim: int
    layers: int
    tokens: int
    context: int


class Catalog(TypedDict):
    """All names that options accept, the sizes of models, and the JSON schemas of the options of a name."""

    models: dict[str, Size]
    language_models: dict[str, LanguageSize]
    encodings: dict[str, dict[str, Any]]
    joinings: dict[str, dict[str, Any]]
    decompositions: list[str]
    resamplers: list[str]
    tasks: list[str]
    necks: list[str]
    heads: list[str]
    decoders: list[str]
    datasets: list[str]
    texts: list[str]


def catalog() -> Catalog:
    """Return the catalog in the file; with plugins, also the names that they register and sizes of their models."""
    kept: Catalog = json.loads(FILE.read_text(encoding="utf-8"))
    return build_catalog(kept) if registered_plugins() else kept


def build_catalog(known: Catalog | None = None) -> Catalog:
    """Collect the names from the registries and measure the models, except those whose sizes are `known`."""
    import graticule
    from graticule.dense.detector import HEADS
    from graticule.dense.features import NECKS
    from graticule.dense.segmentation import DECODERS
    from graticule.lab.data.registry import list_datasets, list_texts
    from graticule.lab.training.task import list_tasks
    from graticule.position.joining import JOININGS
    from graticule.position.position import ENCODINGS
    from graticule.position.resampling import RESAMPLERS

    return {
        "models": _sizes(graticule.list_models(), measure, known["models"] if known else {}),
        "language_models": _sizes(
            graticule.list_language_models(), measure_language, known["language_models"] if known else {}
        ),
        "encodings": {name: _schemas(ENCODINGS.options(name)) for name in sorted(ENCODINGS)},
        "joinings": {name: _schemas(JOININGS.options(name)) for name in JOININGS},
        "decompositions": list(graticule.list_decompositions()),
        "resamplers": list(RESAMPLERS),
        "tasks": sorted(list_tasks()),
        "necks": sorted(NECKS),
        "heads": sorted(HEADS),
        "decoders": sorted(DECODERS),
        "datasets": list(list_datasets()),
        "texts": list(list_texts()),
    }


def _sizes(names: list[str], measured: Callable[[str], Any], known: Mapping[str, Any]) -> dict[str, Any]:
    return {name: known[name] if name in known else measured(name) for name in names}


def _schemas(options: Mapping[str, Option]) -> dict[str, Any]:
    return {name: schema_of(option.kind) for name, option in options.items()}


def measure(name: str) -> Size:
    """Measure a backbone on the meta device, without memory for its weights."""
    import torch

    import graticule
    from graticule.lab.training.cost import count_multiply_adds

    with torch.device("meta"):
        model = graticule.create_model(name).eval()
        image = torch.empty(1, model.pretrained_cfg["input_size"][0], *model.img_size)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "multiply_adds": count_multiply_adds(model, image),
        "dim": list(model.embed_dims),
        "layers": list(model.depths),
        "image": list(model.img_size),
        "grid": list(model.grid.shape),
        "patch": [1, 1] if getattr(model, "pads", False) else list(model.coarsest_patch),
    }


def measure_language(name: str) -> LanguageSize:
    """Measure a language model on the meta device."""
    import torch

    import graticule
    from graticule.lab.data.text_module import ByteTokenizer
    from graticule.lab.tasks.language import TextRecipe

    tokens, context = ByteTokenizer().vocab_size, TextRecipe.context
    with torch.device("meta"):
        model = graticule.create_language_model(name, tokens, context=context)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "dim": model.embed_dim,
        "layers": len(model.blocks),
        "tokens": tokens,
        "context": context,
    }
