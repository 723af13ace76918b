"""Training in bfloat16 against float32: scores, and differences between choices."""

from graticule.lab.studies.study import Study


def study() -> Study:
    """Compare the default joining and LaPE in both precisions, at two widths."""
    choices: dict[str, dict[str, str]] = {
        "default": {"encoding": "learnable"},
        "LaPE": {"encoding": "learnable", "joining": "lape"},
    }
    in_bfloat16 = {f"{name}, bfloat16": {**changes, "precision": "bf16-mixed"} for name, changes in choices.items()}
    return Study(
        question="Does bf16-mixed give the same scores, and differences between choices, as float32?",
        recipe="digits_small",
        choices={**choices, **in_bfloat16},
        base={"epochs": 4},
        variants={
            "64 channels": {},
            "192 channels": {"model_kwargs": ("depth=4", "embed_dim=192", "num_heads=6")},
        },
        seeds=(0, 1, 2),
        tests=(
            ("default, bfloat16", "default"),
            ("LaPE, bfloat16", "LaPE"),
            ("LaPE", "default"),
            ("LaPE, bfloat16", "default, bfloat16"),
        ),
        interactions=(("LaPE, bfloat16", "default, bfloat16", "LaPE", "default"),),
        controls="The last test of each width compares the gain of LaPE in bfloat16 with its gain in float32.",
        limits="There are three seeds; the intervals show how large a difference must be to be seen. The models of "
        "192 channels have the learning rate of those of 64. LaPE's amplitude is not controlled for: its gain after 4 "
        "epochs is compared between precisions, and not explained.",
        seconds={"64 channels": 20, "192 channels": 60},
    )
