"""Why LaPE helps: the table's place, its spread, or the norm; a factorial declared before its runs."""

from evidence.studies import EXACT, Study


def study() -> Study:
    """Compare places, spreads and norms of a learnable table, at the trained size and at two others in two modes."""
    choices = {
        "once, std 0.02": {"encoding": "learnable"},
        "once, std 0.2": {"encoding": "learnable(std=0.2)"},
        "once, std 1": {"encoding": EXACT},
        "every layer, std 1": {"encoding": EXACT, "joining": "shared"},
        "queries and keys, std 1": {"encoding": EXACT, "joining": "queries_keys"},
        "beside, std 0.2": {"encoding": "learnable(std=0.2)", "joining": "lape(decomposition='w')"},
        "beside, std 1": {"encoding": EXACT, "joining": "lape(decomposition='w')"},
        "beside, Norm": {"encoding": "learnable", "joining": "lape(decomposition='norm')"},
        "beside, LN": {"encoding": "learnable", "joining": "lape_sharing"},
        "beside, LN chain": {"encoding": "learnable", "joining": "lape"},
        "beside, LN chain, std 1": {"encoding": EXACT, "joining": "lape"},
    }
    return Study(
        question="Does LaPE help because of the place of the table, its amplitude, or its norm?",
        recipe="digits_small",
        choices=choices,
        seeds=tuple(range(40, 52)),
        sizes=((28, 28), (40, 40)),
        modes=("zoom", "canvas"),
        controls="'once, std 1' was the best of three at the trained size, in an earlier study with other seeds.",
        limits="'LN chain, std 1' was added when the other scores were known.",
        expects={
            **{"grid": "5 x 5", "layers": 4},
            **{name: {"std": float(name.split("std ")[1])} for name in choices if "std" in name},
            "beside, Norm": {"std": 0.02, "joining": "lape(decomposition='norm')"},
            "beside, LN": {"std": 0.02, "joining": "lape_sharing"},
            "beside, LN chain": {"std": 0.02, "joining": "lape(decomposition='layer_norm')"},
        },
        seconds=30,
    )
