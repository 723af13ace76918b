"""`graticule models`."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tyro

from graticule.commands.options import parse, print_table

if TYPE_CHECKING:
    from torch import nn


@dataclass
class Models:
    """List the models with their sizes, and what a recipe's options can be."""

    pattern: tyro.conf.Positional[str] = "*"
    """names to list, as in a shell: deit_* or lm_*"""


def run(arguments: list[str]) -> int:
    """List what can be chosen."""
    options = parse(Models, "models", arguments)
    import graticule
    from graticule.data import list_datasets, list_texts, list_tokenizers
    from graticule.recipes import list_recipes

    backbones = graticule.list_models(options.pattern)
    language_models = fnmatch.filter(graticule.list_language_models(), options.pattern)
    if not backbones and not language_models:
        every = ", ".join([*graticule.list_models(), *graticule.list_language_models()])
        raise ValueError(f"no model is named like {options.pattern!r}; the models are {every}.")
    if backbones:
        columns = ("model", "parameters", "dim", "layers", "image", "patches")
        print_table(columns, [_backbone(name) for name in backbones])
        print()
    if language_models:
        columns = ("language model", "parameters", "dim", "layers", "tokens", "context")
        print_table(columns, [_language_model(name) for name in language_models])
        print()
    print(f"encodings       {', '.join(graticule.list_encodings())} (several: learnable+peg)")
    print(f"joinings        {', '.join(graticule.list_joinings())}")
    print(f"decompositions  {', '.join(graticule.list_decompositions())} (of LaPE's norm)")
    print(f"data sets       {', '.join(list_datasets())}")
    print(f"texts           {', '.join(list_texts())}")
    print(f"tokenizers      {', '.join(list_tokenizers())} (or the file of a saved one)")
    print("recipes")
    for name, about in list_recipes().items():
        print(f"  {name:20s} {about}")
    return 0


def _backbone(name: str) -> list[str]:
    """Make the row of a backbone for images, at its own size."""
    import torch

    import graticule

    with torch.device("meta"):
        model = graticule.create_model(name)
    dims = getattr(model, "embed_dims", (getattr(model, "embed_dim", 0),))
    depths = getattr(model, "depths", None) or (len(model.blocks),)
    image, grid = ("x".join(map(str, sides)) for sides in (model.img_size, model.grid.shape))
    return [name, _size(model), "-".join(map(str, dims)), "-".join(map(str, depths)), image, grid]


def _language_model(name: str) -> list[str]:
    """Make the row of a language model, with the bytes for tokens and the context that a recipe has of itself."""
    import torch

    import graticule
    from graticule.data import ByteTokenizer
    from graticule.tasks import TextRecipe

    tokens, context = ByteTokenizer().vocab_size, TextRecipe.context
    with torch.device("meta"):
        model = graticule.create_language_model(name, tokens, context=context)
    return [name, _size(model), *map(str, (model.embed_dim, len(model.blocks), tokens, context))]


def _size(model: nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M"
