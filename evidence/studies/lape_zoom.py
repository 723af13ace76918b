"""Accuracy of LaPE on zoomed images: a finding of `amplitude` and `extrapolation`, tested again with other seeds."""

from graticule.lab.studies.study import Endpoint, Study


def study() -> Study:
    """Compare a learnable table of two amplitudes and LaPE, trained at 20 pixels and tested at 28 and 40."""
    return Study(
        question="Does LaPE keep more of its accuracy on zoomed images than learnable tables of two amplitudes?",
        recipe="digits_small",
        choices={
            "std 0.02": {"encoding": "learnable"},
            "std 1": {"encoding": "learnable(std=1)"},
            "LaPE": {"encoding": "learnable", "joining": "lape"},
        },
        seeds=tuple(range(10, 18)),
        sizes=((28, 28), (40, 40)),
        tests=(("LaPE", "std 0.02"), ("LaPE", "std 1")),
        endpoint=Endpoint(metric="top1", at="zoom 40", minus="trained"),
        controls="'std 1' is a table that starts at the amplitude of a norm. The study `amplitude` showed the "
        "difference with seeds 0 to 4, but was not designed to test it; this study tests it with eight other seeds.",
        limits="The digits are those of `amplitude`, in training and test: other seeds change the initial weights and "
        "the order of the batches, not the images. Zoomed, a digit is up to twice as large as any in training.",
        seconds=30,
    )
