"""CPVT's Tables 3, 7 and 14 at small scale: stacks of convolutions, kernels and several PEGs, and its pooling."""

from evidence.studies import EXACT, Study


def study() -> Study:
    """Compare PEGs of several kernels, layers and places with each other and with a table of a norm's spread."""
    places = "peg(places=[-1, 0, 1, 2])"
    return Study(
        question="Do larger, deeper or more PEGs help, and does average pooling help several PEGs more than a table?",
        recipe="digits_small",
        choices={
            "table": {"encoding": EXACT},
            "table, GAP": {"encoding": EXACT, "global_pool": "avg"},
            "PEG": {"encoding": "peg"},
            "PEG, 7 x 7": {"encoding": "peg(kernel=7)"},
            "four depth-wise layers": {"encoding": "peg(layers=4)"},
            "four separable layers": {"encoding": "peg(layers=4, convolution='separable')"},
            "four dense layers": {"encoding": "peg(layers=4, convolution='dense')"},
            "four PEGs": {"encoding": places},
            "four PEGs, GAP": {"encoding": places, "global_pool": "avg"},
        },
        base={"model_kwargs": ("depth=4", "fc_norm=false")},
        seeds=tuple(range(110, 118)),
        controls="'table' has the standard deviation of a normalized table. A stack is one PEG of four "
        "convolutions with batch norm and ReLU. 'four PEGs' has a PEG before each layer. The final norm is before "
        "the pooling.",
        follows="CPVT (Chu et al., 2023), Tables 3, 7 and 14",
        limits="The depth-wise stack, as in the paper's Table 14, was added when the other scores were known. The "
        "paper has five PEGs in twelve layers.",
        expects={
            **{"grid": "5 x 5", "layers": 4},
            "table": {"std": 1.0, "model": "vit_nano_patch4_28", "global_pool": "token", "final_norm": True},
            "table, GAP": {"std": 1.0, "model": "vit_nano_patch4_28", "global_pool": "avg", "fc_norm": False},
            "PEG": {"encoding": "peg(places=[0], kernel=3, convolution='depthwise', layers=1)"},
            "PEG, 7 x 7": {"encoding": "peg(places=[0], kernel=7)"},
            "four depth-wise layers": {"encoding": "peg(places=[0], kernel=3, convolution='depthwise', layers=4)"},
            "four separable layers": {"encoding": "peg(places=[0], kernel=3, convolution='separable', layers=4)"},
            "four dense layers": {"encoding": "peg(places=[0], kernel=3, convolution='dense', layers=4)"},
            "four PEGs, GAP": {"model": "vit_nano_patch4_28", "global_pool": "avg", "fc_norm": False},
        },
        seconds=30,
    )
