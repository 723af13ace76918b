"""Initial amplitude of a learnable table, with the default joining and with LaPE."""

from graticule.lab.studies.study import Study


def study() -> Study:
    """Compare three standard deviations of the initial table with two joinings."""
    encodings = {"std 0.02": "learnable", "std 0.2": "learnable(std=0.2)", "std 1": "learnable(std=1)"}
    choices = {
        f"{name}{label}": {"encoding": encoding, "joining": joining}
        for label, joining in (("", "default"), (", LaPE", "lape"))
        for name, encoding in encodings.items()
    }
    return Study(
        question="How does the initial amplitude of a learnable table affect accuracy?",
        recipe="digits_small",
        choices=choices,
        sizes=((28, 28), (40, 40)),
        tests=(
            ("std 0.2", "std 0.02"),
            ("std 1", "std 0.02"),
            *((f"std {std}, LaPE", f"std {std}") for std in (0.02, 0.2, 1)),
            ("std 0.02, LaPE", "std 1"),
        ),
        limits="After 10 epochs the table of std 0.02 has not converged (see `lape_epochs`), so this measures the "
        "speed of learning as much as the final accuracy. Zoomed images are not tested here, but in `lape_zoom`.",
        seconds=30,
    )
