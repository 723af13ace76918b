"""Volumes: which position encodings let a small ViT learn the shape and pose of a solid of four cubes."""

from graticule.lab.studies.study import Study


def study() -> Study:
    """Compare seven encodings, and a table with larger initial values, on volumes of 5 x 5 x 5 patches."""
    named = ("none", "learnable", "factorized", "relative_bias", "rope", "rope_mixed", "peg")
    choices = {name: {"encoding": name} for name in named}
    choices["factorized, std 1"] = {"encoding": "factorized(std=1)"}
    return Study(
        question="Which position encodings let a small ViT learn the shape and pose of a rod or a plate of four cubes, "
        "anywhere in a volume of 5 x 5 x 5 patches?",
        recipe="solids",
        choices=choices,
        seeds=(11, 12, 13),
        tests=(
            ("learnable", "none"),
            ("relative_bias", "none"),
            ("peg", "none"),
            ("factorized, std 1", "factorized"),
            ("relative_bias", "learnable"),
            ("rope_mixed", "rope"),
        ),
        controls="A cube is a patch, and the patches of a volume are independent of its class, so a model without "
        "position has about 16.7 %. The solid is anywhere, so what counts is where cubes are to each other: relative "
        "encodings should learn it from fewer volumes than tables.",
        limits="A ViT of 3 layers of 48 channels and 3,000 volumes for 10 epochs.",
        seconds=60,
        margin=5.0,
    )
