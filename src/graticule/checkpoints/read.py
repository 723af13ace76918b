"""Read weights from untrusted files, and write weights."""

from __future__ import annotations

import argparse
import json
import pickle
import re
import struct
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from graticule.registry.checks import checked
from graticule.system.files import write_whole

#: Entries of the metadata of a state dict: the grid of each table, the encoding and the joining of the model, and the
#: image sizes that are named beside the weights.
GRIDS, POSITION, SIZES = "grids", "position", "sizes"
#: Names under which the files of DeiT, timm, Lightning and transformers have the size of images, in pixels.
_NAMES_OF_SIZES = ("img_size", "image_size", "input_size")
#: Exceptions of the readers for a file that is damaged or of another kind.
_UNREADABLE = (
    *(RuntimeError, EOFError, SafetensorError, OSError, ValueError, KeyError, IndexError, AttributeError),
    *(struct.error, TypeError, AssertionError, pickle.UnpicklingError, MemoryError),
)
#: Bytes of a file that fits into memory, so that if it does not, it states a wrong length.
_SMALL = 1 << 28


@checked
def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a `.safetensors` file or one that `torch.save` wrote, without running any code that is in it.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is truncated, of another kind, or contains more than tensors and plain values.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"`path` must be a checkpoint file, got {str(path)!r}, which does not exist.")
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        with warnings.catch_warnings():  # the unpickler warns about objects that it then refuses
            warnings.simplefilter("ignore")
            # DeiT's and LaPE's code store the options of the run in checkpoints, as an argparse.Namespace: plain data
            with torch.serialization.safe_globals([argparse.Namespace]):
                contents = torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        if isinstance(error, MemoryError) and path.stat().st_size > _SMALL:
            raise
        unsafe: set[str] = set()  # objects other than plain data, as far as they can be listed without code
        with suppress(*_UNREADABLE):
            unsafe = {*torch.serialization.get_unsafe_globals_in_checkpoint(path)} - {"argparse.Namespace"}
        if unsafe:
            raise ValueError(
                f"{path} holds Python objects that could run code when read ({', '.join(sorted(unsafe)[:3])}), so it "
                "was not read; ask for its weights alone, best as .safetensors."
            ) from None
        raise ValueError(
            f"{path} is not a checkpoint of PyTorch or safetensors, or it is truncated; copy it again."
        ) from None
    if not isinstance(contents, Mapping):
        raise ValueError(f"{path} must hold a mapping of names to tensors, got {type(contents).__name__}.")
    return contents if isinstance(contents, dict) else dict(contents)


def save_weights(state: Mapping[str, Tensor], path: Path) -> Path:
    """Write a state dict as .safetensors, completely or not at all, and return `path`.

    Its metadata are the grid of each table, and the encoding and the joining of the model.

    Equal weights give equal bytes, so that the hash of the file is a fingerprint.

    Raises:
        OSError: if it cannot be written; an existing file at `path` is then unchanged.
    """
    check_whole(state)
    tensors = {name: value.contiguous() for name, value in state.items()}
    recorded = {name: value for name, value in read_metadata(state).items() if name != SIZES}
    metadata = {"format": "pt", **{entry: json.dumps(value, sort_keys=True) for entry, value in recorded.items()}}

    def write(temporary: Path) -> None:
        save_file(tensors, temporary, metadata)
        with temporary.open("r+b") as file:  # its header has the metadata in a random order
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
            file.seek(8)
            file.write(json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(length))

    return write_whole(path, write)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is not a mapping)
        metadata = file.metadata() or {}
    recorded = {}
    for entry in (GRIDS, POSITION):
        with suppress(ValueError, RecursionError):  # an entry of another program with the same name
            recorded[entry] = json.loads(metadata.get(entry, "{}"))
    return with_metadata(tensors, valid_metadata({**recorded, SIZES: _image_sizes(metadata)}))


def _image_sizes(contents: Any) -> list[tuple[int, int]]:
    """Return the image sizes (height, width) that entries beside the weights name, such as training arguments."""
    sizes, seen, left = dict[tuple[int, int], None](), dict[int, Any](), [contents]
    while left:
        part = left.pop()
        if isinstance(part, str) and part[:1] == "{":  # an entry of the metadata of a .safetensors file
            with suppress(ValueError, RecursionError):
                part = json.loads(part)
        part = vars(part) if isinstance(part, argparse.Namespace) else part
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen[id(part)] = part
        left.extend(value for value in part.values() if not isinstance(value, Tensor))
        for size in [part.get(name) for name in _NAMES_OF_SIZES]:
            size = [int(side) for side in re.findall(r"\d+", size)] if isinstance(size, str) else size
            size = tuple(size[-2:]) if isinstance(size, list | tuple) else (size, size)
            if _is_size(size):
                sizes[size] = None
    return [*sizes][:8]


def _is_size(size: object) -> TypeGuard[tuple[int, int]]:
    return isinstance(size, tuple) and len(size) == 2 and all(type(side) is int and 0 < side < 1 << 16 for side in size)


def read_state(source: str | Path | Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state dict in `source`, a checkpoint file or its contents, with its names unchanged.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it cannot be read, or nothing in it maps names to tensors.
    """
    if isinstance(source, Mapping):
        return unwrap_checkpoint(source)
    checkpoint = read_checkpoint(source)
    try:
        return unwrap_checkpoint(checkpoint)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def check_whole(source: nn.Module | Mapping[str, Tensor], name: str = "model", values: bool = True) -> None:
    """Check that no tensor of a model or a state dict is sharded, and unless `values` is False that each has values."""
    tensors = source.items() if isinstance(source, Mapping) else [*source.named_parameters(), *source.named_buffers()]
    for at, tensor in tensors:
        if getattr(tensor, "device_mesh", None) is not None:
            raise ValueError(
                f"`{name}` must have whole tensors, got {at}, which is a DTensor; do this before `fully_shard`, "
                "or with the state dict of `get_model_state_dict` with `full_state_dict=True` in an unsharded model."
            )
        if values and isinstance(tensor, Tensor) and tensor.is_meta:
            raise ValueError(
                f"`{name}` must have values, got {at} on the meta device; call `to_empty` and `load_state_dict` first."
            )


def unusable(value: Tensor) -> str:
    """Describe why a tensor of a checkpoint cannot be used; '' if it is dense and every value is stored."""
    if value.is_quantized:
        return "quantized"
    if value.layout != torch.strided:
        return "sparse"
    if value.is_meta:
        return "without values"
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        return "a view that repeats its values"  # so a few bytes could pretend to be any number of values
    return ""


def kind(value: Tensor) -> str:
    """Return the kind of number in a tensor; dtypes of one kind differ only by rounding."""
    if value.is_floating_point():
        return "floating point"
    return "complex" if value.is_complex() else "truth" if value.dtype == torch.bool else "integer"


def dtype_name(value: Tensor) -> str:
    """Return the name of a tensor's dtype, such as 'float32'."""
    return str(value.dtype).removeprefix("torch.")


def read_metadata(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Read the well-formed entries of the metadata of a state dict."""
    metadata = getattr(state, "_metadata", None)
    return valid_metadata(metadata.get(prefix.removesuffix(".")) if isinstance(metadata, Mapping) else None)


def valid_metadata(metadata: object) -> dict[str, Any]:
    """Return the well-formed entries of the metadata of a checkpoint, whose author may be unknown.

    They are (H, W) of the grid of each table, as far as it is recorded, the encoding and the joining, and image sizes.
    """
    entries = metadata if isinstance(metadata, Mapping) else {}
    grids, words = (entry if isinstance(entry := entries.get(name), Mapping) else {} for name in (GRIDS, POSITION))
    sizes = entries.get(SIZES)
    valid: dict[str, Any] = {GRIDS: {}, SIZES: [*filter(_is_size, sizes)] if isinstance(sizes, list) else []}
    for name, shape in grids.items():
        is_shape = isinstance(shape, list | tuple) and shape and all(type(side) is int and side > 0 for side in shape)
        if isinstance(name, str) and is_shape:
            valid[GRIDS][name] = tuple(shape)
    if set(words) == {"encoding", "joining"} and all(isinstance(word, str) for word in words.values()):
        valid[POSITION] = dict(words)
    return valid


def unwrap_checkpoint(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state dict in a checkpoint: its entry `state_dict_ema`, `model` or `state_dict`, or the checkpoint.

    timm's training stores the moving average, which it evaluates, under `state_dict_ema`. The prefix `module.` of
    names is removed.
    """
    state = checkpoint
    for key in ("state_dict_ema", "model", "state_dict", "model_state_dict", "model_state"):
        if isinstance(state.get(key), Mapping):
            state = state[key]
            break
    tensors = {name: value for name, value in state.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if not tensors:  # a training checkpoint may hold the state dict of each network
        parts = [(name, *item) for name, part in state.items() if isinstance(part, Mapping) for item in part.items()]
        tensors = {f"{part}.{name}": value for part, name, value in parts if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(
            f"`source` must map names to tensors, directly or under 'model' or 'state_dict', got the keys "
            f"{', '.join(map(repr, list(state)[:5])) or '(none)'}."
        )
    wrappers, removed = ("module.", "_orig_mod.", "model."), ""
    while wrapper := next((w for w in wrappers if all(name.startswith(w) for name in tensors)), None):
        tensors = {name.removeprefix(wrapper): value for name, value in tensors.items()}
        removed += wrapper
    metadata = read_metadata(state, removed)
    return with_metadata(tensors, metadata | {SIZES: metadata[SIZES] or _image_sizes(checkpoint)})


def with_metadata(tensors: Mapping[str, Tensor], recorded: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a state dict of `tensors` with these entries in its metadata."""
    state = OrderedDict(tensors)
    state.__dict__["_metadata"] = {"": dict(recorded)}
    return state
