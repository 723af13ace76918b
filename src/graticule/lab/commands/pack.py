"""`graticule pack`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.options import parse
from graticule.registry.checks import printable


@dataclass
class Pack:
    """Pack images into Arrow files in the format of Hugging Face datasets, to train on with --dataset hugging_face.

        graticule pack IMAGENET PACKED     # again: resumes after an interruption
        graticule pack PACKED --verify     # compares the files with their checksums

    FOLDER has images as train/CLASS/*.JPEG and val/CLASS/*.JPEG, or tar shards in WebDataset's format as train/*.tar
    and val/*.tar.
    """

    folder: Positional[Path]
    """folder to pack; with --verify, the packed folder"""
    output: Positional[Path | None] = None
    """folder to write, outside the other"""
    workers: Rare[int | None] = None
    """number of files that are written in parallel (default: slightly more than the number of cores)"""
    skip_broken: bool = False
    """leave out empty files, which are otherwise an error"""
    verify: bool = False
    """verify a packed folder"""


def run(arguments: list[str]) -> int:
    """Pack a folder, or verify a packed one."""
    options = parse(Pack, "pack", arguments)
    from graticule.lab.data.pack import pack, verify

    if options.verify:
        if options != Pack(options.folder, verify=True, workers=options.workers):
            raise ValueError(
                "`verify` must be given with --workers only, got other options: graticule pack OUTPUT --verify."
            )
        packed = verify(options.folder, workers=options.workers)
        print(printable(f"every file of {packed.folder} is unchanged"))
    elif options.output is None:
        raise ValueError("`output` must be given, the folder to write: graticule pack FOLDER OUTPUT.")
    else:
        packed = pack(options.folder, options.output, workers=options.workers, skip_broken=options.skip_broken)
        before = sum(packed.files.values()) - packed.written
        print(printable(f"wrote {packed.written} files to {packed.folder}") + (f"; {before} existed" if before else ""))
    for part, images in packed.images.items():
        print(f"{part:5}  {images} images in {packed.files[part]} files")
    if packed.left_out:
        print(printable(f"left out {len(packed.left_out)} empty files: {', '.join(packed.left_out[:10])}"))
    print(f"{packed.bytes / 1e9:.3f} GB in total")
    return 0
