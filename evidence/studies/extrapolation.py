"""More tokens than in training: every encoding that attention can use, on zoomed images and on a larger canvas."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from evidence.studies import Measured, Study
from graticule.lab.studies.results import place

SIZES = (24, 24), (28, 28), (40, 40)
MODES: tuple[Literal["canvas"], Literal["zoom"]] = ("canvas", "zoom")
#: Encodings, some with LaPE, in the order of their scores on the largest canvas.
CHOICES = (
    *("gpsa", "convolutional_projection", "gqpe_bias", "peg", "sandwich", "irpe", "coordinates", "decomposed", "pope"),
    *("rope(preset='dinov3')", "none", "alibi", "mlp_bias", "kerple", "fire", "relative_bias", "shaw", "factorized"),
    *("sinusoidal_2d", "mrope", "bucketed_bias", "sinusoidal_1d", "learnable, lape", "continuous_bias", "learnable"),
    *("fourier", "liere", "rope_golden_gate", "rope", "rope(preset='rope_vit')", "learnable(std=1)"),
    *("sinusoidal_2d, lape", "rope_1d", "rope_mixed"),
)
#: Scalings of rotary frequencies; NTK and YaRN need ordered frequencies, which learned ones are not.
SCALED = {
    **dict.fromkeys(("rope", "rope_1d", "mrope", "pope", "rope(preset='rope_vit')"), ("interpolation", "ntk", "yarn")),
    "rope_mixed": ("interpolation",),
}


def rescaled(encoding: str) -> dict[str, str]:
    """Return encodings of the same parameters that differ on other grids alone: name -> spec."""
    specs = {}
    for scaling in SCALED.get(encoding, ()):
        inside = encoding[:-1] + ", " if encoding.endswith(")") else encoding + "("
        ramp = ", ramp=(0.25, 1)" if scaling == "yarn" else ""  # a grid of 5 has no frequency of more turns
        specs[scaling] = f"{inside}scaling='{scaling}'{ramp})"
    both = {f"{name} and log_n": f"{spec} + log_n" for name, spec in specs.items()}
    return {"log_n": "log_n" if encoding == "none" else f"{encoding} + log_n", **specs, **both}


def with_encoding(run: Any, encoding: str) -> Any:
    """Return the model of a run with its last weights and another encoding of the same parameters."""
    import torch

    from graticule.lab.training.task import build_model

    trained = run.model(run.data(), "last")
    model = build_model(dataclasses.replace(run.recipe(), encoding=encoding), num_classes=10, channels=1)
    with torch.no_grad():
        for mine, value in zip(model.parameters(), trained.parameters(), strict=True):
            mine.copy_(value)
    return model.eval()


def measure(run: Any) -> Iterator[Measured]:
    """Measure the last weights at the other sizes with the log N temperature and with scaled frequencies."""
    from graticule.lab.tasks.parts.image_scores import evaluate

    for name, encoding in rescaled(run.recipe().encoding).items():
        for mode in MODES:
            model = with_encoding(run, encoding)
            for score in evaluate(model, run.data(), SIZES, mode=mode, measure_cost=False, progress=False):
                yield f"top1 with {name}", place(mode, score.size), score.top1
                yield f"loss with {name}", place(mode, score.size), round(score.loss, 4)


def study() -> Study:
    """Train with 34 choices at 20 pixels, 5 x 5 tokens, and test at up to four times as many tokens."""
    named = {name: name.partition(", ") for name in CHOICES}
    return Study(
        question="Which encoding keeps its accuracy on more tokens than in training?",
        recipe="digits_small",
        choices={
            name: {"encoding": encoding, **({"joining": joining} if joining else {})}
            for name, (encoding, _, joining) in named.items()
        },
        sizes=SIZES,
        modes=MODES,
        decimals=1,
        controls="On 'canvas 40' the digit keeps its size, at a random location, and the rest of 40 x 40 "
        "pixels (4 times the tokens) is empty. On 'zoom 40' the digit grows with the image.",
        limits="Digits of 20 x 20 pixels. The recipe is not tuned for any encoding.",
        seconds=45,
        measure=measure,
    )
