"""PosMLP's Tables 1, 5 and 6 on digits: windows, groups with one norm and one start, and a Gaussian's width."""

from graticule.lab.studies.study import Study


def study() -> Study:
    """Compare windows of GGQPE, isotropic Gaussians, and one group or several, of Gaussians or of dense matrices."""
    dense = {"model_kwargs": ("gate_norm=false",)}
    return Study(
        question="Do windows that cover the stage help, and a width that is learned, and groups, at one start?",
        recipe="digits_posmlp",
        choices={
            "GGQPE": {"encoding": "ggqpe"},
            "windows of 4 x 4": {"encoding": "ggqpe", "model_kwargs": ("windows=[4,4]",)},
            "windows of 2 x 2": {"encoding": "ggqpe", "model_kwargs": ("windows=[2,2]",)},
            "isotropic": {"encoding": "ggqpe(form='alpha')"},
            "isotropic, fixed width": {"encoding": "ggqpe(form='alpha_released')"},
            "GQPE": {"encoding": "gqpe"},
            "dense, one group, noise 0.02": {"encoding": "sgu(gaussian=True)", **dense},
            "dense": {"encoding": "gsgu(gaussian=True)", **dense},
        },
        seeds=tuple(range(160, 166)),
        tests=(
            ("GGQPE", "windows of 4 x 4"),
            ("windows of 4 x 4", "windows of 2 x 2"),
            ("GGQPE", "isotropic"),
            ("isotropic", "isotropic, fixed width"),
            ("GGQPE", "GQPE"),
            ("GQPE", "dense, one group, noise 0.02"),
            ("GGQPE", "dense"),
        ),
        controls="All units start as the Gaussians of the authors' code, with a bias of zero and no norm in the gating "
        "unit, except for 'noise 0.02', to which PosMLP's default noise of this std is added. Windows of 4 x 4 are "
        "smaller than the first stage only.",
        follows="PosMLP (Wang et al., 2022), Tables 1, 5 and 6",
        limits="Convolutions of the stem and between the stages carry content between windows. LRPE and GLRPE have "
        "tables without a width, which cannot start as Gaussians of this form, and are left out. The "
        "runs have convolutions at PyTorch's initial values; they now start as in the authors' code.",
        expects={
            **{"grid": (8, 8), "windows": "8 x 8, 4 x 4", "images": 4_000},
            "GGQPE": {"encoding": "ggqpe(start='released', form='gamma_gamma_t')"},
            "dense": {"encoding": "gsgu(std=1e-06, gaussian=True)"},
            "dense, one group, noise 0.02": {"encoding": "sgu(std=0.02, gaussian=True)"},
            "windows of 4 x 4": {"windows": (4, 4)},
            "windows of 2 x 2": {"windows": (2, 2)},
        },
        seconds=45,
    )
