"""Why LaPE helps, in a deep model: six choices of `lape_place` with 24 layers."""

from evidence.studies import EXACT, Study


def study() -> Study:
    """Compare six choices with 24 layers, at the trained size and on zoomed images."""
    choices = {
        "once, std 1": {"encoding": EXACT},
        "beside, std 1": {"encoding": EXACT, "joining": "lape(decomposition='w')"},
        "beside, LN chain": {"encoding": "learnable", "joining": "lape"},
        "once, std 0.2": {"encoding": "learnable(std=0.2)"},
        "beside, std 0.2": {"encoding": "learnable(std=0.2)", "joining": "lape(decomposition='w')"},
        "beside, LN chain, std 1": {"encoding": EXACT, "joining": "lape"},
    }
    return Study(
        question="In 24 layers, does LaPE help because of the place of the table, or its norms?",
        recipe="digits_small",
        choices=choices,
        base={"model_kwargs": ("depth=24",)},
        seeds=tuple(range(80, 85)),
        sizes=((40, 40),),
        limits="The last three choices were added when the other scores were known.",
        expects={
            **{"grid": "5 x 5", "layers": 24},
            **{name: {"std": float(name.split("std ")[1])} for name in choices if "std" in name},
            "beside, LN chain": {"std": 0.02, "joining": "lape(decomposition='layer_norm')"},
        },
        seconds=140,
    )
