"""The examples of docs/dense.md work as shown."""

import re
from pathlib import Path

import torch

import graticule
from graticule.dense.detector import HEADS
from graticule.dense.features import NECKS
from graticule.dense.segmentation import DECODERS
from tiny import without_memory

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "dense.md").read_text(encoding="utf-8")


def test_the_code_runs_and_gives_the_shown_results():
    torch.manual_seed(0)
    names = {}
    exec(compile("".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)), "dense.md", "exec"), names)
    assert {"loss_classifier", "loss_mask"} < names["losses"].keys()
    assert names["predictions"][0].keys() == {"boxes", "labels", "scores", "masks"}
    assert names["logits"].shape == (1, 19, 128, 200)


def test_the_tables_have_every_name():
    for word, registry in {"neck": NECKS, "head": HEADS, "decoder": DECODERS}.items():
        (table,) = re.findall(rf"^\| {word} \|.*?\n\n", PAGE, flags=re.DOTALL | re.MULTILINE)
        assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == [*registry]


def test_the_table_of_sizes_has_the_sizes_of_the_models():
    table = (DOCS / "data" / "measured" / "dense_counts.csv").read_text(encoding="utf-8")
    rows = re.findall(r"\| (pvt_tiny_peg) \| (fpn|retinanet)\",parameters \(M\),([\d.]+),", table)
    assert len(rows) == 2
    for backbone, part, printed in rows:
        with without_memory():
            if part == "fpn":
                model = graticule.create_segmenter(backbone, 150, "fpn")
            else:
                model = graticule.create_detector(backbone, 80, part)
        assert f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.2f}" == printed
