"""LaPE's correlation figures as numbers: from 1-D to 2-D and from local to global, in four families."""

from collections.abc import Iterator
from typing import Any

from graticule.lab.studies.study import Endpoint, Measured, Study

#: Number of untrained models of the same shape that each trained one is tested against: p is at least 1 / 40.
_UNTRAINED = 39


def measure(run: Any) -> Iterator[Measured]:
    """Measure the correlations of the first stage: of the first and last layer, and over the layers with p."""
    import math

    from graticule.analysis.correlation import position_correlations

    found = position_correlations(run.model(run.data(), "last"), None, 0, _UNTRAINED)
    by_layer = {"two-dimensionality": found.two_dimensionality, "reach": found.reach}
    values = {(name, at): of[n] for name, of in by_layer.items() for at, n in (("first layer", 0), ("last layer", -1))}
    over = {"range of reach": found.reach_range, "p (untrained)": found.p_value, "hierarchy": found.hierarchy}
    for (metric, at), value in (values | {(name, "over layers"): one for name, one in over.items()}).items():
        if math.isfinite(value):
            yield metric, at, round(float(value), 6)


def study() -> Study:
    """Compare 1-D sinusoids and a learnable table in small models of the families whose correlations LaPE draws."""
    return Study(
        question="Does LaPE make correlations of 1-D sinusoids two-dimensional, and do they go from local to global?",
        recipe="digits_small",
        choices={
            "sinusoidal 1-D": {"encoding": "sinusoidal_1d"},
            "sinusoidal 1-D, LaPE": {"encoding": "sinusoidal_1d", "joining": "lape"},
            "learnable, LaPE": {"encoding": "learnable", "joining": "lape"},
        },
        base={"epochs": 4},
        variants={
            "DeiT": {"img_size": (28, 28)},
            "T2T-ViT": {
                "model": "t2t_vit_7",
                "img_size": (80, 80),
                "model_kwargs": ("depth=4", "embed_dim=64", "num_heads=2", "token_dim=8", "mlp_ratio=2"),
            },
            "Swin": {
                "model": "swin_tiny_patch4_window7_224",
                "img_size": (32, 32),
                "model_kwargs": ("embed_dim=32", "depths=[4,2]", "num_heads=[1,2]", "window_size=4"),
            },
            "CeiT": {
                "model": "ceit_tiny_patch16_224",
                "img_size": (80, 80),
                "model_kwargs": ("depth=4", "embed_dim=64", "num_heads=2"),
            },
        },
        seeds=(0, 1, 2),
        tests=(("sinusoidal 1-D, LaPE", "sinusoidal 1-D"),),
        endpoint=Endpoint(
            metric="two-dimensionality", at="last layer", label="two-dimensionality of the last layer (0 to 1)"
        ),
        decimals=3,
        described=("reach", "range of reach", "p (untrained)", "hierarchy"),
        controls="Two-dimensionality is 1 if vertical neighbors are as similar as horizontal ones, and 0 if only one "
        "axis is encoded. Where neither exceeds all pairs beyond chance it is undefined; runs before 2026-11-23 "
        "recorded the ratio there too, so the row of the learnable table, which has little structure after four "
        "epochs, can be a ratio of noise. Reach is the mean distance in patches over which the positions of a "
        "layer are similar; its range over the layers is relative to the reach of a uniform map. p (untrained) is "
        "the share of 40 models, this one and 39 untrained ones of the same shape, whose range is at least as large; "
        "hierarchy is the rank correlation of reach with depth, 1 from local to global.",
        follows="LaPE (Yu et al., 2023), Figures 3 and 4",
        limits="The models are trained for four epochs on digits, with grids of 5 x 5 to 8 x 8 and four layers. Only "
        "the first stage of Swin is measured. Figure 3 has the second of seven layers of a T2T-ViT that was trained on "
        "ImageNet, and Figure 4 a DeiT; the other families extend these claims.",
        seconds={"DeiT": 25, "T2T-ViT": 25, "Swin": 22, "CeiT": 60},
        measure=measure,
    )
