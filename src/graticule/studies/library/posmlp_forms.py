"""PosMLP's Tables 4, 6 and 7 in small: groups, forms of the Gaussian, the bias, and how the weights start."""

from graticule.studies.study import Study


def study() -> Study:
    """GGQPE against forms of it that each change one thing, and against a dense matrix per group."""
    return Study(
        question="Which parts of PosMLP's gating unit help: groups, the form of its Gaussians, its bias, or its start?",
        recipe="digits_posmlp",
        choices={
            "GGQPE": {"encoding": "ggqpe"},
            "1 group": {"encoding": "gqpe"},
            "4 groups in both stages": {"encoding": "ggqpe", "model_kwargs": ("groups=[4,4]",)},
            "8 groups in both stages": {"encoding": "ggqpe", "model_kwargs": ("groups=[8,8]",)},
            "alpha I": {"encoding": "ggqpe(form='alpha_released')"},
            "Gamma": {"encoding": "ggqpe(form='gamma_released')"},
            "fixed center": {"encoding": "ggqpe(shift=False)"},
            "no bias": {"encoding": "ggqpe(bias=False)"},
            "table": {"encoding": "ggqpe + learnable"},
            "no bias, table": {"encoding": "ggqpe(bias=False) + learnable"},
            "spread start": {"encoding": "ggqpe(start='spread')"},
            "bias of one": {"encoding": "ggqpe(bias_start=1.0)"},
            "dense groups": {"encoding": "gsgu"},
        },
        base={"epochs": 8},
        tests=(
            *(
                ("GGQPE", name)
                for name in ("1 group", "4 groups in both stages", "8 groups in both stages", "alpha I", "Gamma")
            ),
            ("GGQPE", "fixed center"),
            ("GGQPE", "no bias"),
            ("no bias, table", "no bias"),
            ("spread start", "GGQPE"),
            ("bias of one", "GGQPE"),
            ("GGQPE", "dense groups"),
        ),
        interactions=(("no bias, table", "no bias", "table", "GGQPE"),),
        controls="GGQPE has 4 and 8 groups in its two stages and starts as the authors' code draws it, each Gaussian "
        "one patch wide and the bias zero; the paper prints no initial values. 'spread start' has Gaussians of several "
        "widths and directions, and 'bias of one' starts near the identity, as gMLP's unit. 'dense groups' has as many "
        "groups, each with a dense matrix. The last test is of what a learnable table adds without the bias against "
        "what it adds with it.",
        follows="PosMLP (Wang et al., 2022), Tables 4, 6 and 7",
        seconds=30,
    )
