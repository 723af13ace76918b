"""PosMLP's Tables 1, 5 and 6 and Figure 1 (f) on digits: windows, groups, widths, and fewer images, at one start."""

from evidence.studies import Study


def study() -> Study:
    """Compare windows of GGQPE, isotropic Gaussians, one group or several, and dense matrices."""
    dense = {"encoding": "gsgu(gaussian=True)", "model_kwargs": ("gate_norm=false",)}
    few = {"limit_train": 500, "epochs": 120}  # as many steps as 4,000 digits in 15 epochs
    return Study(
        question="Does mixing by relative position beat a dense matrix of the same norm and start, and more so "
        "with few images? Do larger windows, a learned width and groups help?",
        recipe="digits_posmlp",
        choices={
            "GGQPE": {"encoding": "ggqpe"},
            "dense": dense,
            "GGQPE, 500 digits": {"encoding": "ggqpe", **few},
            "dense, 500 digits": {**dense, **few},
            "windows of 4 x 4": {"encoding": "ggqpe", "model_kwargs": ("windows=[4,4]",)},
            "windows of 2 x 2": {"encoding": "ggqpe", "model_kwargs": ("windows=[2,2]",)},
            "isotropic": {"encoding": "ggqpe(form='alpha')"},
            "isotropic, fixed width": {"encoding": "ggqpe(form='alpha_released')"},
            "GQPE": {"encoding": "gqpe"},
            "dense, one group": {**dense, "encoding": "sgu(std=1e-06, gaussian=True)"},
        },
        seeds=tuple(range(500, 506)),
        controls="All units start as the Gaussians of the authors' code, with a bias of zero and no norm in "
        "the gating unit. 'dense' has a free matrix for each of GGQPE's groups. Windows of 4 x 4 are smaller than "
        "the grid in the first stage only.",
        follows="PosMLP (Wang et al., 2022), Tables 1, 5 and 6 and Figure 1 (f)",
        limits="Convolutions in the stem and between the stages give all models position information and "
        "move content between windows.",
        expects={
            **{"grid": "8 x 8", "windows": "8 x 8, 4 x 4"},
            **{name: {"epochs": 120, "images": 500} for name in ("GGQPE, 500 digits", "dense, 500 digits")},
            "GGQPE": {
                "encoding": "ggqpe(form='gamma_gamma_t', shift=True, start='released')",
                "epochs": 15,
                "images": 4000,
            },
            "dense": {"encoding": "gsgu(std=1e-06, gaussian=True)", "model": "posmlp_nano_32", "gate_norm": False},
            "dense, one group": {
                "encoding": "sgu(std=1e-06, gaussian=True)",
                "model": "posmlp_nano_32",
                "gate_norm": False,
            },
            "windows of 4 x 4": {"windows": "4 x 4"},
            "windows of 2 x 2": {"windows": "2 x 2"},
            "isotropic": {"encoding": "ggqpe(start='released', shift=True)"},
        },
        seconds=45,
    )
