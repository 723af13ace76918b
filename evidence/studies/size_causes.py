"""Causes of lower accuracy on four times as many tokens: their number, their content, or the values of position."""

from collections.abc import Iterator
from typing import Any

from graticule.lab.studies.study import Endpoint, Measured, Study


def measure(run: Any) -> Iterator[Measured]:
    """Measure the parts of the difference in top-1 from 20 to 40 pixels, zoomed, and the effects of the controls."""
    from graticule.lab.tasks.parts.image_scores import size_causes

    data = run.data()
    found = size_causes(run.model(data, "last"), data, (40, 40), progress=False)
    yield "change", "whole", found.top1[1] - found.top1[0]
    for name, part in {**found.parts, **found.controls}.items():
        yield "change", name, round(part.top1, 4)


def study() -> Study:
    """Compare kinds of encodings in runs of digits_small, trained on 5 x 5 tokens and tested on 10 x 10."""
    return Study(
        question="Why does accuracy change at larger sizes: more tokens, other content, or other position values?",
        recipe="digits_small",
        choices={
            "none": {"encoding": "none"},
            "learnable": {"encoding": "learnable"},
            "learnable, LaPE": {"encoding": "learnable", "joining": "lape"},
            "sinusoidal 2-D": {"encoding": "sinusoidal_2d"},
            "relative bias": {"encoding": "relative_bias"},
            "rotary": {"encoding": "rope"},
        },
        endpoint=Endpoint(metric="change", at="values", label="change in top-1 by the values of position (points)"),
        tests=tuple(
            (name, "none") for name in ("learnable", "learnable, LaPE", "sinusoidal 2-D", "relative bias", "rotary")
        ),
        controls="The whole change is tokens + content + values, in points of top-1. For 'tokens', each token is "
        "repeated with its position; for 'content', the patches are those of the zoomed image; for 'values', position "
        "is computed for the larger grid. The controls change the zoomed evaluation: log_n makes attention as sharp "
        "as in training, bilinear resamples tables bilinearly, canvas keeps the scale of the digit, and crop tests "
        "the middle of the zoomed image alone.",
        limits="The parts depend on the order in which they are changed. Without an encoding, position has no "
        "values, so their part is zero. The crops were measured with seeds 2 to 4 alone.",
        seconds=40,
        measure=measure,
    )
