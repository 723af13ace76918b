"""PosMLP's Table 10 at small scale: convolutions or linear layers between the stages of a gated MLP."""

from evidence.studies import Study


def study() -> Study:
    """Compare a plain gMLP, and the two stages of PosMLP with a dense gating unit and four kinds of downsampling."""
    embedding = {"linear": ("patch_embedding=linear",), "conv": ()}
    merging = {"linear": ("patch_merging=linear",), "conv": ()}
    staged = {
        f"{first}, {second}": {"encoding": "sgu", "model_kwargs": (*embedding[first], *merging[second])}
        for first in embedding
        for second in merging
    }
    plain = {"model": "gmlp_nano_patch4_28", "img_size": (28, 28), "encoding": "sgu"}
    return Study(
        question="Do overlapping convolutions between the stages help a gated MLP with a dense gating unit?",
        recipe="digits_posmlp",
        choices={"one stage": plain, **staged},
        base={"epochs": 8},
        seeds=tuple(range(600, 606)),
        controls="All models have a dense gating unit, which starts as in the authors' code of the model. A "
        "choice is named by its patch embedding and its patch merging. 'one stage' is a gMLP with about twice the "
        "parameters.",
        follows="PosMLP (Wang et al., 2022), Table 10",
        expects={
            "layers": 6,
            "one stage": {"grid": "7 x 7", "windows": "", "std": 1e-6},
            **{
                f"{first}, {second}": {
                    "model": "posmlp_nano_32",
                    "patch_embedding": first,
                    "patch_merging": second,
                    **{"grid": "8 x 8", "windows": "8 x 8, 4 x 4", "std": 0.02},
                }
                for first in embedding
                for second in merging
            },
        },
        seconds=40,
    )
