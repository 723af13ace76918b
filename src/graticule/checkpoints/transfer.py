"""Start a model from the checkpoint of another: load, resample or copy the tensors that fit, and report all of them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.layers.patch_embed import resample_patch_embed
from torch import Tensor, nn

from graticule.checkpoints.layouts import SHARED_BIAS, own_tensors
from graticule.checkpoints.load import fold_prefix_rows, position_of, table_grids
from graticule.checkpoints.read import GRIDS, check_whole, dtype_name, kind, read_state, unusable
from graticule.encodings.forms.absolute import AbsoluteEncoding
from graticule.encodings.forms.pyramid import PyramidPosition
from graticule.position.folded import Folded
from graticule.position.places import Shape
from graticule.registry.checks import checked


class Transferred(NamedTuple):
    """Status and source of a tensor of the model, or of several tensors that share them.

    name: its name in the model; for unused tensors, in the checkpoint. Neighbors are combined as `blocks.0-11`.
    status: 'loaded' (same shape), 'resized' (resampled for another grid, window or patch), 'adapted' (to another
        number of channels), 'copied' (from the single table of all layers), 'new' (initialized by the model)
        or 'unused' (only in the checkpoint).
    detail: sizes before and after, or the reason for which it was not loaded.
    values: number of values.
    source: name in the checkpoint; '' if there is none, or several.
    """

    name: str
    status: str
    detail: str
    values: int
    source: str = ""


@dataclass(frozen=True)
class Transfer:
    """Report of the source of every tensor of a model, and of the use of every tensor of the checkpoint.

    Args:
        rows: every parameter and persistent buffer of the model once, in its order, then the unused tensors.
    """

    rows: tuple[Transferred, ...]

    def table(self) -> list[Transferred]:
        """Return the rows, combined by module where status and detail are equal, with unused tensors last.

        Numbered neighbors whose rows are equal are combined, such as `blocks.0-11`.
        """
        used = [row for row in self.rows if row.status != "unused"]
        # of a partly used module the unused tensors are named, not the module
        sources = [Transferred(row.source, "used", "", 0) for row in used if row.source]
        return _combine(used) + _combine([row for row in self.rows if row.status == "unused"], sources)

    @property
    def totals(self) -> dict[str, int]:
        """Return the number of values per status, in the order of the rows."""
        totals: Counter[str] = Counter()
        for row in self.rows:
            totals[row.status] += row.values
        return dict(totals)

    def __str__(self) -> str:
        """Return the table as text, one line per group, followed by the totals."""
        lines = [(row.name, row.status, f"{row.values:,}", row.detail) for row in self.table()]
        name, status, values = (max((len(line[i]) for line in lines), default=0) for i in range(3))
        text = [f"{a:<{name}}  {b:<{status}}  {c:>{values}}  {d}".rstrip() for a, b, c, d in lines]
        return "\n".join([*text, "values: " + ", ".join(f"{n:,} {status}" for status, n in self.totals.items())])


def _combine(rows: Sequence[Transferred], others: Sequence[Transferred] = ()) -> list[Transferred]:
    """Combine the rows of modules of one kind, also in `others`, then the same rows of numbered modules."""
    kinds: dict[str, set[tuple[str, str]]] = {}
    for row in (*rows, *others):
        for module in _modules(row.name):
            kinds.setdefault(module, set()).add((row.status, row.detail))
    numbers: dict[tuple[str, str, str], set[int]] = {}
    values: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        name = next((module for module in _modules(row.name) if len(kinds[module]) == 1), row.name)
        group = _NUMBER.sub("*", name, 1), row.status, row.detail
        numbers.setdefault(group, set()).update(int(number) for number in _NUMBER.findall(name)[:1])
        values[group] += row.values
    combined = []
    for group, of_modules in numbers.items():
        first, last = min(of_modules, default=0), max(of_modules, default=0)
        successive = last - first == len(of_modules) - 1 > 0
        label = f"{first}-{last}" if successive else ",".join(map(str, sorted(of_modules)))
        name = group[0].replace("*", label, 1) if of_modules else group[0]
        combined.append(Transferred(name, *group[1:], values[group]))
    return combined


#: The first number among the parts of a name.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _modules(name: str) -> list[str]:
    """Return the names of the modules that a tensor is in, from the outermost one with a number, and its own."""
    parts = name.split(".")
    first = 2 if len(parts) > 1 and parts[1].isdecimal() else 1
    return [".".join(parts[:length]) for length in range(first, len(parts) + 1)]


#: The table of an absolute encoding, under the name that `_place` gives it.
_TABLE = re.compile(r"(position\.(?:stages\.\d+\.)?)encodings\.(\d+)\.pos_embed")
_BLOCK = re.compile(r"(?:^|\.)blocks\.\d+\.")
#: Prefix tokens, in the order of their rows in a table.
_PREFIX = ("cls_token", "dist_token", "reg_token")


@torch.no_grad()
@checked
def transfer(
    model: Any, source: str | Path | Mapping[str, Tensor], *, classifier: bool = True, grid: Shape | None = None
) -> Transfer:
    """Load all tensors of the checkpoint `source` that fit into `model`, and return a report.

    The checkpoint may have another image, patch or window size, class count, number of channels, depth, encoding or
    joining. It has the names that `load_checkpoint` reads. A tensor with the same name and shape is loaded. Others are
    converted where possible:

    - Position parameters of another grid or window are resampled. Rows of prefix tokens are matched by token: rows that
      the checkpoint lacks keep the model's initial values (zero if it has the token and gives it no position).
    - All joinings have the same table w. If every layer has its own table, each starts as a copy of the shared one; in
      the other direction, the first layer's table is used.
    - A table that is given by a formula keeps the formula's values; a learnable one starts from them.
    - The first convolution of another number of channels is summed for gray images, else repeated and scaled, as in
      timm. A patch embedding of another patch size is resampled as in FlexiViT (Beyer et al., 2023).

    Everything else is initialized: a classifier with another class count, a layer beyond the checkpoint's depth, a
    module with a tensor that does not fit. The norms before and after average pooling are different parameters.

    Args:
        model: one of our backbones, not folded.
        source: the path or the contents of a checkpoint.
        classifier: whether a classifier of the same class count is loaded, too.
        grid: as in `load_checkpoint`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file cannot be read, or none of the weights of the model's blocks fit: a checkpoint of
            another width or family; if only some weights of a block have names that are known, and others are left
            over. The model is then unchanged.
    """
    if isinstance(position_of(model), Folded):
        raise ValueError("`model` must not be folded, to be trained from here; call graticule.unfold(model) first.")
    check_whole(model)
    published = read_state(source)
    check_whole(published, "source", values=False)
    file = own_tensors(model, published, source, **_tables(model.position))
    tensors, recorded = file.tensors, file.metadata[GRIDS]
    origins = _origins(model.state_dict(), tensors)
    notes = fold_prefix_rows(model, tensors)
    matched = {name: tensors[origin] for name, origin in origins.items()}
    known = {name: recorded[origin] for name, origin in origins.items() if origin in recorded}
    metadata = {**file.metadata, GRIDS: known}
    grids = table_grids(model.position, file._replace(tensors=matched, metadata=metadata), grid)
    fitting = Fitting(model, tensors)
    uses = Counter(source for name, source in file.sources.items() if name.startswith("position."))
    classifier_modules = head if isinstance(head := model.get_classifier(), tuple) else (head,)
    classifiers = {name for name, module in model.named_modules() if any(module is part for part in classifier_modules)}
    state: dict[str, Tensor] = {}
    rows: dict[str, Transferred] = {}
    for name, target in model.state_dict().items():
        fitted, status, detail, source_name = None, "new", "not in the checkpoint", ""
        is_classifier = name.rpartition(".")[0] in classifiers
        if is_classifier and not classifier:
            detail = "as asked"
        elif name in origins:
            origin = origins[name]
            value, source_name = tensors[origin], file.sources[origin]
            fitted, status, detail = fitting(name, value, grids.get(name))
            if fitted is not None and origin in notes:
                status, detail = "resized", ", ".join(filter(None, [detail, notes[origin]]))
            if fitted is None and is_classifier:
                alike = value.ndim == target.ndim and value.shape[1:] == target.shape[1:]
                detail = f"{value.shape[0]:,} -> {target.shape[0]:,} classes" if alike else detail
            elif fitted is not None and (_layer(name) != _layer(origin) or uses[source_name] > 1):
                status, detail = "copied", ", ".join(filter(None, [f"from {source_name}", detail]))
        if fitted is not None:
            state[name] = fitted
        rows[name] = Transferred(name, status, detail, target.numel(), "" if fitted is None else source_name)
    misfits = {name.rpartition(".")[0] for name in origins if name not in state} - {""}
    for name in [name for name in state if name.rpartition(".")[0] in misfits]:  # other tensors of their modules
        del state[name]
        rows[name] = rows[name]._replace(status="new", detail="as the rest of its module", source="")
    _check_blocks(model, source, state, matched, tensors)
    complete = model.state_dict()
    complete.update(state)  # which keeps its metadata
    model.load_state_dict(complete)
    used = {row.source for row in rows.values()}
    left = {file.sources[name]: value for name, value in tensors.items()}
    left |= {name: published[name] for name in file.unused}
    unused = [Transferred(name, "unused", "", value.numel(), name) for name, value in left.items() if name not in used]
    return Transfer((*rows.values(), *unused))


def _tables(position: Any) -> dict[str, str]:
    """Map published names of tables to the name of the first layer's table in each stage.

    A checkpoint may have one table where the model has one per layer, and vice versa.
    """
    several = isinstance(position, PyramidPosition) and len(position.stages) > 1
    published: dict[str, str] = {}
    for name, target in position.published_names().items():
        if shared := SHARED_BIAS.fullmatch(name):  # of blocks with a bias each, the first one's
            published |= dict.fromkeys((f"blocks.0.attn.{shared[1]}", f"blocks.0.attn.rel_pos.{shared[1]}"), target)
    for name, _ in position.named_parameters():
        if _layer(f"position.{name}") == "0":
            stage = name.split(".")[1]  # of several; PVT's code counts from one
            tables = (f"pos_embed{int(stage) + 1}",) if several else ("pos_embed", "pos_embed0")
            published |= dict.fromkeys(tables, name)
    return published


def _place(name: str) -> str:
    """Return the name of a position parameter without its part of a sum or of SAM's layers, and without a norm."""
    name = re.sub(r"^(position\.(?:stages\.\d+\.)?)(?:whole\.)?(windowed\.)?(?:parts\.\d+\.)?", r"\1\2", name)
    return re.sub(r"^(position\.(?:.*\.)?encodings\.\d+)\.bias\.", r"\1.", name)


def _layer(name: str) -> str | None:
    """Return the layer of a table; None if the parameter is not a table."""
    table = _TABLE.fullmatch(_place(name))
    return table and table[2]


def _origins(model_names: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Map each name of the model to the name, in our layout, of the checkpoint's tensor that it is set from."""
    names = list(names)
    origins = {name: name for name in set(model_names).intersection(names)}
    left = [name for name in model_names if name not in origins]
    counts = Counter(map(_place, left))
    sources: dict[str, list[str]] = {}  # by the place of a remaining tensor, and by the start of the place of a table
    for name in names:
        if name not in origins:
            sources.setdefault(_place(name), []).append(name)
        if table := _TABLE.fullmatch(_place(name)):
            sources.setdefault(table[1], []).append(name)
    for name in left:
        place = _place(name)
        candidates = sources.get(place, []) if counts[place] == 1 else []
        if len(candidates) != 1 and (table := _TABLE.fullmatch(place)):
            candidates = sources.get(table[1], [])
        if len(candidates) == 1:
            (origins[name],) = candidates
    return origins


def _check_blocks(
    model: nn.Module, source: Any, state: Mapping[str, Tensor], values: Mapping[str, Tensor], tensors: dict[str, Tensor]
) -> None:
    """Refuse a checkpoint from which no weight of the blocks was loaded, or of whose blocks only some names are known.

    `values` are the tensors of the checkpoint by the model's names, `tensors` all of them.
    """
    message = "the checkpoint" if isinstance(source, Mapping) else str(source)
    message += f" does not fit {type(model).__name__}"

    def of_blocks(tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Return the names of the weights of blocks, and the block of each."""
        names = (name for name, value in tensors.items() if value.ndim > 1 and not name.startswith("position."))
        return {name: match[0] for name in names if (match := _BLOCK.search(name))}

    weights = of_blocks(model.state_dict())
    loaded = {weights[name] for name in weights.keys() & state.keys()}
    if not loaded:
        why = f"it has none of them, {next(iter(weights), 'blocks')} for one"
        if name := next((name for name in weights if name in values), ""):
            shapes = (tuple(tensors[name].shape) for tensors in (values, model.state_dict()))
            why = "{} is {} where the model has {}".format(name, *shapes)
        raise ValueError(f"{message}: no weight of its blocks does; {why}.")
    lacks, has = (
        sorted(name for name, block in names.items() if name not in values and block in loaded)
        for names in (weights, of_blocks(tensors))
    )
    if lacks and has:
        raise ValueError(
            f"{message}: of its blocks some weights have other names; it has {has[0]}, for one, and lacks {lacks[0]}."
        )


class Fitting:
    """Function that fits tensors of a checkpoint, which has these under our names, to a model."""

    def __init__(self, model: Any, checkpoint: Mapping[str, Tensor]) -> None:
        self.model, self.state = model, model.state_dict()
        self.grids = model.position.table_shapes()
        self.checkpoint_prefix, self.model_prefix = _prefix_rows(checkpoint), _prefix_rows(self.state)

    def __call__(self, name: str, value: Tensor, shape: Any) -> tuple[Tensor | None, str, str]:
        """Fit `value` to the tensor `name` of the model; return it or None, and status and detail of `Transferred`.

        Args:
            name: its name in the model.
            value: tensor of the checkpoint.
            shape: (H, W) of the grid that the value is for, if the checkpoint records it.
        """
        target, value = self.state[name], value.detach()
        reason = dtype_name(value) if kind(value) != kind(target) else unusable(value)
        if not reason and value.dtype == target.dtype and value.device == target.device and value.is_set_to(target):
            return target, "loaded", ""  # a weight that the model keeps
        if reason or not value.to(target.dtype).isfinite().all():
            return None, "new", f"{reason or 'not finite'} there"
        module = self.model.get_submodule(name.rpartition(".")[0])
        parameter = name.removeprefix("position.")
        grid = None if parameter == name else self.grids.get(parameter)
        fitted: tuple[Tensor | None, str, str] | None = None
        if isinstance(module, AbsoluteEncoding) and name.endswith(".pos_embed"):
            fitted = self._table(module, value, shape) if module.resampled else _formula(module, value, shape)
        elif grid is not None and value.numel():
            resampled = self.model.position.fit(parameter, value, shape)
            if resampled is not None and resampled.shape == target.shape:
                sizes = f"{tuple(value.shape)} -> {tuple(target.shape)}"
                fitted = (value, "loaded", "") if resampled is value else (resampled, "resized", sizes)
        elif value.shape == target.shape:
            fitted = value, "loaded", ""
        elif value.numel() and isinstance(module, nn.Conv2d):
            fitted = self._kernel(module, value, target)
        return fitted or (None, "new", f"shape {tuple(value.shape)} there")

    def _table(
        self, encoding: AbsoluteEncoding, value: Tensor, shape: tuple[int, int] | None
    ) -> tuple[Tensor, str, str] | None:
        """Resample the rows of patches, and match the rows of prefix tokens by name."""
        if value.ndim < 2 or not value.numel() or value.shape[-1] != encoding.dim or math.prod(value.shape[:-2]) != 1:
            return None
        rows = value.reshape(-1, encoding.dim)
        prefix_names = self.model_prefix[: encoding.grid.prefix]
        tokens = self.checkpoint_prefix
        grid = replace(encoding.grid, prefix=0)
        # the first stages of a pyramid have none, even if the model has some
        rowed = [token for token in tokens if not token.startswith("reg_token")]  # registers may have none
        for prefix in (tokens, rowed, prefix_names, []) if prefix_names or not self.model_prefix else ([],):
            if old := grid.infer_grid(len(rows) - len(prefix), shape):
                break
        else:
            return None
        initial = encoding.pos_embed[0].to(rows)
        first = [
            rows[prefix.index(token)] if token in prefix else initial[row] * float(token not in tokens)
            for row, token in enumerate(prefix_names)
        ]
        same_prefix = torch.cat([*(row[None] for row in first), rows[len(prefix) :]])
        table = encoding.fit(same_prefix, replace(old, prefix=len(prefix_names)))
        if table is None:
            return None
        sizes = ("x".join(map(str, at.shape)) for at in (old, grid))
        details = [" -> ".join(sizes)] if old != grid else []
        details += [f"without {token}" for token in prefix if token not in prefix_names]
        details += [f"{token} {'zero' if token in tokens else 'new'}" for token in prefix_names if token not in prefix]
        return table[None], "resized" if details else "loaded", ", ".join(details)

    def _kernel(self, layer: nn.Conv2d, value: Tensor, target: Tensor) -> tuple[Tensor, str, str] | None:
        """Adapt the first convolution to another number of channels, or a patch embedding to another patch size."""
        if value.ndim != 4 or value.shape[0] != target.shape[0] or layer.groups != 1:
            return None
        status, details = "resized", []
        if value.shape[1] != target.shape[1]:
            if target.shape[1] != self.model.in_chans:
                return None
            status, details = "adapted", [f"{value.shape[1]} -> {target.shape[1]} channels"]
            value = with_channels(value, target.shape[1])
        old, new = tuple(value.shape[2:]), tuple(target.shape[2:])
        if old != new:
            if layer.kernel_size != layer.stride or layer.padding not in ((0, 0), "valid"):
                return None  # its patches overlap or are padded
            details.append(f"{old[0]}x{old[1]} -> {new[0]}x{new[1]} pixels")
            value = resample_patch_embed(value, list(new))
        return value, status, ", ".join(details)


def _formula(encoding: AbsoluteEncoding, value: Tensor, shape: Any) -> tuple[Tensor | None, str, str]:
    """Accept a table that equals the formula's up to rounding; any other is ignored, and the formula is used."""
    try:
        table = encoding.fit_parameter("pos_embed", value, shape)
    except ValueError as error:
        return None, "new", f"given by its formula: {str(error).partition(': ')[2].removesuffix('.')}"
    if table is None:
        return None, "new", "given by its formula"
    same = table.numel() == value.numel()
    return table, *(("loaded", "") if same else ("resized", f"{tuple(value.shape)} -> {tuple(table.shape)}"))


def _prefix_rows(state: Mapping[str, Tensor]) -> list[str]:
    """List the names of the prefix tokens of a state dict, one per row of a table."""
    rows = []
    for name in _PREFIX:
        if name in state and state[name].ndim == 3:
            count = state[name].shape[1]
            rows += [name] if count == 1 else [f"{name} {i}" for i in range(count)]
    return rows


def with_channels(weight: Tensor, channels: int) -> Tensor:
    """Adapt a kernel (D, C, h, w), or (D, C, t, h, w), to `channels` channels: summed to one, else repeated and scaled.

    So the output is unchanged for an image whose channels are all equal if there is one, or a multiple of C. timm's
    `adapt_input_conv` computes the same, but only from three channels.
    """
    wide, before = weight.to(torch.promote_types(weight.dtype, torch.float32)), weight.shape[1]
    if channels == 1:
        return wide.sum(1, keepdim=True).to(weight.dtype)
    repeated = wide.repeat(1, -(-channels // before), *[1] * (weight.ndim - 2))[:, :channels]
    return (repeated * (before / channels)).to(weight.dtype)
