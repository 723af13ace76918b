"""`graticule models`."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from graticule.commands.options import parse, print_table


@dataclass
class Models:
    """List the backbones with their sizes, and what a recipe's options can be."""

    pattern: tyro.conf.Positional[str] = "*"
    """names to list, as in a shell: deit_*"""


def run(arguments: list[str]) -> int:
    """List what can be chosen."""
    options = parse(Models, "models", arguments)
    import torch

    import graticule
    from graticule.data import list_datasets
    from graticule.recipes import list_recipes

    names = graticule.list_models(options.pattern)
    if not names:
        raise ValueError(
            f"no model is named like {options.pattern!r}; the models are {', '.join(graticule.list_models())}."
        )
    rows = []
    for name in names:
        with torch.device("meta"):
            model = graticule.create_model(name)
        count = sum(p.numel() for p in model.parameters())
        dims = getattr(model, "embed_dims", (getattr(model, "embed_dim", 0),))
        depths = getattr(model, "depths", None) or (len(model.blocks),)
        image, grid = ("x".join(map(str, sides)) for sides in (model.img_size, model.grid.shape))
        shape = ("-".join(map(str, dims)), "-".join(map(str, depths)))
        rows.append([name, f"{count / 1e6:.2f} M", *shape, image, grid])
    print_table(("model", "parameters", "dim", "layers", "image", "patches"), rows)
    print(f"\nencodings       {', '.join(graticule.list_encodings())} (several: learnable+peg)")
    print(f"joinings        {', '.join(graticule.list_joinings())}")
    print(f"decompositions  {', '.join(graticule.list_decompositions())} (of LaPE's norm)")
    print(f"data sets       {', '.join(list_datasets())}")
    print("recipes")
    for name, about in list_recipes().items():
        print(f"  {name:20s} {about}")
    return 0
