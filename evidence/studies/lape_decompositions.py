"""LaPE's Table 8 (Table 5 of its first version) on digits: the parts of the norm."""

from graticule.lab.studies.study import Study


def study() -> Study:
    """Compare the eight decompositions of the norm, and the raw table at the amplitude of a norm."""
    names = {
        "w": "w",
        "scalar w": "scalar_w",
        "channel w": "channel_w",
        "channel w + shift": "affine_w",
        "Norm(w)": "norm",
        "scalar Norm(w)": "scalar_norm",
        "channel Norm(w)": "channel_norm",
        "LN(w)": "layer_norm",
    }
    joined = {label: {"encoding": "learnable", "joining": f"lape(decomposition='{n}')"} for label, n in names.items()}
    raw = {"encoding": "learnable(std=1)", "joining": "lape(decomposition='w')"}
    default = {"encoding": "learnable"}
    choices = {"default": default, **joined, "default, std 1": {"encoding": "learnable(std=1)"}, "w, std 1": raw}
    return Study(
        question="Which part of LaPE's norm helps: the normalization, the affine part, or the amplitude?",
        recipe="digits_small",
        choices=choices,
        tests=(*((label, "default") for label in joined), ("LN(w)", "w, std 1"), ("w, std 1", "default, std 1")),
        controls="'w, std 1' adds the table to each layer without any norm, at the amplitude that a norm would give "
        "it.",
        follows="LaPE (Yu et al., 2023), Table 8, and its first version (2022), Table 5",
        limits="After 10 epochs the default has not converged (see `lape_epochs`), so this measures the speed of "
        "learning as much as the final accuracy. Only the whole norm, LN(w), is tested against the amplitude alone.",
        seconds=30,
    )
