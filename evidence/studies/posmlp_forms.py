"""PosMLP's Tables 6 and 7 on digits: forms of the Gaussian, the bias, and a learnable table."""

from evidence.studies import Study


def study() -> Study:
    """Compare GGQPE with forms of it that each differ in one respect."""
    return Study(
        question="Which parts of PosMLP's gating unit help: the form of the Gaussians, or the bias?",
        recipe="digits_posmlp",
        choices={
            "GGQPE": {"encoding": "ggqpe"},
            "alpha I": {"encoding": "ggqpe(form='alpha_released')"},
            "Gamma": {"encoding": "ggqpe(form='gamma_released')"},
            "no bias": {"encoding": "ggqpe(bias=False)"},
            "table": {"encoding": "ggqpe + learnable"},
            "no bias, table": {"encoding": "ggqpe(bias=False) + learnable"},
        },
        base={"epochs": 8},
        seeds=tuple(range(700, 705)),
        controls="All models start as in the authors' code, with Gaussians one patch wide and a bias of zero. "
        "The Gaussians of 'alpha I' stay one patch wide. A learnable table is added before the first stage.",
        follows="PosMLP (Wang et al., 2022), Tables 6 and 7",
        limits="Convolutions in the stem and between the stages give all models position information.",
        expects={
            **{"grid": "8 x 8", "windows": "8 x 8, 4 x 4", "epochs": 8, "images": 4000},
            "GGQPE": {"encoding": "ggqpe(form='gamma_gamma_t', shift=True, start='released', bias=True)"},
            "no bias": {"encoding": "ggqpe(bias=False)"},
        },
        seconds=25,
    )
