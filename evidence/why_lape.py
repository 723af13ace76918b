"""Why LaPE helps: contrasts fixed before the runs, and the tables and figures of docs/why_lape.md.

    python -m evidence.why_lape --shares    # measure the shares of position before training; minutes
    python -m evidence.why_lape             # write the page from docs/data

All contrasts and sizes of a study are one family (evidence/contrasts.py). The prediction, fixed before a score was
read: a choice gains over `once, std 0.02` by more, the larger the share of position in the input of attention is before
training, mean over layers; its measure is Spearman's rank correlation over the choices. The gym is run by

    graticule gym --choices CHOICES --tasks displacement direction distance neighbors --seeds 10 11 12 13 14 --sizes 9
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from evidence.contrasts import Contrast, Scores, differences, family, read_scores
from graticule.analysis.share import ShareSums
from graticule.backbones.base import Backbone
from graticule.lab.studies.study import TRAINED, Study, load_study
from graticule.lab.training.task import build_data, build_model
from graticule.position.layer import LayerPosition

#: Studies of the question: name -> (title, condition -> the largest difference that would not matter, in points).
STUDIES = {
    "lape_place": ("digits", {TRAINED: 1.0, "zoom 28": 3.0, "zoom 40": 3.0, "canvas 28": 3.0, "canvas 40": 3.0}),
    "lape_place_fashion": ("Fashion-MNIST", {TRAINED: 1.0, "zoom 40": 3.0}),
    "lape_place_cifar": ("CIFAR-10", {TRAINED: 1.0}),
    "lape_place_deep": ("digits, 24 layers", {TRAINED: 1.0, "zoom 40": 3.0}),
}
#: Names of the tests of the studies: (choice, reference) -> name, what else differs.
CONTRASTS = {
    ("beside, std 1", "once, std 1"): ("place", "where the same table is added"),
    ("every layer, std 1", "once, std 1"): ("every layer", "how often it is added to the residual stream"),
    ("beside, std 1", "queries and keys, std 1"): ("values", "whether the values get it too"),
    ("beside, LN chain", "beside, std 1"): ("norm", "the norms of LaPE, with their scales and shifts"),
    ("beside, Norm", "beside, std 1"): ("plain norm", "a norm without scale and shift"),
    ("beside, LN chain", "beside, LN"): ("chain", "whether each norm takes the output of the last"),
    ("once, std 1", "once, std 0.02"): ("amplitude", "the amplitude of a table that is added once"),
    ("beside, LN chain", "once, std 1"): ("LaPE", "place and norm together"),
}
#: The choices of the gym, docs/data/gym_place.csv: name as in the studies -> its text.
GYM = {
    "once, std 0.02": "encoding=learnable",
    "once, std 1": "encoding=learnable(std=1.37)",
    "beside, std 1": "encoding=learnable(std=1.37),joining=lape(decomposition='w')",
    "beside, LN": "encoding=learnable,joining=lape_sharing",
    "beside, LN chain": "encoding=learnable,joining=lape",
}
GYM_TASKS = ("displacement", "direction", "distance", "neighbors")
#: The tests of the gym, on 6 x 6 cells, one family; the margin in percent of the scale from chance to perfect answers.
GYM_TESTS = ("amplitude", "place", "norm", "chain")
GYM_MARGIN = 10.0
#: `graticule gym` with these seeds, which no earlier measurement used.
GYM_SEEDS = tuple(range(10, 15))
#: The choice over which gains are predicted.
BASE = "once, std 0.02"
#: Seeds of which shares are measured.
SHARE_SEEDS = 3


@dataclass(frozen=True)
class Share:
    """Share of position in the variance of the input of one layer's attention, before training.

    choice: of a study.
    seed: of the weights.
    layer: from 0.
    share: see `graticule.position_share`.
    """

    choice: str
    seed: int
    layer: int
    share: float


def attention_inputs(model: Backbone, images: Tensor) -> list[Tensor]:
    """Return the patches of the inputs of queries and keys of every layer, (B, N, D) each."""
    inputs: list[Tensor] = []

    def record(_: nn.Module, given: tuple[Tensor, LayerPosition]) -> None:
        tokens, position = given[:2]
        inputs.append(tokens if position.queries_keys is None else tokens + position.queries_keys)

    hooks = [block.attn.register_forward_pre_hook(record) for block in model.blocks]
    with torch.no_grad():
        model.eval()(images)
    for hook in hooks:
        hook.remove()
    return [tokens[:, -model.grid_of(images).patches :] for tokens in inputs]


def measure_shares(study: Study, images: int = 100) -> list[Share]:
    """Measure every choice of a study of one variant before training, with a few of its seeds, on test images."""
    recipes = study.recipes()
    data = build_data(next(iter(recipes.values())))
    pictures, _ = data.spread_test_images(data.size, images)
    found = []
    for choice, recipe in recipes.items():
        for seed in study.seeds[:SHARE_SEEDS]:
            torch.manual_seed(seed)
            model = build_model(recipe, num_classes=10, channels=pictures.shape[1])
            for layer, tokens in enumerate(attention_inputs(model, pictures)):
                total, *_ = ShareSums(model.grid_of(pictures)).add(tokens).shares()["total"]
                found.append(Share(choice, seed, layer, round(total, 5)))
    return found


def contrasts_of(name: str, docs: Path) -> list[tuple[str, str, Contrast]]:
    """Return (contrast, condition, result) for all tests and conditions of a study, one family."""
    study, (_, margins), scores = load(name), STUDIES[name], read_scores(name, docs / "data")
    asked = [(CONTRASTS[pair][0], at, pair) for pair in study.tests for at in margins]
    tested = family(
        [
            (f"{contrast}, {at}", differences([(1, pair[0], at), (-1, pair[1], at)], scores), margins[at])
            for contrast, at, pair in asked
        ]
    )
    return [(contrast, at, one) for (contrast, at, _), one in zip(asked, tested, strict=True)]


def gym_contrasts(scores: Scores) -> list[tuple[str, str, Contrast]]:
    """Return (contrast, task, result) for the tests of the gym, one family."""
    pairs = {CONTRASTS[pair][0]: pair for pair in CONTRASTS}
    asked = [(name, task) for name in GYM_TESTS for task in GYM_TASKS]
    tested = family(
        [
            (
                f"{name}, {task}",
                differences([(1, GYM[pairs[name][0]], TRAINED), (-1, GYM[pairs[name][1]], TRAINED)], scores, task),
                GYM_MARGIN,
            )
            for name, task in asked
        ]
    )
    return [(name, task, one) for (name, task), one in zip(asked, tested, strict=True)]


def load(name: str) -> Study:
    """Load a study of `STUDIES`."""
    return load_study(Path(__file__).parent / f"{name}.py")
