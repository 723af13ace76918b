"""Two questions on which eight seeds found no difference, with the seeds that they need for a margin of one point."""

from evidence.studies import Study

#: Its rows have the exact standard deviation 1, as those of a norm.
TABLE = "learnable(std=1.37)"


def study() -> Study:
    """Compare a PEG with a table of a norm's spread, and LaPE's norms on 1-D sinusoids with their place alone."""
    beside = "sinusoidal_1d(spread=0.639)"
    return Study(
        question="Does one PEG beat a table as large as a norm, and do LaPE's norms help 1-D sinusoids?",
        recipe="digits_small",
        choices={
            "table": {"encoding": TABLE},
            "PEG": {"encoding": "peg"},
            "sinusoidal 1-D beside": {"encoding": beside, "joining": "lape(decomposition='w')"},
            "sinusoidal 1-D, LaPE": {"encoding": "sinusoidal_1d", "joining": "lape"},
        },
        base={"model_kwargs": ("depth=4", "fc_norm=false")},
        seeds=tuple(range(130, 152)),
        controls="As in `lape_controls`, with other seeds: the sinusoids have the same spread and enter at the same "
        "point with and without LaPE's norms.",
        follows="CPVT (Chu et al., 2023), Tables 2 and 7; LaPE (Yu et al., 2023), Table 7",
        limits="`lape_controls` determined the number of seeds. We planned to look at the scores twice, "
        "after 11 and 22 seeds, which multiplies p by 1.13 and changes no answer.",
        expects={
            **{"grid": "5 x 5", "layers": 4},
            "table": {"std": 1.0},
            "PEG": {"encoding": "peg(places=[0], kernel=3)"},
            "sinusoidal 1-D, LaPE": {"joining": "lape(decomposition='layer_norm')"},
        },
        seconds=30,
    )
