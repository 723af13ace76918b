"""LaPE against the default joining after short and long training."""

from graticule.lab.studies.study import Study


def study() -> Study:
    """Compare 10, 40 and 100 epochs; the runs of 10 and 40 are also runs of `lape_joinings`."""
    return Study(
        question="Does the gain of LaPE remain when training is longer?",
        recipe="digits_small",
        choices={
            "learnable": {"encoding": "learnable"},
            "learnable, std 0.88": {"encoding": "learnable(std=1)"},
            "learnable, LaPE": {"encoding": "learnable", "joining": "lape"},
        },
        variants={f"{epochs} epochs": {"epochs": epochs} for epochs in (10, 40, 100)},
        tests=(
            ("learnable, LaPE", "learnable"),
            ("learnable, LaPE", "learnable, std 0.88"),
            ("learnable, std 0.88", "learnable"),
        ),
        controls="'learnable, std 0.88' controls for the amplitude of the table.",
        follows="LaPE (Yu et al., 2023), whose models train for 300 epochs",
        limits="The learning rate decays over all epochs of a run, so a run of 10 epochs is not the beginning of "
        "one of 40. The runs of 10 epochs are those of extrapolation, which the page of choices adjusts with others, "
        "and were known when the tests were chosen. Whether the gain differs between lengths is not tested.",
        expects={
            "grid": (5, 5),
            **{f"{epochs} epochs": {"epochs": epochs} for epochs in (10, 40, 100)},
            "learnable": {"std": 0.02},
            "learnable, std 0.88": {"std": 0.88},
            "learnable, LaPE": {"std": 0.02, "joining": "lape(decomposition='layer_norm')"},
        },
        seconds={"10 epochs": 25, "40 epochs": 95, "100 epochs": 230},
    )
