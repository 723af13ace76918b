"""PosMLP's Figure 1 (f) on digits: the share of the data that a model is trained on."""

from graticule.lab.studies.study import Study


def study() -> Study:
    """Compare a dense matrix with Gaussians, on 500 to 4,000 digits, with the same number of steps."""
    return Study(
        question="Does mixing by relative position help more with less data?",
        recipe="digits_posmlp",
        choices={name: {"encoding": name.lower()} for name in ("SGU", "GGQPE")},
        variants={
            f"{count:,} digits": {"limit_train": count, "epochs": 15 * 4000 // count}
            for count in (500, 1000, 2000, 4000)
        },
        follows="PosMLP (Wang et al., 2022), Figure 1 (f)",
        limits="Each test is of one share of the data; whether the difference depends on the share is not tested. "
        "The runs have convolutions at PyTorch's initial values; they now start as in the authors' code.",
        seconds=60,
    )
