"""Reading shards again, to see that they are as they were packed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

from graticule.data.folder import SPLITS
from graticule.data.pack import Packed
from graticule.data.parallel import check_workers, work
from graticule.data.shard_index import index_file, read_headers, read_index
from graticule.data.shards import PLAN, find_shards, read_plan


def verify(root: str | Path, *, workers: int | None = None, progress: bool = True) -> Packed:
    """Read all shards that `pack` made again, `workers` at a time, and hold them against checksums, indices and counts.

    Raises:
        ValueError: naming every shard that is not as it was packed, or if shards are missing.
        FileNotFoundError: if there are none.
    """
    root, workers = Path(root), check_workers(workers)
    plan = read_plan(root)
    if plan is None:
        raise FileNotFoundError(f"`root` must be a folder that graticule packed, with {PLAN}, got {root}.")
    paths = {part: find_shards(root, part) for part in SPLITS}
    every = [path for found in paths.values() for path in found]
    results = work(_verify_shard, every, workers, about="checking", unit=" shards", progress=progress)
    found = dict(zip(every, results, strict=True))
    bad = [problem for _, _, problem in found.values() if problem]
    images = {}
    for part, of_part in paths.items():
        images[part] = sum(found[path][0] for path in of_part)
        if not bad and images[part] != plan["images"][part]:
            bad.append(
                f"{images[part]} images for {part}, where {PLAN} says {plan['images'][part]}: shards are missing"
            )
    if bad:
        listed = "\n  ".join(bad)
        raise ValueError(f"{root} is not as it was packed; remove what is bad and pack again, to mend it:\n  {listed}")
    return Packed(
        root, images, {part: len(of_part) for part, of_part in paths.items()}, sum(n for _, n, _ in found.values())
    )


def _verify_shard(shard: Path) -> tuple[int, int, str]:
    """Read a shard again; returns its images, its bytes and what is wrong with it."""
    try:
        index = read_index(shard)
        if index is None or not index.sha256:
            return 0, 0, f"{shard} has no checksum of the packing"
        with shard.open("rb") as file:
            found = _hash(file)
        if found != index.sha256:
            return 0, 0, f"{shard} must have the checksum {index.sha256[:12]}..., got {found[:12]}..."
        if not index.same_images(read_headers(shard)):
            return 0, 0, f"{index_file(shard)} says of the images what is not so"
    except (ValueError, OSError) as error:
        return 0, 0, str(error)
    return len(index), index.bytes, ""


def _hash(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()
