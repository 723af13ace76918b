"""PosMLP's Table 1 on digits: gating units that mix the tokens of a gated MLP."""

from graticule.lab.studies.study import Study


def study() -> Study:
    """Compare six gating units in gMLP and in PosMLP."""
    units = {"SGU": "sgu", "LRPE": "lrpe", "LRPE-M": "lrpe_m", "GLRPE": "glrpe", "GQPE": "gqpe", "GGQPE": "ggqpe"}
    return Study(
        question="Does a gating unit that mixes by relative position beat a dense matrix?",
        recipe="digits_posmlp",
        choices={name: {"encoding": encoding} for name, encoding in units.items()},
        variants={"gMLP": {"model": "gmlp_nano_patch4_28", "img_size": (28, 28)}, "PosMLP": {}},
        tests=(*((name, "SGU") for name in list(units)[1:]), ("GGQPE", "GQPE")),
        follows="PosMLP (Wang et al., 2022), Tables 1 and 4",
        limits="The runs of PosMLP have convolutions at PyTorch's initial values; they now start as in the authors' "
        "code.",
        seconds=90,
    )
