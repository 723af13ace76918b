"""`graticule pack`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from graticule.checks import printable
from graticule.commands.options import parse


@dataclass
class Pack:
    """Pack an image folder into shards (tars in WebDataset's format), to train on with --dataset shards.

    graticule pack FOLDER OUTPUT packs FOLDER/train/CLASS/*.JPEG and FOLDER/val/CLASS/*.JPEG; started again after an
    interruption, it goes on where it stood. graticule pack OUTPUT --verify reads the shards again and holds them
    against their checksums.
    """

    folder: tyro.conf.Positional[Path]
    """image folder; with --verify, the folder of the shards"""
    output: tyro.conf.Positional[Path | None] = None
    """folder of the shards, outside of the image folder"""
    workers: int | None = None
    """shards that are worked on at a time (default: one a core)"""
    images_per_shard: int = 1000
    """images a shard, at most"""
    seed: int = 0
    """decides which image comes into which shard"""
    skip_broken: bool = False
    """leave out files of no bytes, which are an error otherwise"""
    verify: bool = False
    """check shards that are there"""


def run(arguments: list[str]) -> int:
    """Pack a folder, or check what was packed."""
    options = parse(Pack, "pack", arguments)
    from graticule.data.pack import pack
    from graticule.data.verify import verify

    if options.verify:
        if options != Pack(options.folder, verify=True, workers=options.workers):
            raise ValueError("`verify` goes with --workers alone: graticule pack OUTPUT --verify.")
        packed = verify(options.folder, workers=options.workers)
        print(f"every shard of {packed.folder} is as it was packed")
    elif options.output is None:
        raise ValueError("`output` must be the folder of the shards: graticule pack FOLDER OUTPUT.")
    else:
        packed = pack(
            options.folder,
            options.output,
            images_per_shard=options.images_per_shard,
            workers=options.workers,
            seed=options.seed,
            skip_broken=options.skip_broken,
        )
        before = sum(packed.shards.values()) - packed.written
        print(
            printable(f"wrote {packed.written} shards to {packed.folder}")
            + (f"; {before} were there" if before else "")
        )
    for part, images in packed.images.items():
        print(f"{part:5}  {images} images in {packed.shards[part]} shards")
    if packed.left_out:
        print(f"left out {len(packed.left_out)} files of no bytes: {', '.join(map(str, packed.left_out[:10]))}")
    print(f"{packed.bytes / 1e9:.3f} GB in all")
    return 0
