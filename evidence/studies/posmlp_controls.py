"""PosMLP's Table 1 and Figure 1 (f) against a dense matrix with the norm, the start and the groups of GGQPE."""

from typing import Any

from graticule.lab.studies.study import Study

#: Number of digits -> epochs with the same number of steps.
SHARES = {"500 digits": (500, 120), "4,000 digits": (4000, 15)}


def study() -> Study:
    """Compare GGQPE with dense matrices that start as it does, on two shares of the data, in the same steps."""
    units: dict[str, dict[str, Any]] = {
        "GGQPE": {"encoding": "ggqpe"},
        "dense": {"encoding": "gsgu(gaussian=True)", "model_kwargs": ("gate_norm=false",)},
    }
    return Study(
        question="Does mixing by relative position beat a dense matrix of the same norm and start, and more with few "
        "images?",
        recipe="digits_posmlp",
        choices={
            f"{name}, {share}": {**unit, "limit_train": count, "epochs": epochs}
            for share, (count, epochs) in SHARES.items()
            for name, unit in units.items()
        },
        seeds=tuple(range(100, 105)),
        tests=tuple((f"GGQPE, {share}", f"dense, {share}") for share in SHARES),
        interactions=(("GGQPE, 500 digits", "dense, 500 digits", "GGQPE, 4,000 digits", "dense, 4,000 digits"),),
        controls="'dense' has a free matrix for each of GGQPE's groups, which starts as GGQPE's Gaussians, a bias that "
        "starts at zero, and no norm in the gating unit, as GGQPE; only what is learned differs.",
        follows="PosMLP (Wang et al., 2022), Table 1 and Figure 1 (f)",
        limits="One window covers a whole stage, and the convolutions of the stem and between the stages give position "
        "to both. The runs have convolutions at PyTorch's initial values; they now start as in the authors' code.",
        expects={
            **{"grid": (8, 8), "windows": "8 x 8, 4 x 4", "depth": 6},
            **{
                f"{name}, {share}": {"images": count, "epochs": epochs, "encoding": encoding}
                for share, (count, epochs) in SHARES.items()
                for name, encoding in (("GGQPE", "ggqpe(start='released')"), ("dense", "gsgu(std=1e-06)"))
            },
        },
        seconds=50,
    )
