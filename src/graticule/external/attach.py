"""Attach an encoding and a joining to a transformer of another library by hooks, fit them, and detach them again."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.encodings.build import build_position
from graticule.encodings.forms.absolute import JoinedPosition
from graticule.encodings.learnable import Learnable
from graticule.external.attach_survey import Example, find_ways, make_example, survey
from graticule.external.images import call, evaluating
from graticule.layers.attention import Attention
from graticule.position.bias import Bias
from graticule.position.grid import Grid
from graticule.position.joining import Default
from graticule.position.layer import LayerPosition
from graticule.position.places import by
from graticule.position.position import NoPosition, Position
from graticule.registry.checks import checked
from graticule.registry.specs import Spec
from graticule.surgery.attached import AttachedPosition, Survey, Ways, first_tensor, put_back, take_out
from graticule.surgery.change import Certificate, drift_of, measure
from graticule.surgery.fits.contributions import record_contributions
from graticule.surgery.fits.registry import Before, fit_position
from graticule.surgery.freeze import check_floating

Module = TypeVar("Module", bound=nn.Module)

#: The name of the attached position in the module.
NAME = "graticule"


@checked
def attach(
    module: Module,
    encoding: str | Spec | tuple[Spec, ...] = "learnable",
    joining: str | Spec = "default",
    *,
    blocks: str | None = None,
    norm: str | None = None,
    patch_grid: tuple[int, int] | None = None,
    remove: str | tuple[str, ...] | None = None,
    example: Tensor | Mapping[str, Any] | None = None,
    start: Literal["host", "new"] = "host",
) -> Module:
    """Add an encoding and a joining to a transformer with pre-norm blocks, in place, and return it.

    It works on modules of timm, transformers and torchvision and on your own, whose code is unchanged: hooks add to the
    residual stream (joinings `default`, `concatenation`, `shared`, `unshared`, and PEG), to the normalized tokens
    (`lape_sharing`, `lape`), to queries and keys (`queries_keys`), or to attention logits (`tupe`, biases). The last
    two need access to the attention, which differs between models; if there is no access, the error says why.

    The parameters are part of the module, under `graticule.position`; they are trained, saved, loaded, copied and moved
    with it. `fold` and `resize` accept such a module, and `detach` restores the original. Attach before
    `torch.compile`.

    The position starts from that of the module, as in `change_position`: a learnable table has the values of the
    module's, LaPE's norms and biases are fitted to its contribution to each layer, and a PEG, or a table where there
    was none, starts without effect. So a pretrained module keeps its features as far as the new position can express
    the old one. `module.graticule.certificate` reports the share that each layer keeps, and the representation of
    `module.graticule` says it in one line.

    One forward pass shows where tokens and patches are. If a convolution cuts the image into patches, the position
    follows the grid of each image; otherwise the grid is `patch_grid`, for all of them. Prefix tokens come before the
    patches.

    Args:
        module: a transformer, or a model that contains one.
        encoding: as in `create_model`.
        joining: as in `create_model`; 'default' adds the table to the input of the first block.
        blocks: the names of the blocks, where * stands for one part of a name, such as 'vit.layers.*'; found by
            default, as the lists whose modules call attention.
        norm: the name, in a block, of the norm before attention, found by default. Only attention may use its output.
        patch_grid: (H, W) of the patches; found by default.
        remove: the module's own position embedding, one parameter or several, which zeros replace; () keeps all. By
            default, the table that is added to the tokens before the blocks, if there is one.
        example: input of the module, a tensor or a mapping of keyword arguments; two black images by default. The
            position is fitted on it, and for a given one the certificate has the drift of the tokens after each block,
            so some preprocessed images are best.
        start: 'host' starts from the position of the module, 'new' from the usual initialization.

    Warns:
        UserWarning: if the module's own embedding is replaced by default, and nothing of it is kept.

    Raises:
        ValueError: if there are no such blocks, the module is not as described above, or its attention does not support
            the joining or encoding. The module is then unchanged.
    """
    check_floating(module, "module")
    if any(isinstance(part, Position | AttachedPosition) for part in module.modules()):
        raise ValueError(
            f"`module` must have no position of this library, got {type(module).__name__}, which has one; call "
            "graticule.detach(module) first, or choose encoding and joining in graticule.create_model."
        )
    if hasattr(module, NAME):
        raise ValueError(f"`module` must have no attribute {NAME!r}, which the position is attached as.")
    seen = make_example(module, patch_grid) if example is None else example
    found, blocks, tables = survey(module, seen, blocks, norm)
    removed = _own_embeddings(module, remove, tables)
    grid = _grid(found, patch_grid)
    first = module.get_submodule(found.blocks[0])
    ways = find_ways(first, found)
    position = build_position(
        grid, dim=found.dim, depth=len(found.blocks), num_heads=ways.num_heads or 1, encoding=encoding, joining=joining
    )
    with torch.no_grad():
        given = position(grid)
    _check_fields(given, ways, found, type(module).__name__)
    weight = next(first.parameters())
    attached = AttachedPosition(position, grid, found, _patch(found, grid)).to(weight.device, weight.dtype)
    if start == "host" and weight.device.type != "meta":
        attached.certificate, before = start_position(attached.position, module, removed, found, ways, grid, seen)
    attached.install(module, found, ways, given)
    attached.removed = [take_out(module, name) for name in removed]
    attached.created = {
        **{"encoding": _text(encoding), "joining": _text(joining), "blocks": blocks, "norm": found.norm},
        **{"patch_grid": patch_grid, "remove": list(removed), "image": found.image},
    }
    module.add_module(NAME, attached.train(module.training))
    if attached.certificate is not None and example is not None:
        with evaluating(module), tokens_after(module, found) as after:
            call(module, example)
        attached.certificate = replace(attached.certificate, drift=drift_of(before, after))
    if remove is None and attached.certificate is not None and attached.certificate.lost:
        warnings.warn(
            f"{removed[0]} of {type(module).__name__} is replaced, and nothing of it is kept by encoding "
            f"{_text(encoding)!r} and joining {_text(joining)!r}; remove=() keeps it.",
            stacklevel=3,
        )
    return module


def detach(module: Module) -> Module:
    """Remove the position that `attach` added to a module, in place, and return the original module.

    Raises:
        ValueError: if nothing is attached.
    """
    attached = getattr(module, NAME, None)
    if not isinstance(attached, AttachedPosition):
        raise ValueError(f"`module` must have an attached position, got {type(module).__name__}, which has none.")
    attached.uninstall()
    for removed in attached.removed:
        put_back(module, removed)
    delattr(module, NAME)
    return module


def _text(spec: str | Spec | tuple[Spec, ...]) -> str:
    return " + ".join(map(str, spec)) if isinstance(spec, tuple) else str(spec)


def _own_embeddings(module: nn.Module, remove: str | tuple[str, ...] | None, usual: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the position embeddings to replace by zeros."""
    tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    if remove is None:
        if len(usual) > 1:
            raise ValueError(
                f"`remove` must name the position embeddings that are replaced, of {', '.join(usual)}; () keeps all."
            )
        return tuple(usual)
    names = (remove,) if isinstance(remove, str) else tuple(remove)
    for name in names:
        if name not in tensors:
            known = f"; did you mean {usual[0]!r}?" if usual else ""
            raise ValueError(f"`remove` must name a parameter or buffer of the module, got {name!r}{known}")
    return names


def _grid(found: Survey, patch_grid: tuple[int, int] | None) -> Grid:
    """Return the grid of the tokens of the forward pass."""
    shape = found.shape if patch_grid is None else patch_grid
    if shape is None:
        raise ValueError(
            "`patch_grid` must be given: no convolution before the blocks makes a map of at most "
            f"{found.tokens} patches."
        )
    ahead = found.tokens - math.prod(shape)
    if ahead < 0:
        raise ValueError(
            f"`patch_grid` must be that of the {found.tokens} tokens that the blocks get, with the prefix tokens "
            f"before them, got {by(shape)} patches."
        )
    return Grid(*shape, prefix=ahead)


def _patch(found: Survey, grid: Grid) -> tuple[int, int] | None:
    """Return (height, width) of a patch in pixels; None for films, or if images are not divided into whole patches."""
    if found.image is None or len(grid.shape) > 2:
        return None
    (height, rest), (width, others) = (divmod(side, n) for side, n in zip(found.image, grid.shape, strict=True))
    return None if rest or others else (height, width)


def _check_fields(given: Sequence[LayerPosition], ways: Ways, found: Survey, kind: str) -> None:
    """Check that hooks can pass all fields of the position to the layers."""
    by_hooks = {"added_to_stream", "map_before", "after_norm", "map_after", "queries_keys", "bias", "query_scale"}
    shared = [name for name in found.receivers if "mlp" in name.lower() or "ffn" in name.lower()]
    for one in given:
        for field, value in one._asdict().items():
            if value is None:
                continue
            why = ways.why.get(field)
            if field not in by_hooks:
                why = "it acts within attention or an MLP, where no hook reaches"
            elif field == "bias" and Bias.of(value).function:
                why = "a bias that depends on queries must be computed within the attention"
            elif field == "bias" and why is None and ways.num_heads is None:
                why = "the number of heads was not found"
            elif field == "after_norm" and shared:
                why = f"the normalized tokens go to {shared[0]}, too"
            if why:
                raise ValueError(
                    f"`encoding` and `joining` must be such that {kind} can use them, got one that gives layers "
                    f"`{field}`: {why}."
                )


def start_position(
    position: Position, module: nn.Module, own: Sequence[str], found: Survey, ways: Ways, grid: Grid, example: Example
) -> tuple[Certificate, list[Tensor]]:
    """Fit a position to the module's own embedding, and report what it keeps; also return the tokens after each block.

    The table w of the embedding is what it adds to the input of the first block: the difference that zeros in its stead
    make there. The values of the embedding are used where they agree. If a norm follows the embedding, the difference
    depends on the image; then w is its mean, and the shares count only what is the same for all images.

    Args:
        position: the new position, which is changed.
        module: the module, with its own embedding.
        own: the names of the embedding, one parameter or several; may be empty.
        found: the survey of the module.
        ways: the access to its attention.
        grid: the grid of its tokens.
        example: input on which the contributions of w to the layers are measured.
    """
    tokens: list[Tensor] = []
    with evaluating(module):
        table, constant = _own_table(module, own, found, grid, example) if own else (None, 1.0)
        old: Position = NoPosition(len(found.blocks))
        layers: list[Any] = [None] * len(found.blocks)
        if table is not None and table.any():
            learnable = Learnable(grid, found.dim).to(table)
            learnable.pos_embed.copy_(table)
            old = JoinedPosition([learnable], Default(len(found.blocks)))
            blocks = [module.get_submodule(name) for name in found.blocks]
            layers = [(table, block.get_submodule(found.norm), _attention(block, ways, found)) for block in blocks]
        with tokens_after(module, found) as tokens:
            contributions = record_contributions(layers, lambda: call(module, example), int(found.sequence_first))
        before = Before(grid, old(grid), contributions)
        fits = fit_position(position, old, [before])
        shares = measure(before, position(grid))
    scaled = (share._replace(kept=None if share.kept is None else share.kept * constant) for share in shares)
    return Certificate(tuple(fits), tuple(scaled)), tokens


@contextmanager
def tokens_after(module: nn.Module, found: Survey) -> Iterator[list[Tensor]]:
    """Yield a list that the calls of the module add the tokens after each block to, (B, N, D) each."""
    tokens: list[Tensor] = []

    def keep(block: nn.Module, args: object, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        tokens.append(output.detach().transpose(0, int(found.sequence_first)))

    with ExitStack() as stack:
        for name in found.blocks:
            stack.callback(module.get_submodule(name).register_forward_hook(keep).remove)
        yield tokens


def _own_table(
    module: nn.Module, own: Sequence[str], found: Survey, grid: Grid, example: Example
) -> tuple[Tensor, float]:
    """Return the table w, (N, D), and the share of its effect on the first block that is the same for all images."""
    if isinstance(example, Tensor) and example.is_floating_point() and not example.any():
        noise = torch.empty(example.shape[1:]).normal_(generator=torch.Generator().manual_seed(0))
        example = torch.cat([example[:1], noise[None].to(example)])  # of another image, to see whether it matters
    with_it = _entering(module, found, example)
    removed = [take_out(module, name) for name in own]
    try:
        added = (with_it - _entering(module, found, example)).double()
    finally:
        for each in removed:
            put_back(module, each)
    table = added.mean(0)
    whole = float(added.square().sum())
    constant = float(table.square().sum()) * len(added) / whole if whole else 1.0
    if len(own) == 1 and removed[0].value.numel() in (table.numel(), grid.patches * found.dim):
        stored = removed[0].value.detach().reshape(-1, found.dim)
        stored = F.pad(stored, (0, 0, len(table) - len(stored), 0)).to(with_it)
        if float((stored - added).square().sum()) <= 0.01 * whole:  # the rest is rounding
            return stored, 1.0
    return table.to(with_it.dtype), constant


class _Entered(Exception):
    """Raised when the first block is called, whose input is all that is asked for."""


def _entering(module: nn.Module, found: Survey, example: Example) -> Tensor:
    """Return the input of the first block, (B, N, D)."""
    seen: list[Tensor] = []

    def stop(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = first_tensor(args, kwargs)
        assert tokens is not None
        seen.append(tokens.transpose(0, int(found.sequence_first)))
        raise _Entered

    handle = module.get_submodule(found.blocks[0]).register_forward_pre_hook(stop, with_kwargs=True)
    try:
        call(module, example)
    except _Entered:
        pass
    finally:
        handle.remove()
    return seen[0]


def _attention(block: nn.Module, ways: Ways, found: Survey) -> nn.Module:
    """Return attention of ours with the projections of a block, or the block if its logits are computed otherwise."""
    if ways.attention is None or ways.num_heads is None or found.dim % ways.num_heads:
        return block
    attention: Any = block.get_submodule(ways.attention)
    others = (getattr(attention, name, None) for name in ("q_norm", "k_norm", "q_bias"))
    if any(not isinstance(part, nn.Identity | None) for part in others):
        return block
    if ways.multihead:
        tensors = [(attention.in_proj_weight, attention.in_proj_bias)]
    else:
        names = (ways.fused,) if ways.queries_keys is None else (*ways.queries_keys, ways.queries_keys[1])
        linear = [block.get_submodule(name) for name in names if name]
        tensors = [(getattr(part, "weight", None), getattr(part, "bias", None)) for part in linear]
    weights, biases = ([pair[at] for pair in tensors] for at in (0, 1))
    if not weights or any(weight is None for weight in weights) or sum(map(len, weights)) != 3 * found.dim:
        return block
    biased = all(bias is not None for bias in biases)
    qkv = nn.Linear(found.dim, 3 * found.dim, bias=biased).to(weights[0])
    qkv.weight.copy_(torch.cat(weights))
    if biased:
        qkv.bias.copy_(torch.cat(biases))
    return Attention(found.dim, ways.num_heads, qkv=qkv)
