"""Why LaPE helps: the tables of docs/why_lape.md.

    python -m evidence.why_lape RUNS    # measure the shares of position in the runs of `lape_place`; minutes

The prediction, fixed before a score was read: a choice gains over `once, std 0.02` by more, the larger the share of
position in the input of attention is before training, mean over layers; its measure is Spearman's rank correlation over
the choices. The gym is run by

    graticule gym --choices CHOICES --tasks displacement direction distance neighbors --seeds 10 11 12 13 14 --sizes 9
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from scipy import stats
from torch import Tensor, nn

from evidence.contrasts import Registry, differences, parse
from graticule.analysis.share import ShareSums
from graticule.backbones.base import Backbone
from graticule.lab.studies.plan import plan
from graticule.lab.studies.significance import format_p
from graticule.lab.studies.study import TRAINED, load_study
from graticule.lab.studies.tables import csv_of_records, markdown, read_records
from graticule.lab.training.run import Run
from graticule.lab.training.task import build_data, build_model
from graticule.position.layer import LayerPosition
from graticule.system.files import write_text

#: Rows of the table of answers: title -> study and condition.
WHERE = {
    "Fashion-MNIST": ("lape_place_fashion", TRAINED),
    "Fashion-MNIST, zoomed": ("lape_place_fashion", "zoom 40"),
    "CIFAR-10": ("lape_place_cifar10", TRAINED),
    "CIFAR-10, zoomed": ("lape_place_cifar10", "zoom 48"),
    "CIFAR-10, empty canvas": ("lape_place_cifar10", "canvas 48"),
    "digits": ("lape_place", TRAINED),
    "digits, zoomed": ("lape_place", "zoom 40"),
    "digits, empty canvas": ("lape_place", "canvas 40"),
    "digits, 24 layers": ("lape_place_deep", TRAINED),
    "digits, 24 layers, zoomed": ("lape_place_deep", "zoom 40"),
}
#: Its columns: title -> contrast.
EFFECTS = {
    "LaPE less the default": "beside, LN chain - once, std 0.02",
    "amplitude, once: 1 less 0.02": "once, std 1 - once, std 0.02",
    "place of a table of 1": "beside, std 1 - once, std 1",
    "place of a table of 0.2": "beside, std 0.2 - once, std 0.2",
    "their difference": "beside, std 1 - once, std 1 - beside, std 0.2 + once, std 0.2",
    "norms": "beside, LN chain - beside, std 1",
    "learning rate": "beside, LN chain - beside, LN chain, std 1",
}


def why_part(name: str, registry: Registry) -> str:
    """Return the table of 'answers', or of the 'prediction'."""
    if name == "prediction":
        return prediction_table(registry)
    rows = {(row.data, row.at, row.contrast): (row, contrast) for row, contrast in registry.of(variant="")}
    table = [("where", *EFFECTS)]
    for title, (data, at) in WHERE.items():
        found = [rows.get((data, at, contrast)) for contrast in EFFECTS.values()]
        table.append((title, *(pair[1].short() + pair[0].mark if pair else "" for pair in found)))
    return markdown(table)


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


def measure_shares(runs: Path, images: int = 100, seeds: int = 3) -> list[Share]:
    """Measure every choice of `lape_place` with its first seeds on test images; `runs` is the folder of its runs."""
    study = load_study(Path(__file__).parent / "studies/lape_place.py")
    planned = [run for run in plan(study.recipes(), study.seeds, runs) if run.recipe.seed in study.seeds[:seeds]]
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


def prediction_table(registry: Registry) -> str:
    """Write the rank correlations over the choices of the share of position and the gain over `once, std 0.02`."""
    shares = read_records(registry.folder / "why_lape_shares.csv", Share)
    choices = dict.fromkeys(share.choice for share in shares)
    rows = [("share of position, mean over layers", "gain at the trained size", "gain at zoom 40")]
    for when in ("before", "after"):
        means = [fmean(s.share for s in shares if (s.choice, s.when) == (choice, when)) for choice in choices]
        cells = []
        for at in (TRAINED, "zoom 40"):
            terms = [parse(f"{choice} - once, std 0.02", at=at) for choice in choices]
            gains = [fmean(differences(of_choice, registry.scores("lape_place"))) for of_choice in terms]
            result = stats.spearmanr(means, gains)
            cells.append(f"{result.statistic:+.2f} (p {format_p(float(result.pvalue))})")
        rows.append((f"{when} training", *cells))
    return markdown(rows)


if __name__ == "__main__":
    text = csv_of_records(Share, measure_shares(Path(sys.argv[1])))
    print("wrote", write_text(Path("docs/data/why_lape_shares.csv"), text))
