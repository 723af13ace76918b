"""Read shards again and check that they are as they were packed."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from graticule.data.folder import SPLITS
from graticule.data.images import Split
from graticule.data.pack import SOURCES, SOURCES_DIGEST, Packed, sources_digest
from graticule.data.parallel import check_workers, work
from graticule.data.shard_index import ShardIndex, index_file, read_headers, read_index
from graticule.data.shards import CLASSES, PLAN, class_names, find_shards, read_plan
from graticule.files import read_bytes


def verify(root: str | Path, *, workers: int | None = None, progress: bool = True) -> Packed:
    """Read all shards that `pack` made again, `workers` at a time, and compare them with checksums, indices and counts.

    Names of classes and of files are compared as well, with a checksum that `pack` wrote down.

    Raises:
        ValueError: naming every file that is not as it was packed, or if shards are missing.
        FileNotFoundError: if there are none.
    """
    root, workers = Path(root), check_workers(workers)
    plan = read_plan(root)
    if plan is None:
        raise FileNotFoundError(f"`root` must be a folder that graticule packed, with {PLAN}, got {root}.")
    paths = {part: find_shards(root, part) for part in SPLITS}
    every = [path for found in paths.values() for path in found]
    results = work(_verify_shard, every, workers, about="checking", unit=" shards", progress=progress)
    bad = [problem for _, problem in results if problem]
    found = {path: index for path, (index, _) in zip(every, results, strict=True) if index is not None}
    images = {part: sum(len(found[path]) for path in of_part if path in found) for part, of_part in paths.items()}
    if not bad:
        bad = [
            f"{count} images for {part}, where {PLAN} says {plan['images'][part]}: shards are missing"
            for part, count in images.items()
            if count != plan["images"][part]
        ]
    if not bad and (
        problem := _verify_names(root, {part: [found[path] for path in paths[part]] for part in SPLITS}, plan)
    ):
        bad = [problem]
    if bad:
        listed = "\n  ".join(bad)
        raise ValueError(f"{root} is not as it was packed; remove what is bad and pack again, to fix it:\n  {listed}")
    shards = {part: len(of_part) for part, of_part in paths.items()}
    return Packed(root, images, shards, sum(index.bytes for index in found.values()))


def _verify_shard(shard: Path) -> tuple[ShardIndex | None, str]:
    """Read a shard again; returns its index, or what is wrong with it."""
    try:
        index = read_index(shard)
        if index is None or not index.sha256:
            return None, f"{shard} has no checksum of the packing"
        with shard.open("rb") as file:
            found = _hash(file)
        if found != index.sha256:
            return None, f"{shard} must have the checksum {index.sha256[:12]}..., got {found[:12]}..."
        if not index.same_images(read_headers(shard)):
            return None, f"{index_file(shard)} describes other images than are in the shard"
    except (ValueError, OSError) as error:
        return None, str(error)
    return replace(index, names=()), ""


def _verify_names(root: Path, indices: dict[Split, list[ShardIndex]], plan: dict[str, Any]) -> str:
    """Compare the names of classes and files with the checksum of the plan; returns what is wrong."""
    files: dict[Split, list[tuple[bytes, int, int]]] = {}
    try:
        for part, found in indices.items():
            path = root / SPLITS[part][0] / SOURCES
            sizes, labels = (np.concatenate([getattr(index, key) for index in found]) for key in ("sizes", "labels"))
            lines = read_bytes(path, (1 << 20) + 4096 * len(sizes)).removesuffix(b"\n").split(b"\n")
            if len(lines) != len(sizes):
                return f"{path} must name {len(sizes)} files, got {len(lines)}"
            files[part] = list(zip(lines, sizes.tolist(), labels.tolist(), strict=True))
        same = sources_digest(class_names(root), files) == plan.get(SOURCES_DIGEST)
    except (ValueError, OSError) as error:
        return str(error)
    return "" if same else f"{root / CLASSES} or a {SOURCES} names other classes or files than were packed"


def _hash(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()
