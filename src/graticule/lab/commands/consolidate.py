"""`graticule consolidate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.options import parse, parse_checkpoint
from graticule.registry.checks import printable


@dataclass
class Consolidate:
    """Write the weights of a run's checkpoint to one safetensors file, for evaluation.

        graticule consolidate RUN --checkpoint last

    The checkpoints of a sharded run (strategy fsdp) are folders with a file per process; for a run with a moving
    average, the average is written. A run need not be finished.
    """

    run: Positional[Path]
    """run folder"""
    checkpoint: Rare[str] = "last"
    """best or last"""
    output: Path | None = None
    """file to write, ending in .safetensors (default: weights-last.safetensors or weights-best.safetensors in the
    run folder)"""


def run(arguments: list[str]) -> int:
    """Write one file."""
    options = parse(Consolidate, "consolidate", arguments)
    checkpoint = parse_checkpoint(options.checkpoint)
    from graticule.checkpoints.read import save_weights
    from graticule.lab.training.run import Run
    from graticule.system.files import followed

    trained = Run.open(options.run)
    path = followed(options.output) or trained.folder / f"weights-{checkpoint}.safetensors"
    if path.suffix != ".safetensors" or path.is_dir():
        raise ValueError(f"`output` must be a file that ends in .safetensors, got {str(path)!r}.")
    weights = trained.model(checkpoint=checkpoint).state_dict()
    source = trained.best if checkpoint == "best" else trained.last
    save_weights(weights, path)
    count = sum(value.numel() for value in weights.values())
    print(printable(f"wrote {path}: {len(weights)} tensors, {count:,} numbers, of {source}"))
    return 0
