"""Dense prediction: what a segmenter on street scenes has of its position encoding."""

from graticule.studies.study import Study


def study() -> Study:
    """Seven encodings in a small ViT with Segmenter's mask transformer."""
    named = ("none", "learnable", "sinusoidal_2d", "peg", "relative_bias", "rope")
    return Study(
        question="Which position encoding helps a small segmenter on CamVid?",
        recipe="camvid",
        choices={
            **{name: {"encoding": name} for name in named},
            "learnable, std 1": {"encoding": "learnable(std=1)"},
            "learnable, LaPE": {"encoding": "learnable", "joining": "lape"},
        },
        base={"epochs": 8},
        seeds=(0, 1, 2),
        tests=(
            *((name, "none") for name in named[1:]),
            ("learnable, LaPE", "learnable"),
            ("learnable, LaPE", "learnable, std 1"),
        ),
        controls="'learnable, std 1' controls for the amplitude that LaPE's norms give the table.",
        follows="LaPE (Yu et al., 2023), Table 4, with other models and data",
        folder="CAMVID",
        seconds=400,
    )
