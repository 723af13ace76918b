"""The coefficients of LaPE's Eq. 6 and 7 on real tokens: the share of position in each layer's input."""

from collections.abc import Iterator
from typing import Any

from graticule.lab.studies.study import Endpoint, Measured, Study


def measure(run: Any) -> Iterator[Measured]:
    """Measure the coefficients of every layer over the first 200 test images: means over tokens and images."""
    import torch

    from graticule.analysis.correlation import norm_coefficients

    data = run.data()
    images, _ = next(iter(data.eval_dataloader(run.recipe().img_size)))
    found = norm_coefficients(run.model(data, "last"), images[:200])
    for layer in range(len(found.tokens)):
        for name in ("tokens", "position", "shift"):
            value = getattr(found, name)[layer].mean(dtype=torch.float64)
            yield f"lambda_{name}", f"layer {layer + 1}", round(float(value), 6)


def study() -> Study:
    """Compare the default joining at three amplitudes; with LaPE the residual stream has no position for Eq. 6."""
    choices = {"std 0.02": {"encoding": "learnable"}}
    choices |= {f"std {std}": {"encoding": f"learnable(std={std})"} for std in (0.2, 1)}
    return Study(
        question="With the default joining, what share of the normalized input of attention is position?",
        recipe="digits_small",
        choices={**choices, "sinusoidal 2-D": {"encoding": "sinusoidal_2d"}},
        endpoint=Endpoint(
            metric="lambda_position",
            at="layer 1",
            minus="layer 4",
            label="lambda_position in layer 1 minus that in layer 4",
        ),
        decimals=3,
        controls="lambda_position is the standard deviation of position divided by that of the sum of tokens and "
        "position (Eq. 7). The coefficients of tokens and position can therefore sum to more than 1.",
        follows="LaPE (Yu et al., 2023), Eq. 6 and 7",
        seconds=30,
        measure=measure,
    )
