"""CPVT's Tables 5, 6, 7 and 11 at small scale: the insert positions of a PEG, its weights, and its padding."""

from evidence.studies import Study


def study() -> Study:
    """Compare forms of PEG, no position, and a learnable table, in a model of 4 layers with a grid of 5 x 5."""
    forms = {
        "PEG at 0": "peg",
        "PEG at -1": "peg(places=[-1])",
        "PEG at -1, 9 x 9": "peg(places=[-1], kernel=9)",
        "PEG at 2": "peg(places=[2])",
        "PEG at 3": "peg(places=[3])",
        "PEG at 0 to 3": "peg(places=[0, 1, 2, 3])",
        "PEG, fixed": "peg(frozen=True)",
        "four 1 x 1 layers": "peg(kernel=1, convolution='dense', layers=4)",
        "PEG, no padding": "peg(padding='none')",
        "PEG, circular": "peg(padding='circular')",
        "PEG for queries and keys": "peg(acts_on='queries_keys')",
        "PEG and learnable": "peg + learnable",
    }
    return Study(
        question="Which property of a PEG helps: its insert position, its weights, its padding, or more parameters?",
        recipe="digits_small",
        choices={
            "none": {"encoding": "none"},
            **{name: {"encoding": encoding} for name, encoding in forms.items()},
            "learnable": {"encoding": "learnable"},
        },
        controls="'four 1 x 1 layers' have more parameters than a PEG and do not read neighbors. 'PEG, circular' "
        "has no border. Without padding, tokens at the border get no encoding, so the border still differs.",
        follows="CPVT (Chu et al., 2023), Tables 5, 6, 7 and 11",
        limits="'PEG at 3' follows the last layer and cannot change the class token, so this model has no position "
        "information. 'PEG at 2' was added when the other scores were known. A kernel of 9 x 9 covers this grid as 27 "
        "x 27 covers 14 x 14. 'none', 'PEG at 0' and 'learnable' are runs of `extrapolation`, which were known when "
        "the tests were chosen.",
        expects={
            **{"grid": "5 x 5", "layers": 4},
            "PEG at 0": {"encoding": "peg(places=[0], kernel=3, convolution='depthwise', layers=1, padding='zeros')"},
            "PEG at -1": {"encoding": "peg(places=[-1], kernel=3)"},
            "PEG, fixed": {"encoding": "peg(places=[0], frozen=True)"},
            "PEG for queries and keys": {"encoding": "peg(places=[0], acts_on='queries_keys')"},
            "PEG and learnable": {"encoding": "peg(places=[0]) + learnable", "std": 0.02},
            "learnable": {"std": 0.02},
        },
        seconds=30,
    )
