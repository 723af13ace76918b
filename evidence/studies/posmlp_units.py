"""PosMLP's Table 1 on digits: the six gating units, each with the initial values of the authors' code."""

from evidence.studies import Study


def study() -> Study:
    """Compare six gating units in PosMLP."""
    units = {"SGU": "sgu", "LRPE": "lrpe", "LRPE-M": "lrpe_m", "GLRPE": "glrpe", "GQPE": "gqpe", "GGQPE": "ggqpe"}
    return Study(
        question="Does a gating unit that mixes by relative position beat a dense matrix?",
        recipe="digits_posmlp",
        choices={name: {"encoding": encoding} for name, encoding in units.items()},
        base={"epochs": 8},
        seeds=tuple(range(700, 705)),
        controls="The dense matrix of SGU and the tables of LRPE and GLRPE start with a standard deviation of 0.02, a "
        "bias of zero and a norm in the gating unit; the dense matrix of LRPE-M starts near zero. GQPE and GGQPE start "
        "as Gaussians, without a norm: `posmlp_mixing` gives a dense matrix the same start.",
        follows="PosMLP (Wang et al., 2022), Table 1",
        limits="The rows of Table 1 with gMLP are not run. By mistake, the authors' code starts the tables "
        "of LRPE at zero. We draw them at random, as the code intends.",
        expects={
            **{"grid": "8 x 8", "windows": "8 x 8, 4 x 4", "epochs": 8, "images": 4000},
            **{name: {"std": 0.02} for name in ("SGU", "LRPE", "GLRPE")},
            "GGQPE": {"encoding": "ggqpe(form='gamma_gamma_t', shift=True, start='released')"},
        },
        seconds=25,
    )
