"""LaPE against the default joining in models of different depths."""

from graticule.lab.studies.study import Study


def study() -> Study:
    """Compare the joinings with 6, 12 and 24 layers."""
    return Study(
        question="Does the gain of LaPE depend on the depth of the model?",
        recipe="digits_small",
        choices={
            "default": {"encoding": "learnable"},
            "default, std 1": {"encoding": "learnable(std=1)"},
            "LaPE sharing": {"encoding": "learnable", "joining": "lape_sharing"},
            "LaPE": {"encoding": "learnable", "joining": "lape"},
        },
        variants={f"{depth} layers": {"model_kwargs": (f"depth={depth}",)} for depth in (6, 12, 24)},
        seeds=(0, 1, 2),
        tests=(("LaPE", "default"), ("LaPE", "default, std 1"), ("LaPE", "LaPE sharing")),
        controls="'default, std 1' controls for the amplitude of the table.",
        follows="LaPE (Yu et al., 2023), section 3.3, which says that sharing is worse in larger models",
        limits="Each test is of one depth; whether the gain differs between depths is not tested. After 10 epochs this "
        "measures the speed of learning as much as the final accuracy. Seeds 3 and 4 were planned too, and not run.",
        seconds={"6 layers": 45, "12 layers": 90, "24 layers": 180},
    )
