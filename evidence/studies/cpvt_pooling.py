"""CPVT's Table 3 at small scale: the gain from average pooling with PEG and with a learnable table."""

from graticule.lab.studies.study import Study


def study() -> Study:
    """Compare two encodings with a class token and with average pooling, with the final norm before either."""
    encodings = {"learnable": "learnable", "PEG": "peg"}
    heads = {"": "token", ", GAP": "avg"}
    return Study(
        question="Does average pooling instead of a class token help PEG more than a learnable table?",
        recipe="digits_small",
        choices={
            f"{name}{label}": {"encoding": encoding, "global_pool": pool}
            for name, encoding in encodings.items()
            for label, pool in heads.items()
        },
        base={"model_kwargs": ("depth=4", "fc_norm=false")},
        tests=(("learnable, GAP", "learnable"), ("PEG, GAP", "PEG"), ("PEG", "learnable")),
        interactions=(("PEG, GAP", "PEG", "learnable, GAP", "learnable"),),
        controls="In all models the final norm is before the pooling, so the two heads differ only in the pooling.",
        follows="CPVT (Chu et al., 2023), Table 3, tested as an interaction",
        limits="CPVT's Table 3 has five PEGs, this study one. The two models with a class token have the scores of "
        "`digits_small`, which were known when the tests were chosen.",
        seconds=30,
    )
