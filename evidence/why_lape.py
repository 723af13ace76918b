"""Why LaPE helps: contrasts fixed before the runs, and the tables and figures of docs/why_lape.md.

    python -m evidence.why_lape --shares RUNS    # measure the shares of position in the runs of `lape_place`; minutes
    python -m evidence.why_lape                  # write the page from docs/data

All contrasts and sizes of a study are one family (evidence/contrasts.py). The prediction, fixed before a score was
read: a choice gains over `once, std 0.02` by more, the larger the share of position in the input of attention is before
training, mean over layers; its measure is Spearman's rank correlation over the choices. The gym is run by

    graticule gym --choices CHOICES --tasks displacement direction distance neighbors --seeds 10 11 12 13 14 --sizes 9
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from scipy import stats
from torch import Tensor, nn

from evidence.contrasts import LATER, Contrast, Scores, differences, family, read_scores
from graticule.analysis.share import ShareSums
from graticule.backbones.base import Backbone
from graticule.lab.studies.plan import plan
from graticule.lab.studies.significance import format_p, spread
from graticule.lab.studies.study import TRAINED, Study, load_study
from graticule.lab.studies.tables import between, csv_of_records, markdown, marked, read_records
from graticule.lab.training.run import Run
from graticule.lab.training.task import build_data, build_model
from graticule.position.layer import LayerPosition
from graticule.system.files import write_text

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
    ("beside, LN chain, std 1", "beside, std 1"): (
        "norm of a table of 1",
        "the norms, at the learning rate of the table",
    ),
    ("beside, LN chain", "beside, LN chain, std 1"): (
        "rate",
        "the relative learning rate, of a table of 0.02 less of 1",
    ),
    ("beside, std 0.2", "once, std 0.2"): ("place at 0.2", "where a table of 0.2 is added"),
    ("beside, std 1", "beside, std 0.2"): ("amplitude beside", "the amplitude beside every layer, 1 less 0.2"),
    ("beside, LN chain", "beside, LN"): ("chain", "whether each norm takes the output of the last"),
    ("once, std 1", "once, std 0.02"): ("amplitude", "the amplitude of a table that is added once, 1 less 0.02"),
    ("once, std 1", "once, std 0.2"): ("amplitude from 0.2", "the same, 1 less 0.2"),
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
#: The columns of the short table of answers.
COLUMNS_SHOWN = ("digits", "digits, zoom 40", "Fashion-MNIST", "CIFAR-10", "digits, 24 layers")
#: The choice over which gains are predicted.
BASE = "once, std 0.02"
#: Seeds of which shares are measured.
SHARE_SEEDS = 3


@dataclass(frozen=True)
class Share:
    """Share of position in the variance of the input of one layer's attention.

    choice: of a study.
    seed: of the weights.
    when: 'before' or 'after' training.
    layer: from 0.
    share: see `graticule.position_share`.
    """

    choice: str
    seed: int
    when: str
    layer: int
    share: float


def attention_inputs(model: Backbone, images: Tensor) -> list[Tensor]:
    """Return the patches of the inputs of queries and keys of every layer, (B, N, D) each."""
    inputs: list[Tensor] = []

    def record(_: nn.Module, arguments: tuple[Tensor, LayerPosition]) -> None:
        tokens, position = arguments[:2]
        inputs.append(tokens if position.queries_keys is None else tokens + position.queries_keys)

    hooks = [block.attn.register_forward_pre_hook(record) for block in model.blocks]
    with torch.no_grad():
        model.eval()(images)
    for hook in hooks:
        hook.remove()
    return [tokens[:, -model.grid_of(images).patches :] for tokens in inputs]


def measure_shares(study: Study, runs: Path, images: int = 100) -> list[Share]:
    """Measure every choice of a study of one variant with a few of its seeds, on test images.

    Args:
        study: the study.
        runs: the folder of its runs.
        images: number of test images.
    """
    planned = [run for run in plan(study.recipes(), study.seeds, runs) if run.recipe.seed in study.seeds[:SHARE_SEEDS]]
    data = build_data(planned[0].recipe)
    pictures, _ = data.spread_test_images(data.size, images)
    shares = []
    for run in planned:
        torch.manual_seed(run.recipe.seed)
        models = {"before": build_model(run.recipe, num_classes=10, channels=pictures.shape[1])}
        if run.run.finished:
            models["after"] = Run(run.folder).model(data, "last")
        for when, model in models.items():
            for layer, tokens in enumerate(attention_inputs(model, pictures)):
                total, *_ = ShareSums(model.grid_of(pictures)).add(tokens).shares()["total"]
                shares.append(Share(run.choice, run.recipe.seed, when, layer, round(total, 5)))
    return shares


def contrasts_of(name: str, docs: Path) -> list[tuple[str, str, Contrast]]:
    """Return (contrast, condition, result) for all tests and conditions of a study, one family."""
    study, (_, margins), scores = load(name), STUDIES[name], read_scores(name, docs / "data")
    asked = [(CONTRASTS[pair][0], at, pair) for pair in study.tests for at in margins]
    tested = family(
        [
            (f"{contrast}, {at}", differences([(1, pair[0], "", at), (-1, pair[1], "", at)], scores), margins[at])
            for contrast, at, pair in asked
        ]
    )
    return [(contrast, at, result) for (contrast, at, _), result in zip(asked, tested, strict=True)]


def gym_contrasts(scores: Scores) -> list[tuple[str, str, Contrast]]:
    """Return (contrast, task, result) for the tests of the gym, one family."""
    pairs = {CONTRASTS[pair][0]: pair for pair in CONTRASTS}
    asked = [(name, task) for name in GYM_TESTS for task in GYM_TASKS]
    tested = family(
        [
            (
                f"{name}, {task}",
                differences(
                    [(1, GYM[pairs[name][0]], task, TRAINED), (-1, GYM[pairs[name][1]], task, TRAINED)], scores
                ),
                GYM_MARGIN,
            )
            for name, task in asked
        ]
    )
    return [(name, task, result) for (name, task), result in zip(asked, tested, strict=True)]


def load(name: str) -> Study:
    """Load a study of `STUDIES`."""
    return load_study(Path(__file__).parent / "studies" / f"{name}.py")


def means_table(docs: Path) -> str:
    """Write the mean accuracy of every choice of every study at every size, with the deviation over seeds."""
    columns = [(name, at) for name, (_, margins) in STUDIES.items() for at in margins]
    scores = {name: read_scores(name, docs / "data") for name in STUDIES}
    choices = dict.fromkeys(choice for name in STUDIES for choice in load(name).choices)
    rows = [["choice", *(f"{STUDIES[name][0]}, {at}" for name, at in columns)]]
    for choice in choices:
        values = [list(scores[name].get((choice, "", at), {}).values()) for name, at in columns]
        rows.append([choice, *(spread(values_of, 1) for values_of in values)])
    return markdown(rows)


def contrast_rows(docs: Path) -> list[tuple[str, str, Contrast]]:
    """Return (contrast, where, result) for all studies and the gym."""
    rows = [
        (contrast, f"{STUDIES[name][0]}, {at}" if at != TRAINED else STUDIES[name][0], result)
        for name in STUDIES
        for contrast, at, result in contrasts_of(name, docs)
    ]
    gym = gym_contrasts(read_scores("gym_place", docs / "data"))
    return [*rows, *((contrast, f"gym, {task}", result) for contrast, task, result in gym)]


def contrasts_table(rows: Sequence[tuple[str, str, Contrast]]) -> str:
    """Write a row for every place and a column for every contrast."""
    names = [name for name, _ in CONTRASTS.values() if any(contrast == name for contrast, *_ in rows)]
    cells = {(contrast, where): result.short() for contrast, where, result in rows}
    places = dict.fromkeys(where for _, where, _ in rows)
    return markdown(
        [("where", *names), *((where, *(cells.get((name, where), "") for name in names)) for where in places)]
    )


def answers_table(rows: Sequence[tuple[str, str, Contrast]]) -> str:
    """Write the difference and the answer of every contrast in a few columns."""
    results = {(contrast, where): result for contrast, where, result in rows}
    table = [("contrast", *COLUMNS_SHOWN)]
    for name, text in CONTRASTS.values():
        cells = []
        for where in COLUMNS_SHOWN:
            result = results.get((name, where))
            cells.append(
                f"{fmean(result.values):+.1f}, {re.split('[:(]', result.answer)[0].strip()}"
                if result and result.values
                else ""
            )
        table.append((f"{name}: {text}", *cells))
    return markdown(table)


def predictions(docs: Path) -> dict[tuple[str, str], list[tuple[str, float, float]]]:
    """Return (when, condition) -> (choice, mean share, gain over `BASE`) of the choices."""
    shares, scores = (
        read_records(docs / "data" / "why_lape_shares.csv", Share),
        read_scores("lape_place", docs / "data"),
    )
    points: dict[tuple[str, str], list[tuple[str, float, float]]] = {}
    for when in ("before", "after"):
        for at in (TRAINED, "zoom 40"):
            for choice in dict.fromkeys(share.choice for share in shares):
                mean = fmean(share.share for share in shares if (share.choice, share.when) == (choice, when))
                gain = fmean(differences([(1, choice, "", at), (-1, BASE, "", at)], scores))
                points.setdefault((when, at), []).append((choice, mean, gain))
    return points


def correlation(points: Sequence[tuple[str, float, float]]) -> str:
    """Return Spearman's rank correlation of share and gain over the choices, with its p."""
    result = stats.spearmanr([share for _, share, _ in points], [gain for *_, gain in points])
    return f"{result.statistic:+.2f} (p {format_p(float(result.pvalue))})"


def prediction_table(docs: Path) -> str:
    """Write the rank correlations of share and gain."""
    points = predictions(docs)
    rows = [("share of position, mean over layers", "gain at the trained size", "gain at zoom 40")]
    for when, title in (("before", "before training (the prediction)"), ("after", f"after training {LATER}")):
        rows.append((title, *(correlation(points[when, at]) for at in (TRAINED, "zoom 40"))))
    return markdown(rows)


def page_texts(docs: Path) -> dict[Path, str]:
    """Return the texts of docs/why_lape.md and of its page of numbers with their tables rebuilt."""
    rows = contrast_rows(docs)
    parts = {
        "answers": answers_table(rows),
        "prediction": prediction_table(docs),
        "means": means_table(docs),
        "contrasts": contrasts_table(rows),
    }
    texts = {}
    for page in (docs / "why_lape.md", docs / "results" / "lape_place.md"):
        text = page.read_text(encoding="utf-8")
        for name in marked(text, "why_lape"):
            text = between(text, f"why_lape {name}", parts[name])
        texts[page] = text
    return texts


def main() -> None:
    """Write the page, or with --shares RUNS measure the shares of the study on digits."""
    docs = Path("docs")
    if sys.argv[1:2] == ["--shares"]:
        shares = measure_shares(load("lape_place"), Path(sys.argv[2]))
        print("wrote", write_text(docs / "data" / "why_lape_shares.csv", csv_of_records(Share, shares)))
    else:
        print("wrote", *(write_text(page, text) for page, text in page_texts(docs).items()))


if __name__ == "__main__":
    main()
