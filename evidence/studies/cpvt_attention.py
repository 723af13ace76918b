"""CPVT's Figures 5 and 6 as numbers: how far patches attend without position, with a table, and with a PEG."""

from collections.abc import Iterator
from typing import Any

from graticule.lab.studies.study import Endpoint, Measured, Study

#: Its rows have the exact standard deviation 1, as those of a norm.
TABLE = "learnable(std=1.37)"

#: Test images whose attention is measured.
_IMAGES = 50


def measure(run: Any) -> Iterator[Measured]:
    """Measure the distance of attention in each layer, mean over heads and images, relative to that of all patches."""
    from graticule.analysis.attention import attention_summary
    from graticule.external.open_view import view_of

    data = run.data()
    images, _ = next(iter(data.eval_dataloader(data.size)))
    found = attention_summary(view_of(run.model(data, "last").eval()), images[:_IMAGES])
    for layer, heads, uniform in zip(found.layers, found.distance, found.uniform, strict=True):
        yield "attention distance", f"layer {layer + 1}", round(float(heads.mean() / uniform), 5)


def study() -> Study:
    """Compare the distance over which patches attend to each other in the second layer."""
    return Study(
        question="Do patches attend to their neighbors only if there is position, and does a PEG give it like a table?",
        recipe="digits_small",
        choices={"none": {"encoding": "none"}, "table": {"encoding": TABLE}, "PEG": {"encoding": "peg"}},
        base={"model_kwargs": ("depth=4", "fc_norm=false")},
        seeds=tuple(range(110, 118)),
        tests=(("table", "none"), ("PEG", "none"), ("PEG", "table")),
        endpoint=Endpoint(
            metric="attention distance", at="layer 2", label="distance of attention in layer 2 (1: all patches alike)"
        ),
        margin=0.05,
        decimals=3,
        measure=measure,
        controls="The distance is the mean over patches, heads and 50 test images, divided by that of a head that "
        "attends to all patches alike. 'table' has the exact standard deviation 1. Neighbors have similar content, so "
        "attention can be near without position, too. 'table' and 'PEG' are the runs of cpvt_stacks.",
        follows="CPVT (Chu et al., 2023), Figures 5 and 6",
        limits="The figures show single heads of one image in two of twelve layers, on 14 x 14 patches; here are "
        "5 x 5 patches and four layers. A mean over heads hides near heads beside far ones.",
        seconds=30,
    )
