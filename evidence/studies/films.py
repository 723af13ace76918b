"""Films: which position encodings let a small ViT learn the order of frames, and where it moves between them."""

from graticule.lab.studies.study import Study

#: The model of the recipe, and the same with norms of queries and keys.
_SIZES = ("depth=3", "embed_dim=48", "num_heads=2", "patch_size=[1,8,8]")
_NORMS = (*_SIZES, "qk_norm=True")


def study() -> Study:
    """Compare eight encodings, and a table with larger initial values, on films of moving digits and on their order."""
    named = ("none", "learnable", "factorized", "per_frame", "relative_bias", "rope", "rope_mixed", "peg")
    choices = {name: {"encoding": name} for name in named}
    choices["per_frame"] = {"encoding": "per_frame(of='learnable')"}
    choices["factorized, std 1"] = {"encoding": "factorized(std=1)"}
    unchanged = [name for name in choices if name not in ("learnable", "factorized", "per_frame", "rope", "rope_mixed")]
    return Study(
        question="Which position encodings let a small ViT learn the direction and speed of a digit, and the order of "
        "two digits, from films of 6 frames?",
        recipe="moving_digits",
        choices=choices,
        variants={
            "direction and speed": {"model_kwargs": _SIZES},
            "direction and speed with qk_norm": {"model_kwargs": _NORMS},
            "order of two digits": {"dataset": "moving_digits_order"},
        },
        without=tuple((name, "direction and speed with qk_norm") for name in unchanged),
        base={"epochs": 12},
        seeds=(11, 12, 13),
        tests=(
            ("learnable", "none"),
            ("rope_mixed", "rope"),
            ("learnable", "factorized"),
            ("factorized, std 1", "factorized"),
            ("learnable", "per_frame"),
            ("relative_bias", "none"),
            ("peg", "none"),
        ),
        controls="A model that does not know the order of the frames has exactly 25 % in the first task, 50 % in the "
        "second. Direction and speed are a product of time and place: `factorized`, `per_frame` and `rope` have a part "
        "for each axis, and at initial values of 0.02 their product is far below the rest of a layer. So they should "
        "learn the order of two digits, and direction only with larger values: `factorized` with std 1, `rope` with "
        "norms of queries and keys, by which logits are of order 1 from the start.",
        limits="A ViT of 3 layers of 48 channels and 4,000 films for 12 epochs, 2,000 of two digits. Single runs with "
        "seed 0 of `rope` and `factorized` (30 epochs, at chance), of `rope` with norms and `factorized` with std 1 "
        "(100 and 99.9) and of `rope` on the order of two digits (82) were known when the tests were chosen; so were "
        "`learnable` (84) and `rope_mixed` (100) after 10 epochs. The prediction for the order of two digits was "
        "wrong: tables and biases with small initial values stayed at chance there, too.",
        seconds={"direction and speed": 60, "direction and speed with qk_norm": 70, "order of two digits": 30},
        margin=5.0,
    )
