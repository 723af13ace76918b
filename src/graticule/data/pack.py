"""Packing an image folder into shards: in parallel, to be gone on with, checked by counts and checksums."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graticule.data.encoded import LARGEST
from graticule.data.folder import SPLITS, folder_files
from graticule.data.images import Split
from graticule.data.parallel import check_workers, work
from graticule.data.shard_index import ShardIndex, index_file, read_index, write_index
from graticule.data.shards import CLASSES, PLAN, find_shards, read_plan
from graticule.files import locked, read_bytes, write_bytes, write_json, write_text, write_whole

_BLOCK = 512
_RECORD = 20 * _BLOCK
#: The folder of a split in what pack writes.
_FOLDERS = {part: names[0] for part, names in SPLITS.items()}
#: (file, size in bytes, label) of an image.
_Source = tuple[Path, int, int]
#: The file that every image comes from, one per line; the key of an image is the number of its line, from 0.
SOURCES = "files.txt"
#: What the plan calls `sources_digest`.
SOURCES_DIGEST = "sha256 of the list of files"


@dataclass(frozen=True)
class Packed:
    """What a folder of shards has: images and shards by split, and bytes of all.

    `left_out` are the files of no bytes that packing left out; `written` is how many shards this call made.
    """

    folder: Path
    images: dict[Split, int]
    shards: dict[Split, int]
    bytes: int
    left_out: tuple[Path, ...] = ()
    written: int = 0


@dataclass(frozen=True)
class _Shard:
    """A shard to be: `sources` are (file, size in bytes, label); the key of the first is `first`."""

    path: Path
    first: int
    sources: list[_Source]

    def names(self) -> tuple[str, ...]:
        numbered = enumerate(self.sources, start=self.first)
        return tuple(f"{number:09d}{path.suffix.lower()}" for number, (path, _, _) in numbered)

    def made(self) -> ShardIndex | None:
        """Return its index where it is there, whole, and of these files."""
        try:
            index = read_index(self.path)
        except (ValueError, OSError):
            return None
        if index is None or not index.sha256 or index.names != self.names():
            return None
        expected = [(size, label) for _, size, label in self.sources]
        return index if list(zip(index.sizes.tolist(), index.labels.tolist(), strict=True)) == expected else None


def pack(
    root: str | Path,
    output: str | Path,
    *,
    images_per_shard: int = 1000,
    workers: int | None = None,
    seed: int = 0,
    skip_broken: bool = False,
    progress: bool = True,
) -> Packed:
    """Pack an image folder, train and val, into shards below `output`; the bytes of the images stay as they are.

    The images are dealt out to the shards at random, so that each mixes the classes; the same folder, seed and
    options give the same shards, bit by bit. Stopped and started again, it goes on where it stood.

    Args:
        root: the folder, as the data set image_folder has it.
        output: folder of the shards, outside of `root`.
        images_per_shard: images a shard, at most; all shards of a split have as many, give or take one.
        workers: shards that are worked on at a time, each by a thread (default: one a core).
        seed: decides which image comes into which shard.
        skip_broken: leave out files of no bytes, which are an error otherwise.
        progress: show bars.

    Raises:
        ValueError, FileNotFoundError: for a folder that image_folder refuses, files of no bytes, or an `output` that
            was begun with other files or options.
        OSError: if something cannot be read or written.
    """
    root, output = Path(root), Path(output)
    if images_per_shard < 1:
        raise ValueError(f"`images_per_shard` must be at least 1, got {images_per_shard}.")
    if seed < 0:
        raise ValueError(f"`seed` must be at least 0, got {seed}.")
    workers = check_workers(workers)
    if output.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"`output` must not be in the folder that is packed, {root}, got {output}.")
    splits, names, left_out = _sources(root, skip_broken)
    if strange := [name for name in names if not name.isprintable()]:
        raise ValueError(f"`root` must have classes whose names can be printed, a line each, got {strange[0]!r}.")
    output.mkdir(parents=True, exist_ok=True)
    with locked(output) as alone:
        if not alone:
            raise ValueError(f"`output` must not be in use, got {output}, where another process is packing.")
        plan = {
            "images": {part: len(sources) for part, sources in splits.items()},
            "images_per_shard": images_per_shard,
            "seed": seed,
            "left_out": len(left_out),
            SOURCES_DIGEST: sources_digest(
                names,
                {
                    part: [(_name(path, root), size, label) for path, size, label in sources]
                    for part, sources in splits.items()
                },
            ),
        }
        _begin(output, plan)
        write_text(output / CLASSES, "".join(f"{name}\n" for name in names))
        todo = _deal_out(splits, output, images_per_shard, seed)
        for part in SPLITS:
            folder = output / _FOLDERS[part]
            folder.mkdir(exist_ok=True)
            for rest in folder.glob(".*.tmp"):  # of a process that was killed
                rest.unlink()
            lines = [_name(path, root) + b"\n" for shard in todo[part] for path, _, _ in shard.sources]
            write_bytes(folder / SOURCES, b"".join(lines))
        missing = [shard for shards in todo.values() for shard in shards if shard.made() is None]
        weights = [len(shard.sources) for shard in missing]
        work(_write_shard, missing, workers, about="packing", unit=" images", weights=weights, progress=progress)
        return _checked(output, todo, left_out, len(missing))


def _sources(root: Path, skip_broken: bool) -> tuple[dict[Split, list[_Source]], tuple[str, ...], tuple[Path, ...]]:
    """Find the images of the splits, the names of the classes, and the files that are left out."""
    names, files = folder_files(root)
    splits: dict[Split, list[_Source]] = {}
    empty: list[Path] = []
    for part, of_part in files.items():
        sized = [(path, path.stat().st_size, label) for path, label in of_part]
        if broken := [path for path, _, _ in sized if b"\n" in _name(path, root)]:
            raise ValueError(f"`root` must have files whose names are one line, got {str(broken[0])!r}.")
        empty += [path for path, size, _ in sized if size == 0]
        splits[part] = [source for source in sized if source[1] > 0]
        if lost := set(range(len(names))) - {label for _, _, label in splits[part]}:
            raise ValueError(
                f"`root` must have images in every class, got only files of no bytes in {names[min(lost)]}."
            )
    if empty and not skip_broken:
        listed = ", ".join(map(str, empty[:10])) + (", ..." if len(empty) > 10 else "")
        raise ValueError(
            f"`root` must have no files of no bytes, got {len(empty)}: {listed}. Fix or remove them, or leave them "
            "out with `skip_broken` (--skip-broken)."
        )
    return splits, names, tuple(empty)


def sources_digest(names: Sequence[str], files: Mapping[Split, Iterable[tuple[bytes, int, int]]]) -> str:
    """Return a checksum of what is packed: the classes, and name, size and label of every file, in whatever order."""
    digest = hashlib.sha256(repr(list(names)).encode("utf-8", "surrogateescape"))
    for part, of_part in files.items():
        for name, size, label in sorted(of_part):
            digest.update(f"{part} {label} {size} ".encode() + name + b"\n")
    return digest.hexdigest()


def _name(path: Path, root: Path) -> bytes:
    return os.fsencode(path.relative_to(root).as_posix())


def _begin(output: Path, plan: dict[str, Any]) -> None:
    """Write down what is packed, or see that it is what was begun."""
    if (output / PLAN).exists():
        begun = read_plan(output)
        if begun != plan:
            differing = [name for name in plan if begun is None or begun.get(name) != plan[name]]
            told = "; ".join(f"{name}: {(begun or {}).get(name)}, now {plan[name]}" for name in differing)
            raise ValueError(
                f"`output` must be as it was begun, got {output}, which was begun with other files or options "
                f"({told}). Remove it, or choose another."
            )
    elif found := sorted(path.name for path in output.iterdir() if not path.name.startswith(".")):
        raise ValueError(
            f"`output` must be empty or have been begun by pack, got {output} with {', '.join(found[:5])}."
        )
    else:
        write_json(output / PLAN, plan)


def _deal_out(
    splits: dict[Split, list[_Source]], output: Path, images_per_shard: int, seed: int
) -> dict[Split, list[_Shard]]:
    """Deal the images of every split out to its shards, at random."""
    dealt: dict[Split, list[_Shard]] = {}
    for part, sources in splits.items():
        order = np.random.default_rng([seed, len(dealt)]).permutation(len(sources))
        dealt[part], first = [], 0
        for number, chosen in enumerate(np.array_split(order, -(-len(sources) // images_per_shard))):
            path = output / _FOLDERS[part] / f"{number:06d}.tar"
            dealt[part].append(_Shard(path, first, [sources[index] for index in chosen.tolist()]))
            first += len(chosen)
    return dealt


def _write_shard(shard: _Shard) -> None:
    """Write a shard and then its index, each whole or not at all."""
    index_file(shard.path).unlink(missing_ok=True)  # a shard without one is not taken for whole
    digest, lengths = hashlib.sha256(), []

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            for piece in _pieces(shard):
                file.write(piece)
                digest.update(piece)
                lengths.append(len(piece))

    write_whole(shard.path, write)
    offsets = np.cumsum([0, *lengths])[:-1:2] + _BLOCK  # of the images: behind their headers, at every second piece
    sizes, labels = (np.asarray([source[column] for source in shard.sources]) for column in (1, 2))
    index = ShardIndex(
        shard.names(), offsets[: len(sizes)], sizes, labels, bytes=sum(lengths), sha256=digest.hexdigest()
    )
    write_index(shard.path, index)


def _pieces(shard: _Shard) -> Iterator[bytes]:
    """Yield a tar piece by piece: image, class, image, class, ..., end."""
    length = 0
    for name, (path, size, label) in zip(shard.names(), shard.sources, strict=True):
        content = read_bytes(path, LARGEST)
        if len(content) != size:
            raise ValueError(f"{path} must not change while it is packed, got {len(content)} bytes that were {size}.")
        for piece in (_member(name, content), _member(Path(name).with_suffix(".cls").name, str(label).encode())):
            length += len(piece)
            yield piece
    yield bytes(2 * _BLOCK + -(length + 2 * _BLOCK) % _RECORD)


def _member(name: str, content: bytes) -> bytes:
    """Return a member of a tar, the same for the same name and content, whenever and by whom it is made."""
    header = tarfile.TarInfo(name)
    header.size, header.mode = len(content), 0o644
    return header.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % _BLOCK)


def _checked(output: Path, dealt: dict[Split, list[_Shard]], left_out: tuple[Path, ...], written: int) -> Packed:
    """See that every shard is there, with the files that it should have, and no other."""
    indices = {shard.path: shard.made() for shards in dealt.values() for shard in shards}
    if bad := [str(path) for path, index in indices.items() if index is None]:
        raise ValueError(f"{output} must have every image once; {', '.join(bad[:5])} are not as they were written.")
    if foreign := [path for part in SPLITS for path in find_shards(output, part) if path not in indices]:
        raise ValueError(f"{output} must have the shards that were packed and no other, got {foreign[0]}.")
    return Packed(
        output,
        {part: sum(len(shard.sources) for shard in shards) for part, shards in dealt.items()},
        {part: len(shards) for part, shards in dealt.items()},
        sum(index.bytes for index in indices.values() if index),
        left_out,
        written,
    )
