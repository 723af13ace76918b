"""Pack images into Arrow files: in parallel, resumable, and verified by counts and checksums."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from tqdm.contrib.concurrent import thread_map

from graticule.lab.data.images import LARGEST, Split
from graticule.lab.data.sets.folder import SPLITS, folder_files
from graticule.lab.data.sets.hugging_face import DICT, PLAN, hugging_face, read_plan, read_rows
from graticule.lab.data.tars import Source, has_tars, tar_files
from graticule.lab.locks import locked
from graticule.lab.terminal import bar_class
from graticule.system.files import check_plain, write_json, write_text, write_whole

Item = TypeVar("Item")
Result = TypeVar("Result")

#: The file of checksums, in the format of the program sha256sum.
SUMS = "SHA256SUMS"
IMAGE, LABEL = "image", "label"
_FOLDERS: dict[Split, str] = {"train": "train", "test": "validation"}
#: Most bytes of images in a file, and in a batch of rows; each has at least one image.
_FILE_BYTES, _BATCH_BYTES = 1 << 28, 1 << 25


@dataclass(frozen=True)
class Packed:
    """Contents of a packed folder: images and files per split, and bytes of all files.

    `left_out` names the empty files that packing left out; `written` counts the files that this call wrote.
    """

    folder: Path
    images: dict[Split, int]
    files: dict[Split, int]
    bytes: int
    left_out: tuple[str, ...] = ()
    written: int = 0


@dataclass(frozen=True)
class _Part:
    """An Arrow file to write; `digest` is its checksum, if it was already packed."""

    path: Path
    sources: Sequence[Source]
    digest: str | None = field(default=None)


def pack(
    root: str | Path,
    output: str | Path,
    *,
    workers: int | None = None,
    skip_broken: bool = False,
    progress: bool = True,
) -> Packed:
    """Pack an image folder, or tar shards in WebDataset's format, into Arrow files that `hugging_face` loads.

    The bytes of the images and their order are unchanged, so training on the packed images equals training on the
    folder. The same source gives the same files, bit by bit. Packing that was interrupted is resumed by the same call;
    until it is finished, the folder cannot be loaded.

    Args:
        root: the folder, with train/CLASS/*.JPEG and val/CLASS/*.JPEG, or train/*.tar and val/*.tar.
        output: the folder to write, outside of `root`.
        workers: threads, each of which writes a file (default: slightly more than the number of cores).
        skip_broken: leave out empty files, which are otherwise an error.
        progress: show a progress bar.

    Raises:
        ValueError, FileNotFoundError: for a source that `image_folder` or `tar_files` refuses, empty files, or an
            `output` that contains something else or was begun with other files.
        OSError: if something cannot be read or written.
    """
    root, output = Path(root), Path(output)
    if output.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"`output` must not be in the folder that is packed, {root}, got {output}.")
    names, splits, left_out = _sources(root, skip_broken)
    counts = {part: len(sources) for part, sources in splits.items()}
    plan = {
        "images": counts,
        "left_out": len(left_out),
        "sha256 of the list of files": _digest_sources(names, splits),
    }
    output.mkdir(parents=True, exist_ok=True)
    with locked(output) as free:
        if not free:
            raise ValueError(f"`output` must not be in use, got {output}, which another process packs into.")
        _begin(output, plan)
        known = _read_sums(output)
        parts = [part for split, sources in splits.items() for part in _parts(output, split, sources, known)]
        results = each(_write, parts, "packing", workers, progress)
        sums = {
            part.path.relative_to(output).as_posix(): digest for part, (digest, _) in zip(parts, results, strict=True)
        }
        _finish(output, names, plan, sums)
        written = sum(new for _, new in results)
        return _packed(output, counts, [part.path for part in parts], left_out, written)


def verify(root: str | Path, *, workers: int | None = None, progress: bool = True) -> Packed:
    """Read all files that `pack` wrote, and compare them with the checksums and counts.

    Raises:
        ValueError: naming every file that is missing or has changed.
        FileNotFoundError: if `root` was not packed.
    """
    root = Path(root)
    if (plan := read_plan(root)) is None:
        raise FileNotFoundError(f"`root` must be a folder that graticule packed, with {PLAN}, got {root}.")
    if not (sums := _read_sums(root)):
        raise ValueError(f"{root} must be packed completely; run graticule pack again to resume.")
    paths = [root / name for name in sums]
    found = each(_checksum, paths, "verifying", workers, progress)
    bad = [str(path) for path, digest, right in zip(paths, found, sums.values(), strict=True) if digest != right]
    bad += [str(path) for path in sorted(root.rglob("*.arrow")) if path not in set(paths)]
    if bad:
        raise ValueError("\n  ".join([f"{root} changed since it was packed; remove these files and pack again:", *bad]))
    for split in SPLITS:
        hugging_face(split, root)  # compares the counts
    return _packed(root, plan["images"], [path for path in paths if path.suffix == ".arrow"])


def _packed(root: Path, images: dict[Split, int], arrows: list[Path], *more: Any) -> Packed:
    """Count the files of a packed folder and their bytes."""
    files = {split: sum(path.parent.name == folder for path in arrows) for split, folder in _FOLDERS.items()}
    return Packed(root, images, files, sum(path.stat().st_size for path in arrows), *more)


def each(
    function: Callable[[Item], Result], items: Sequence[Item], about: str, workers: int | None, progress: bool
) -> list[Result]:
    """Return `function` of every item, computed by threads: reading, writing and hashing release the GIL."""
    if workers is not None and workers < 1:
        raise ValueError(f"`workers` must be at least 1, got {workers}.")
    options: dict[str, Any] = {"tqdm_class": bar_class(), "disable": not progress}
    options |= {} if workers is None else {"max_workers": workers}
    return list(thread_map(function, items, desc=about, unit=" files", **options))


def _sources(root: Path, skip_broken: bool) -> tuple[tuple[str, ...], dict[Split, list[Source]], tuple[str, ...]]:
    """Find the names of the classes, the images of the splits, and the empty files, which are left out."""
    splits: dict[Split, list[Source]]
    if root.is_dir() and has_tars(root):
        names, tars = tar_files(root)
        splits = {
            split: [image._replace(name=_name(image.file / image.name, root)) for image in images]
            for split, images in tars.items()
        }
    else:
        names, files = folder_files(root)
        splits = {
            split: [Source(path, 0, check_plain(path), label, _name(path, root)) for path, label in images]
            for split, images in files.items()
        }
    every = [source for sources in splits.values() for source in sources]
    if huge := next((source for source in every if source.size > LARGEST), None):
        raise ValueError(f"{root / huge.name} must have at most {LARGEST:,} bytes, got {huge.size:,}.")
    empty = tuple(source.name for source in every if not source.size)
    if empty and not skip_broken:
        listed = ", ".join(empty[:10]) + (", ..." if len(empty) > 10 else "")
        raise ValueError(
            f"`root` must have no empty files, got {len(empty)}: {listed}. Fix or remove them, or leave them out with "
            "`skip_broken` (--skip-broken)."
        )
    for split, sources in splits.items():
        expected = {source.label for source in sources}
        splits[split] = [source for source in sources if source.size]
        if lost := expected - {source.label for source in splits[split]}:
            raise ValueError(f"`root` must have images in every class, got only empty files in {names[min(lost)]}.")
    return names, splits, empty


def _name(path: Path, root: Path) -> str:
    """Return the name of a file in `root`, as valid Unicode whatever its bytes are."""
    return os.fsencode(path.relative_to(root).as_posix()).decode("utf-8", "backslashreplace")


def _digest_sources(names: Sequence[str], splits: dict[Split, list[Source]]) -> str:
    """Return a checksum of the classes, and of the name, size and label of each image."""
    digest = hashlib.sha256(json.dumps(names).encode())
    for split, sources in splits.items():
        for source in sources:
            digest.update(json.dumps([split, source.name, source.size, source.label]).encode())
    return digest.hexdigest()


def _begin(output: Path, plan: dict[str, Any]) -> None:
    """Write `plan` to `output`, or check that it equals the plan that was begun there."""
    begun = read_plan(output)
    if begun is None:
        if found := sorted(path.name for path in output.iterdir() if not path.name.startswith(".")):
            raise ValueError(f"`output` must be empty or begun by pack, got {output} with {', '.join(found[:5])}.")
        write_json(output / PLAN, plan)
    elif begun != plan:
        differing = "; ".join(
            f"{key}: {begun.get(key)}, now {plan[key]}" for key in plan if begun.get(key) != plan[key]
        )
        raise ValueError(
            f"`output` must have been begun with the same files, got {output}, which was begun with others "
            f"({differing}). Remove it, or choose another."
        )
    for rest in output.glob("*/.*.tmp"):  # left by a process that was killed
        rest.unlink()


def _parts(output: Path, split: Split, sources: list[Source], known: dict[str, str]) -> list[_Part]:
    """Distribute the images of a split over files."""
    chunks = list(_chunks(sources, _FILE_BYTES))
    names = [f"{_FOLDERS[split]}/data-{number:05d}-of-{len(chunks):05d}.arrow" for number in range(len(chunks))]
    return [_Part(output / name, chunk, known.get(name)) for name, chunk in zip(names, chunks, strict=True)]


def _chunks(sources: Iterable[Source], limit: int) -> Iterator[list[Source]]:
    """Split into successive chunks of at most `limit` bytes, but of at least one image."""
    chunk: list[Source] = []
    size = 0
    for source in sources:
        if chunk and size + source.size > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append(source)
        size += source.size
    if chunk:
        yield chunk


def _features(names: Sequence[str]) -> dict[str, Any]:
    return {IMAGE: {"_type": "Image"}, LABEL: {"names": list(names), "_type": "ClassLabel"}}


_SCHEMA = pa.schema(
    [(IMAGE, pa.struct([("bytes", pa.binary()), ("path", pa.string())])), (LABEL, pa.int64())],
)


def _write(part: _Part) -> tuple[str, bool]:
    """Write a file, unless it exists completely; returns its checksum, and whether it was written."""
    if part.path.exists() and _is_whole(part):
        digest = _checksum(part.path)
        if part.digest in (None, digest):
            return digest, False

    def write(temporary: Path) -> None:
        with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_stream(file, _SCHEMA) as writer:
            for chunk in _chunks(part.sources, _BATCH_BYTES):
                images = [{"bytes": _content(source), "path": source.name} for source in chunk]
                rows = {IMAGE: images, LABEL: [source.label for source in chunk]}
                writer.write_batch(pa.RecordBatch.from_pydict(rows, schema=_SCHEMA))

    write_whole(part.path, write)
    return _checksum(part.path), True


def _content(source: Source) -> bytes:
    with source.file.open("rb") as file:
        file.seek(source.offset)
        content = file.read(source.size)
        whole = len(content) == source.size and (source.offset or not file.read(1))
    if not whole:
        raise ValueError(f"{source.file} must not change while it is packed, but its size changed.")
    return content


def _is_whole(part: _Part) -> bool:
    """Return whether a file has the expected rows."""
    try:
        rows = read_rows([part.path], IMAGE, LABEL)
    except (ValueError, OSError):
        return False
    found = list(zip(rows.sizes.tolist(), rows.labels.tolist(), strict=True))
    return found == [(source.size, source.label) for source in part.sources]


def _finish(output: Path, names: Sequence[str], plan: dict[str, Any], sums: dict[str, str]) -> None:
    """Write the descriptions of the files; the last one makes the folder loadable."""
    written: dict[str, dict[str, Any]] = {}
    for folder in _FOLDERS.values():
        written[f"{folder}/state.json"] = {
            "_data_files": [{"filename": Path(name).name} for name in sums if Path(name).parent.name == folder],
            "_fingerprint": hashlib.sha256(json.dumps([plan, folder]).encode()).hexdigest()[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": folder,
        }
        written[f"{folder}/dataset_info.json"] = {"features": _features(names)}
    written[DICT] = {"splits": list(_FOLDERS.values())}
    texts = {name: json.dumps(values, indent=2) + "\n" for name, values in written.items()}
    sums = sums | {PLAN: _checksum(output / PLAN) or ""}
    sums |= {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    texts = {SUMS: "".join(f"{digest}  {name}\n" for name, digest in sums.items())} | texts  # DICT stays the last
    for name, text in texts.items():
        write_text(output / name, text)


def _checksum(path: Path) -> str:
    """Return the checksum of a file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _read_sums(output: Path) -> dict[str, str]:
    """Read the checksums of a packed folder; empty if packing was not finished."""
    path = output / SUMS
    try:
        check_plain(path)
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    found = dict(line.split("  ", 1)[::-1] for line in lines if "  " in line)
    if len(found) < len(lines) or any(".." in Path(name).parts or Path(name).is_absolute() for name in found):
        raise ValueError(f"{path} is damaged: it must have a checksum and a file per line. Remove it and pack again.")
    return found
