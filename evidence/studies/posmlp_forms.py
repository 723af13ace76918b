"""PosMLP's Tables 4, 6 and 7 at small scale: groups, forms of the Gaussian, the bias, and initial weights."""

from graticule.lab.studies.study import Study


def study() -> Study:
    """Compare GGQPE with forms of it that each differ in one respect, and with a dense matrix per group."""
    return Study(
        question="Which parts of PosMLP's gating unit help: groups, form of the Gaussians, bias, or initial values?",
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
        controls="GGQPE has 4 and 8 groups in its two stages and is initialized as in the authors' code, with "
        "Gaussians one patch wide and a bias of zero; the paper gives no initial values. 'spread start' has Gaussians "
        "of several widths and directions, and 'bias of one' starts near the identity, as gMLP's unit. 'dense groups' "
        "has as many groups, each with a dense matrix. The last test compares the gain from a learnable table without "
        "the bias with its gain with the bias.",
        follows="PosMLP (Wang et al., 2022), Tables 4, 6 and 7",
        limits="After 8 epochs this measures the speed of learning as much as the final accuracy. The runs "
        "have convolutions at PyTorch's initial values; they now start as in the authors' code.",
        seconds=30,
    )
