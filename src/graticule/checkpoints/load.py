"""Load a checkpoint into a model, completely or not at all, with a reason if it does not fit; published names."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Mapping
from math import isqrt
from operator import floordiv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graticule.checkpoints.layouts import FileTensors, own_tensors, renamed, say_unused
from graticule.checkpoints.read import (
    GRIDS,
    POSITION,
    SIZES,
    check_whole,
    dtype_name,
    kind,
    read_metadata,
    read_state,
    unusable,
    valid_metadata,
    with_metadata,
)
from graticule.encodings.forms.absolute import AbsoluteEncoding, FixedEncoding
from graticule.position.grid_module import GridModule
from graticule.position.joining import JOININGS, Default
from graticule.position.places import Shape, by
from graticule.position.position import ENCODINGS, Position
from graticule.registry.checks import checked, printable
from graticule.registry.registry import Registry
from graticule.registry.specs import Spec

#: Buffers of published code that are computed here.
_COMPUTED = ("relative_position_index", "rel_indices")


class PublishedNames(nn.Module):
    """A module with a `position`, whose weights are published under other names, or in another layout.

    A family overrides the methods in which its public code differs; position parameters have the names of their
    encoding (`Position.published_names`).
    """

    position: Position

    def own_name(self, published: str) -> str:
        """Return our name for a parameter that published checkpoints call `published`, except position parameters."""
        return published

    def published_name(self, name: str) -> str:
        """Return the name of a parameter in published checkpoints."""
        return name

    def own_layout(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict of the family's public code in our layout, any other one unchanged."""
        return state

    def released_layout(self) -> dict[str, Tensor]:
        """Return the state dict in the layout of the family's public code."""
        return renamed_state_dict(self)


@checked
def load_checkpoint(model: nn.Module, path: str | Path, grid: tuple[int, ...] | None = None) -> nn.Module:
    """Load the weights at `path` into `model`, completely or not at all, and return the model.

    Accepts checkpoints of this library, DeiT, timm and LaPE's code, and other checkpoints that timm's filters know,
    also as a part of a larger file (`teacher.backbone.`, `encoder.`). A warning names what else is in the file.
    Position parameters of another grid or window are resampled if their encoding can be. State dicts of this library
    record the grid of each table, in files of `torch.save` and in the weights of a run. Other checkpoints do not: a
    table of as many rows as the model's is for the model's grid, any other one for a square if it can be, and a warning
    says so. A fixed table that is not in the file is computed, and a table of another formula is refused.

    Args:
        model: one of our backbones.
        path: a checkpoint.
        grid: (H, W) of the table in the file, in patches, or of its window, if the file does not record it; of a
            pyramid the grid of the first stage.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file cannot be read, or does not fit: names missing, names left over, other shapes
            (a class count that does not match is named as such), tensors that are sparse, quantized, without values
            or of another kind of number than the model's, values that are not finite. The model is then unchanged.
    """
    position_of(model)
    file = _own_part(model, path, grid)
    load_all(model, file.tensors, path, file.sources)
    say_unused(path, file.unused)
    return model


@checked
def load_own(model: nn.Module, path: str | Path) -> nn.Module:
    """Load weights under the names of the `state_dict` of `model`, which can be any module, and return the model.

    Args:
        model: a module, such as a detector, which contains a backbone.
        path: a checkpoint of a model that was built in the same way; refused as by `load_checkpoint`.
    """
    state = _read_usable(path)
    if all(name.startswith("model.") for name in model.state_dict()):  # reading removed this as the prefix of a wrapper
        state = {f"model.{name}": value for name, value in state.items()}
    return load_all(model, state, path)


@checked
def load_position(model: nn.Module, path: str | Path) -> nn.Module:
    """Load only the position parameters of the checkpoint at `path` into `model`, and return the model.

    For example, a PEG that was learned in one training can start another (CPVT, 2023, section 5.1). Parameters that do
    not fit are refused as by `load_checkpoint`.
    """
    position = position_of(model)
    state = _own_part(model, path).tensors
    values = {name.removeprefix("position."): value for name, value in state.items() if name.startswith("position.")}
    complaints = misfits(position, values)
    if complaints or not values:
        reasons = "; ".join(complaints) or "neither has any"
        raise ValueError(f"the position parameters of {path} do not fit {type(model).__name__}: {reasons}.")
    position.load_state_dict(values)
    return model


def load_all(model: nn.Module, state: Mapping[str, Tensor], source: object, names: Any = None) -> nn.Module:
    """Load all of `state`, which `source` contains under `names`, into `model`, and return the model."""
    check_whole(model)
    if complaints := misfits(model, state, names):
        raise ValueError(f"{source} does not fit {type(model).__name__}: " + "; ".join(complaints) + ".")
    model.load_state_dict(state)
    return model


def _read_usable(path: str | Path) -> dict[str, Tensor]:
    """Read the checkpoint at `path` as a state dict of plain tensors."""
    state = read_state(path)
    for name, value in state.items():
        if why := unusable(value):
            raise ValueError(f"{path}: {_abbreviate(name)} must be a plain tensor, got one that is {why}.")
    return state


def _own_part(model: Any, path: str | Path, grid: tuple[int, ...] | None = None) -> FileTensors:
    """Read the checkpoint at `path` under the names of `model`, for its grids."""
    state = _read_usable(path)
    try:
        file = _fit(model, state, path, grid)
    except ValueError as error:
        if str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path} does not fit {type(model).__name__}: {error}") from None
    if not any(name.startswith(f"{file.prefix}position.") for name in state):
        targets = {f"position.{target}": name for name, target in reversed(model.position.published_names().items())}
        missing = model.state_dict().keys() - file.tensors.keys()
        file.sources.update((name, file.prefix + model.published_name(targets.get(name, name))) for name in missing)
    return file._replace(tensors=with_metadata(file.tensors, {GRIDS: _own_grids(model)}))


def misfits(model: nn.Module, state: Mapping[str, Tensor], names: Mapping[str, str] | None = None) -> list[str]:
    """Describe, in at most four items, why `state` cannot be loaded into `model`; `names` are the names in the file."""
    expected = model.state_dict()
    complaints = []
    called = names or {}
    for key, value in state.items():
        if key not in expected:
            continue
        target, name = expected[key], called.get(key, key)
        if value.shape != target.shape:
            if name.startswith("head") and value.shape[1:] == target.shape[1:] and value.ndim:
                complaints.append(
                    f"it has {value.shape[0]} classes where the model has {target.shape[0]} ({name}); create the "
                    f"model with num_classes={value.shape[0]} and use reset_classifier afterwards"
                )
                break
            complaints.append(f"{name} is {tuple(value.shape)} where the model has {tuple(target.shape)}")
            if name.endswith("pos_embed") and value.shape[-1:] == target.shape[-1:]:
                complaints[-1] += "; give its grid of patches as `grid`, if that is it"
        elif kind(value) != kind(target):
            complaints.append(f"{name} is {dtype_name(value)} where the model has {dtype_name(target)}")
        elif count := int((~value.to(target.dtype).isfinite()).sum()):
            complaints.append(f"{name} has {count:,} values that are not finite as {dtype_name(target)}")
    for what, others in (
        ("lacks", expected.keys() - state.keys()),
        ("has, unlike the model,", state.keys() - expected.keys()),
    ):
        if others:
            first = ", ".join(_abbreviate(called.get(name, name)) for name in sorted(others)[:4])
            complaints.append(f"it {what} {first}" + (f" and {len(others) - 4} more" if len(others) > 4 else ""))
    return complaints[:4]


def _abbreviate(name: str) -> str:
    """Return a name in a form that fits into a message of one line."""
    return printable(name if len(name) <= 100 else f"{name[:100]}...")


def position_of(model: nn.Module) -> Position:
    """Return the position of a backbone."""
    position = getattr(model, "position", None)
    if not isinstance(position, Position):
        raise ValueError(
            f"`model` must be a backbone with a `position`, got {type(model).__name__}; graticule.convert "
            "makes one from a timm or transformers model."
        )
    return position


def register_names(model: Any) -> None:
    """Let `load_state_dict` of `model` accept published names and other grids, and `state_dict` record the grids."""
    model.register_load_state_dict_pre_hook(rename_published)
    model.register_load_state_dict_pre_hook(leave_meta)
    model.register_state_dict_post_hook(_keep_grids)


def leave_meta(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *_: Any
) -> None:
    """Compute the buffers of positions where the weights are that are assigned to a model on the meta device."""
    if local_metadata.get("assign_to_params_buffers"):
        weights = (value for name, value in state_dict.items() if name.startswith(prefix))
        like = next((value for value in weights if value.is_floating_point()), torch.empty(0))
        for part in module.modules():
            if isinstance(part, GridModule) and any(value.is_meta for value in part.buffers(recurse=False)):
                part.init_non_persistent_buffers(like.device, like.dtype)


def rename_published(
    module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any] | None = None, *_: Any
) -> None:
    """Rename published names to ours and resample tables, in place; a `load_state_dict` pre-hook.

    The rules are the same as for `load_checkpoint`. `local_metadata` records the grid of each table if this library
    made the state dict. Warnings name tables that are resampled or whose grid is assumed, tensors that are not used,
    and weights that were trained with another encoding or joining, which may have the same names and shapes.
    """
    names = [name for name in state_dict if name.startswith(prefix)]
    values = {name.removeprefix(prefix): state_dict.pop(name) for name in names}
    values = _fit(module, with_metadata(values, valid_metadata(local_metadata))).tensors
    state_dict.update({prefix + name: value for name, value in values.items()})


def _fit(module: Any, state: dict[str, Any], source: Any = None, first: Shape | None = None) -> FileTensors:
    """Return the tensors of a file under our names, for the grids of the model; name the others if it has no path."""
    file = own_tensors(module, state, source or "the file")
    if source is None:
        say_unused("the file", file.unused)
    values, names, recorded = file.tensors, file.sources, file.metadata
    trained, words = recorded.get(POSITION), _words(module)
    if trained and words and any(_plain(word, text) != _plain(word, words[word]) for word, text in trained.items()):
        other, current = (f"encoding {pair['encoding']!r} and joining {pair['joining']!r}" for pair in (trained, words))
        _warn(f"the weights are of a model with {other}, the model has {current}.")
    for note in fold_prefix_rows(module, values).values():
        _warn(note)
    position: Any = module.position
    grids = table_grids(position, file, first)
    own_grids, changes = position.table_shapes(), Counter[str]()
    for name, parameter in position.named_parameters():
        target = f"position.{name}"
        value, own_grid, (encoding, leaf) = values.get(target), own_grids.get(name), position.holder_of(name)
        if value is None and isinstance(encoding, FixedEncoding) and not parameter.is_meta:  # others compute it
            values[target] = parameter.detach()
        if not isinstance(value, Tensor) or getattr(value, "device_mesh", None) is not None:  # sharded as the model is
            continue
        grid = grids.get(target)
        fitted = position.fit(name, value, grid)
        values[target] = parameter.detach() if fitted is None else fitted
        if own_grid is None or fitted is value:
            continue
        before = grid or getattr(encoding.grid_of(leaf, value, None), "shape", None)
        change = f"from {by(before) if before else tuple(value.shape)} to {by(own_grid)} patches"
        if before == own_grid or (before is None and fitted is not None and value.numel() == fitted.numel()):
            continue
        if not isinstance(encoding, FixedEncoding):
            changes[change] += fitted is not None
        elif not names[target].endswith(target):
            how = "by the formula, not resampled as in the code of T2T-ViT; encoding='learnable' resamples it"
            _warn(f"{names[target]} is computed {change} {how}.")
    if changes:
        counts = ", ".join(f"{count} {change}" for change, count in changes.items())
        _warn(f"the position tables of the checkpoint are resampled: {counts}.")
    windows = {}
    for name, buffer in position.named_buffers():
        if name.rpartition(".")[2].startswith("reference") and f"position.{name}" not in values:
            values[f"position.{name}"] = buffer  # which other libraries do not save
            windows[by(buffer.flatten().tolist())] = name.endswith(".reference")
    arguments = (getattr(module, "created", None) or {}).get("arguments", {})
    if any(windows.values()) and "window_size" in arguments and "pretrained_window_sizes" not in arguments:
        assumed = f"{', '.join(windows)} is assumed, as in the model; give others as `pretrained_window_sizes`"
        _warn(f"{source or 'the file'} does not say the windows that it was trained with: {assumed}.")
    return file._replace(tensors={name: value for name, value in values.items() if not name.endswith(_COMPUTED)})


def table_grids(position: Position, file: FileTensors, first: Shape | None) -> dict[str, Shape]:
    """Return the (H, W) of the tables of a file, as recorded or as it follows from the first stage.

    That of a table that was replaced after its grid was recorded is left out. `first` is halved as often as fits;
    without it, and where no grid is recorded, so are the grids of the image sizes that the file names.
    """
    grids, assumed = dict[str, Shape](), dict[str, str]()
    values, recorded = file.tensors, file.metadata[GRIDS]
    stages = _halved(first) if first else []
    kernel = values.get("patch_embed.proj.weight")
    steps = kernel.shape[2:] if isinstance(kernel, Tensor) and kernel.ndim == 4 and not first else ()
    sizes = file.metadata[SIZES] if steps else []
    named = [_halved(tuple(map(floordiv, size, steps))) for size in sizes]
    used = not first
    for name, grid in position.table_shapes().items():
        target, (module, leaf) = f"position.{name}", position.holder_of(name)
        value, known = values.get(target), recorded.get(target, ())
        if not isinstance(value, Tensor) or module is None:
            continue
        stage = int(name.split(".")[1]) if name.startswith("stages.") else 0
        tried = dict.fromkeys([known, *stages] if known else [*stages, *(shapes[stage] for shapes in named)])
        shapes: list[Any] = [shape for shape in tried if _is_of(module, leaf, value, shape)]
        halved = next((shape for shape in stages if shape in shapes), None)
        if halved and known in shapes and halved != known:
            raise ValueError(f"`grid` must be that which the file records for {target}, {by(known)}.")
        used |= halved is not None
        if shapes and (halved or known or len(shapes) == 1):
            grids[target] = halved or known or shapes[0]
        elif _is_of(module, leaf, value, grid) and any(_is_of(module, leaf, value, shape) for shape in _others(grid)):
            assumed.setdefault(by(grid), file.sources.get(target, target))
    for shape, name in assumed.items():
        _warn(f"{name} does not say what grid it is for: {shape}, as in the model, is assumed; `grid` gives another.")
    if not used:
        raise ValueError(f"`grid` must be the grid of a table in the file, in patches, got {first}.")
    return grids


def _is_of(module: GridModule, name: str, value: Tensor, shape: Any) -> bool:
    """Return whether the value of a parameter may be for a grid of this shape."""
    grid = module.grid_of(name, value, shape)
    return grid is not None and grid.shape == shape


def _others(shape: Shape) -> list[Shape]:
    """Return other grids of as many patches, no more oblong than this one, or than 1 : 2; of a square, the usual, none.

    >>> _others((3, 8)), _others((2, 8)), _others((4, 6))
    ([(4, 6)], [(4, 4)], [])
    """
    *first, height, width = (1, *shape)
    count, (least, most) = height * width, sorted((height, width))
    pairs = [(side, count // side) for side in range(2, isqrt(count) + 1) if count % side == 0 and side != least < most]
    return [(*first[1:], *pair) for pair in pairs if pair[1] <= pair[0] * max(2, most / least)]


def _halved(shape: Shape) -> list[Shape]:
    """Return the grids of eight stages; the first has `shape`, and odd sides are padded."""
    return [tuple(-(-side >> stage) for side in shape) for stage in range(8)]


def fold_prefix_rows(model: Any, values: dict[str, Any]) -> dict[str, str]:
    """Add rows of prefix tokens to these, in place, where the model's table has none; returns a note by table."""
    notes: dict[str, str] = {}
    for name, module in model.position.named_modules():
        table = values.get(target := f"position.{name}.pos_embed")
        has_rows = not isinstance(module, AbsoluteEncoding) or getattr(module, "prefix_rows", True)
        if has_rows or table is None or unusable(table) or table.ndim < 2:
            continue
        known = {token: values[token] for token in ("cls_token", "dist_token") if isinstance(values.get(token), Tensor)}
        tokens = [token for token, value in known.items() if value.shape == (1, 1, module.dim) and not unusable(value)]
        rows, patches = table[..., : len(tokens), :], table[..., len(tokens) :, :]
        grid = module.grid_of("pos_embed", patches, None)
        if tokens and grid and (grid == module.grid or not module.grid_of("pos_embed", table, None)):
            joining = model.position.get_submodule(f"{name.rpartition('encodings.')[0]}joining")
            added = [token for token in tokens if token in model.state_dict() and isinstance(joining, Default)]
            values |= {token: values[token] + rows[..., tokens.index(token), :] for token in added}
            values[target] = patches
            change = f"added to {', '.join(added)}" if added else "left out"
            notes[target] = f"the rows of {', '.join(tokens)} in {target} are {change}"
    return notes


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def _words(module: Any) -> dict[str, str] | None:
    """Return the encoding and the joining that a model was built with; None if it was built in another way."""
    arguments = (getattr(module, "created", None) or {}).get("arguments", {})
    words = {name: arguments.get(name) for name in ("encoding", "joining")}
    return words if all(isinstance(word, str) for word in words.values()) else None


#: Options that weights do not depend on, or that are a part of them.
_LEFT_OUT = ("resampler", "std", "frozen", "shift", "local_shift", "rescale", "reference")


def _plain(word: str, text: str) -> list[str]:
    """Return the sorted specs of an encoding or a joining with the options, not by default, that weights depend on."""
    registry: Registry[Any] = ENCODINGS if word == "encoding" else JOININGS
    try:
        specs = registry.specs(text)
    except ValueError:  # of a plugin that is not loaded
        return [text]
    plain = []
    for spec in specs:
        defaults = {name: option.default for name, option in registry.options(spec.name).items()}.items()
        options = {n: v for n, v in spec.options.items() if n not in _LEFT_OUT and (n, v) not in defaults}
        plain.append(str(Spec(spec.name, options)))
    return sorted(plain)


def own_state(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and resample the state dict of a checkpoint for `model`."""
    check_whole(model)
    return with_metadata(_fit(model, state).tensors, {GRIDS: _own_grids(model)})


def published_state_dict(model: Any) -> dict[str, Tensor]:
    """Return the state dict of `model` in the form of its family's public code: timm, DeiT, LaPE, PVT, Twins, PosMLP.

    So timm can load a model with a learnable encoding and the default joining.

    Raises:
        ValueError: if the model is not a backbone.
    """
    position_of(model)
    return model.released_layout()


def renamed_state_dict(model: PublishedNames) -> dict[str, Tensor]:
    """Return the state dict of `model` under published names, in our layout."""
    names = {f"position.{name}": published_name for published_name, name in model.position.published_names().items()}
    state: Any = model.state_dict()

    def rename(name: str) -> str:
        return model.published_name(names.get(name, name))

    published = OrderedDict(renamed(state, rename))
    grids = renamed(read_metadata(state)[GRIDS], rename)
    published.__dict__["_metadata"] = {**state._metadata, "": {**state._metadata[""], GRIDS: grids}}
    return published


def _keep_grids(module: Any, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    """Record the grid of every table, encoding and joining in the metadata of a state dict, beside its version."""
    if words := _words(module):
        local_metadata[POSITION] = words
    local_metadata[GRIDS] = _own_grids(module)


def _own_grids(module: Any) -> dict[str, list[int]]:
    return {f"position.{name}": list(shape) for name, shape in module.position.table_shapes().items()}
