"""LaPE against the default joining after 40 and 100 epochs."""

from evidence.studies import Study


def study() -> Study:
    """Compare 40 and 100 epochs; the study `extrapolation` has the same choices after 10."""
    return Study(
        question="Does the gain of LaPE remain when training is longer?",
        recipe="digits_small",
        choices={
            "learnable": {"encoding": "learnable"},
            "learnable, std 0.88": {"encoding": "learnable(std=1)"},
            "learnable, LaPE": {"encoding": "learnable", "joining": "lape"},
        },
        variants={f"{epochs} epochs": {"epochs": epochs} for epochs in (40, 100)},
        controls="'learnable, std 0.88' controls for the amplitude of the table.",
        follows="LaPE (Yu et al., 2023), whose models train for 300 epochs",
        limits="The learning rate decays over all epochs, so 40 epochs are not the beginning of 100. Runs of 10 epochs "
        "(`extrapolation`) were known when the tests were chosen.",
        expects={
            "grid": "5 x 5",
            **{f"{epochs} epochs": {"epochs": epochs} for epochs in (40, 100)},
            "learnable": {"std": 0.02},
            "learnable, std 0.88": {"std": 0.88},
            "learnable, LaPE": {"std": 0.02, "joining": "lape(decomposition='layer_norm')"},
        },
        seconds=163,
    )
