"""Parameters of the papers' dense models, counted on the meta device without computing anything.

    python benchmarks/dense_counts.py

Prints the table of docs/papers.md, whose parameters the papers print, too.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import graticule

ADAPTER = {"neck": "adapter + fpn", "head": "mask_rcnn", "init_values": 1.0}
UPERNET = {"neck": "adapter", "decoder": "uperhead", "auxiliary": "fcn", "init_values": 1.0}
SEGMENTER = {"decoder": "segmenter_mask", "img_size": 512}
RETINANET, SEMANTIC_FPN, MASK_RCNN = {"head": "retinanet"}, {"decoder": "fpn"}, {"head": "mask_rcnn"}
PVT_ROWS = {
    "pvt_tiny": (17, 23),
    "pvt_tiny_peg": (17, 23),
    "pvt_tiny_gap": (17, 23),
    "pvt_tiny_peg_gap": (17, 23),
    "pvt_small": (28, 34),
    "pvt_small_peg_gap": (28, 34),
    "pvt_medium": (48, 54),
    "pvt_medium_peg_gap": (48, 54),
}
#: Paper, backbone, arguments, parameters in millions as printed in the paper.
ROWS: list[tuple[str, str, dict[str, Any], float]] = [
    *[
        ("LaPE, Table 3", f"deit_{s}_patch16_224", {**ADAPTER, "joining": "lape"}, n)
        for s, n in (("tiny", 28), ("small", 48))
    ],
    *[
        ("LaPE, Table 4", f"deit_{s}_patch16_224", {**SEGMENTER, "joining": "lape"}, n)
        for s, n in (("tiny", 7), ("small", 27))
    ],
    *[
        ("LaPE, Table 4", f"deit_{s}_patch16_224", {**UPERNET, "joining": "lape"}, n)
        for s, n in (("tiny", 36), ("small", 58))
    ],
    *[("CPVT, Table 13", name, SEMANTIC_FPN, fpn) for name, (fpn, _) in PVT_ROWS.items()],
    *[("CPVT, Table 13", name, RETINANET, retinanet) for name, (_, retinanet) in PVT_ROWS.items()],
    ("PosMLP, Table 8", "posmlp_tiny_224", MASK_RCNN, 40.5),
    ("PosMLP, Table 8", "posmlp_small_224", MASK_RCNN, 56.1),
    ("PosMLP, Table 8", "posmlp_tiny_224", RETINANET, 31.1),
    ("PosMLP, Table 8", "posmlp_small_224", RETINANET, 47.3),
]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the first row of each table of a paper, as a test")
    options = parser.parse_args()
    rows = list({row[0]: row for row in reversed(ROWS)}.values()) if options.quick else ROWS
    print("| paper | backbone | parts | parameters (M) | printed |")
    print("| --- | --- | --- | --- | --- |")
    for paper, backbone, arguments, printed in rows:
        detects = "head" in arguments
        create = graticule.create_detector if detects else graticule.create_segmenter
        with torch.device("meta"):
            model = create(backbone, 80 if detects else 150, **arguments).eval()
        parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        parts = ", ".join(str(arguments[name]) for name in ("neck", "head", "decoder", "joining") if name in arguments)
        row = (paper, backbone, parts, f"{parameters:.2f}", f"{printed:g}")
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
