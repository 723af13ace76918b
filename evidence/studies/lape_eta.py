"""Table 6 of LaPE's first version on digits: the number of first layers that are joined."""

from graticule.lab.studies.study import Study


def study() -> Study:
    """Compare LaPE sharing in the first 1 to 4 of 4 layers."""
    joined = {f"first {n}": {"encoding": "learnable", "joining": f"lape_sharing(layers={n})"} for n in (1, 2, 3, 4)}
    return Study(
        question="How many of the first layers need the position embedding?",
        recipe="digits_small",
        choices={"default": {"encoding": "learnable"}, **joined, "std 1": {"encoding": "learnable(std=1)"}},
        tests=(*((label, "default") for label in joined), ("first 4", "first 1"), ("first 4", "std 1")),
        controls="'std 1' is the default joining of a table that starts at the amplitude of a norm.",
        follows="LaPE, first version (Yu et al., 2022), Table 6",
        limits="After 10 epochs the default has not converged (see `lape_epochs`), so this measures the speed of "
        "learning as much as the final accuracy.",
        seconds=30,
    )
