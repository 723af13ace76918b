"""`python -m evidence.gallery_page` writes the tables of docs/encodings.md, and the small pictures in them."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import torch
from matplotlib.figure import Figure

from evidence.names import replace_table, summary
from graticule.backbones.registry import create_model
from graticule.lab.studies.matrix import GROUPS, group_of, ordered
from graticule.lab.studies.tables import markdown
from graticule.position.position import ENCODINGS

DOCS = Path(__file__).parents[1] / "docs"
PICTURES = DOCS / "figures" / "encodings"
sys.path.append(str(DOCS / "_ext"))
#: Encoding -> when to take it; others are described by the first line of their class.
USES = {
    "coordinates": "a table should be a function of coordinates that are shifted and scaled at random in training",
    "cropped": "images have many sizes and shapes: training samples random parts of one large table, as in RADIO",
    "factorized": "a learned table should have few parameters: one vector per row and one per column",
    "fourier": "a smooth function of the coordinates should be learned, for any grid",
    "learnable": "images have one size; start it at `std=1` or join it by `lape`",
    "sinusoidal_1d": "you need the encoding of the first transformer as a reference; it ignores that an image has rows",
    "sinusoidal_2d": "nothing should be learned, and a vector is needed for each token of any grid",
    "windowed": "attention has windows, and images have many sizes: SAM 2 and Hiera",
    "alibi": "near patches should count more and nothing may be learned; it does not tell left from right",
    "bucketed_bias": "far displacements may share numbers, as in T5",
    "causal": "tokens must not attend to later ones; it is added to another encoding",
    "continuous_bias": "windows are larger after training than in it, as in Swin V2",
    "decomposed": "the bias should depend on the query, with few products, as in SAM",
    "fire": "a function of the distance, relative to the largest one, should be learned",
    "gpsa": "attention should start as a convolution and learn how much it stays one; it kept most on larger canvases",
    "gqpe_bias": "each head should look at a Gaussian around a displacement that it learns",
    "irpe": "queries, keys or attention weights should meet vectors of displacements",
    "kerple": "near patches should count more, at a rate that each head learns",
    "mirrored_bias": "left and right should count the same, with a quarter of the numbers of `relative_bias` (LeViT)",
    "mlp_bias": "a function of the displacement should be learned, without a table",
    "relative_bias": "attention has windows of one size, as in Swin",
    "sandwich": "attention should decay with the distance and nothing may be learned",
    "shared_mlp_bias": "all layers may share one `mlp_bias`",
    "shared_relative_bias": "all layers may share one `relative_bias`",
    "shaw": "the bias should depend on the query, for displacements up to `clip`",
    "liere": "whole rotations of channels should be learned",
    "mrope": "images, volumes and texts pass through one model, as in Qwen2-VL",
    "pope": "content should decide magnitudes only, and position angles only",
    "rope": "images get larger: `preset='dinov3'` where objects grow with them; or you load weights that rotate",
    "rope_1d": "tokens are a text; on images it is a reference that ignores rows",
    "rope_golden_gate": "directions between rows and columns should count as much as these",
    "rope_mixed": "directions and frequencies should be learned for each head",
    "ggqpe": "a gated MLP should mix near patches, with few parameters at any size (PosMLP)",
    "global_filter": "tokens should be mixed by filters of frequencies (GFNet)",
    "glrpe": "a gated MLP should mix by displacement, differently in each group of channels",
    "gqpe": "as `ggqpe`, with one Gaussian for all channels",
    "gsgu": "dense matrices should mix, one for each group of channels",
    "lrpe": "a gated MLP should mix by displacement",
    "lrpe_m": "a dense matrix and displacements should mix together",
    "sgu": "a dense matrix should mix, as in gMLP, and images have one size",
    "token_mlp": "an MLP over the tokens should mix, as in MLP-Mixer, and images have one size",
    "convolutional_projection": "queries, keys and values should see their neighbors, as in CvT",
    "log_n": "images get larger: it keeps attention as sharp as in training; it is added to another encoding",
    "peg": "images get larger with more content in them; it also shows the border to a model without a table",
    "none": "you need the control: what does position add at all?",
}


def gallery_table(group: str, docs: Path = DOCS) -> str:
    """Return the table of a group of encodings: picture, when to take it, cost, other sizes."""
    lines = [["map", "encoding", "take it if", "parameters", "other sizes"]]
    for name in ordered():
        if group_of(name) == group:
            drawn = (docs / "figures" / "encodings" / f"{name}.png").exists()
            picture = f"![Map of {name} at the center](figures/encodings/{name}.png)" if drawn else ""
            use = USES.get(name) or summary(ENCODINGS[name])
            lines.append([picture, f"[`{name}`](gallery/{name}.md)", use, f"{parameters(name):,}", other_sizes(name)])
    return markdown(lines) + "\n"


@cache
def parameters(name: str) -> int:
    """Return the learned parameters of an encoding in DeiT-Ti, or in gMLP-S if it mixes tokens."""
    backbone = "gmlp_s16_224" if group_of(name) == "token mixing" else "deit_tiny_patch16_224"
    with torch.device("meta" if name != "liere" else "cpu"):
        position = create_model(backbone, encoding=name).position
        return sum(parameter.numel() for parameter in position.parameters() if parameter.requires_grad)


def other_sizes(name: str) -> str:
    """Return how an encoding gets its position for another grid than that of training."""
    kind = ENCODINGS[name]
    if "resampler" in kind.option_types() or getattr(kind, "resampled", False):
        return "resampled"
    return "any" if group_of(name) == "other" else "computed"


def thumbnail(name: str) -> Figure | None:
    """Draw the map of one head at the center of 7 x 7 patches; None for an encoding without maps."""
    import gallery
    import says

    position, _ = says.build(name)
    maps = says.says_at_center(name, gallery.GRIDS[0], position)
    if not maps:
        return None
    (drawn, *_) = says.common_scale(maps)
    figure = Figure(figsize=(0.64, 0.64))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.imshow(drawn.values, cmap=drawn.colors, vmin=drawn.lowest, vmax=drawn.highest)
    ax.plot(3, 3, "o", markersize=3, mfc="none", mec="white", mew=2)
    ax.plot(3, 3, "o", markersize=3, mfc="none", mec="black", mew=0.8)
    ax.set_axis_off()
    return figure


def write_page(docs: Path = DOCS) -> None:
    """Write the pictures and the tables."""
    PICTURES.mkdir(exist_ok=True)
    for name in ordered():
        if (figure := thumbnail(name)) is not None:
            figure.savefig(PICTURES / f"{name}.png", dpi=100, metadata={"Software": None})
    for group, _, _ in GROUPS:
        replace_table(docs / "encodings.md", f"<!-- gallery {group} -->", gallery_table(group, docs))


if __name__ == "__main__":
    write_page()
