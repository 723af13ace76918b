"""Attach an encoding and a joining to a transformer of another library by hooks, fit them, and detach them again."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.checkpoints.obstacles import check_intact
from graticule.encodings.build import build_position
from graticule.encodings.forms.absolute import JoinedPosition
from graticule.encodings.learnable import Learnable
from graticule.external.attach_survey import Example, make_example, survey
from graticule.external.images import call, evaluating
from graticule.position.joining import Default
from graticule.position.position import ENCODINGS, NoPosition, Position
from graticule.registry.checks import checked, known_name
from graticule.registry.specs import Spec
from graticule.surgery.attached import AttachedPosition, Host, first_tensor, put_back, take_out
from graticule.surgery.change import Certificate, drift_of, measure
from graticule.surgery.fits.contributions import Projection, projection_of, record_contributions
from graticule.surgery.fits.registry import Before, fit_position

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

    It works on modules of timm, transformers and torchvision and on your own, whose code is unchanged. Hooks add to the
    residual stream (joinings `default`, `concatenation`, `shared`, `unshared`, and PEG), to the normalized tokens
    (`lape_sharing`, `lape`), or, if the attention gives access to them, to queries and keys (`queries_keys`) and to
    logits (`tupe`, biases).

    The parameters are part of the module, under `graticule.position`, and are trained, saved, copied and moved with it.
    `fold` and `resize` accept such a module, and `detach` restores the original. Attach before `torch.compile`.

    The position starts from the module's, as in `change_position`: a learnable table has the values of the module's,
    LaPE's norms and biases are fitted to its contribution to each layer, and a PEG, or a table where there was none,
    starts without effect. `module.graticule.certificate` reports the share that each layer keeps.

    One forward pass shows where tokens and patches are. If a convolution cuts the image into patches, the position
    follows the grid of each image; otherwise all have the grid `patch_grid`. Prefix tokens come before the patches.

    Args:
        module: a transformer, or a model that contains one.
        encoding: as in `create_model`.
        joining: as in `create_model`; 'default' adds the table to the input of the first block.
        blocks: the names of the blocks, where * stands for one part of a name, such as 'vit.layers.*'; by default, the
            list whose modules call attention.
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
    check_intact(module, "wrapped", "compiled", "quantized", name="module", values=False)
    if any(isinstance(part, Position | AttachedPosition) for part in module.modules()):
        raise ValueError(
            f"`module` must have no position of this library, got {type(module).__name__}, which has one; call "
            "graticule.detach(module) first, or choose encoding and joining in graticule.create_model."
        )
    if hasattr(module, NAME):
        raise ValueError(f"`module` must have no attribute {NAME!r}, which the position is attached as.")
    images = make_example(module) if example is None else example
    host = survey(module, images, blocks, norm)
    names = _replaced_tables(module, remove, host.tables)
    grid = host.grid(patch_grid)
    sizes = {"dim": host.dim, "depth": len(host.blocks), "num_heads": host.num_heads or 1}
    position = build_position(grid, **sizes, encoding=encoding, joining=joining)
    with torch.no_grad():
        positions = position(grid)
    host.check(positions, type(module).__name__)
    weight = next(module.get_submodule(host.blocks[0]).parameters())
    attached = AttachedPosition(position, grid, host).to(weight.device, weight.dtype)
    if start == "host" and not weight.is_meta:
        attached.certificate, before = start_position(attached, module, names, images)
    attached.install(module, positions)
    attached.removed = [take_out(module, name) for name in names]
    words = {"encoding": " + ".join(map(str, ENCODINGS.specs(encoding))), "joining": str(joining)}
    arguments = {"blocks": host.pattern, "norm": host.norm, "remove": list(names), "image": host.image}
    attached.created = {**words, **arguments, "patch_grid": patch_grid}
    module.add_module(NAME, attached.train(module.training))
    if attached.certificate is not None and example is not None:
        drift = drift_of(before[1:], _tokens(module, host, example)[1:])
        attached.certificate = replace(attached.certificate, drift=drift)
    if remove is None and attached.certificate is not None and attached.certificate.lost:
        warnings.warn(
            f"{names[0]} of {type(module).__name__} is replaced, and nothing of it is kept by encoding "
            f"{words['encoding']!r} and joining {words['joining']!r}; remove=() keeps it.",
            stacklevel=3,
        )
    return module


def detach(module: Module) -> Module:
    """Remove the position that `attach` added to a module, in place, and return the module; refuse one without."""
    attached = getattr(module, NAME, None)
    if not isinstance(attached, AttachedPosition):
        raise ValueError(f"`module` must have an attached position, got {type(module).__name__}, which has none.")
    if lost := [tensor.name for tensor in attached.removed if tensor.value.is_meta]:
        raise ValueError(
            f"`module` must have been attached to with values, got {lost[0]} on the meta device: what was removed is "
            "in no state dict, so attach once it is loaded."
        )
    attached.uninstall()
    for removed in attached.removed:
        put_back(module, removed)
    delattr(module, NAME)
    return module


def _replaced_tables(module: nn.Module, remove: str | tuple[str, ...] | None, usual: Sequence[str]) -> Sequence[str]:
    """Return the names of the position embeddings to replace by zeros."""
    if remove is None and len(usual) > 1:
        raise ValueError(
            f"`remove` must name the position embeddings that are replaced, of {', '.join(usual)}; () keeps all."
        )
    names = usual if remove is None else (remove,) if isinstance(remove, str) else remove
    for name in names:
        known_name("remove", name, [name for name, _ in (*module.named_buffers(), *module.named_parameters())])
    return names


def start_position(
    attached: AttachedPosition, module: nn.Module, names: Sequence[str], example: Example
) -> tuple[Certificate, list[Tensor]]:
    """Fit a position, before it is installed, to the embedding of a module in the parameters `names`, if any.

    The table w of the embedding is the difference at the input of the first block that zeros in its stead make. If a
    norm follows the embedding, the difference depends on the image. Then w is its mean, and the shares count only what
    is the same for all images. Returns the report, and the tokens of `example` (`_tokens`).
    """
    host, grid = attached.host, attached.grid
    depth, constant = len(host.blocks), 1.0
    old: Any = NoPosition(depth)
    layers: list[Any] = [None] * depth
    tokens = _tokens(module, host, example)
    with evaluating(module):
        if names:
            table, constant = _table_of(module, names, host, example)
            if table.any():
                old = JoinedPosition([Learnable(grid, host.dim).to(table)], Default(depth))
                old.encodings[0].pos_embed.copy_(table)
                blocks = [module.get_submodule(name) for name in host.blocks]
                layers = [(table, block.get_submodule(host.norm), _projection(block, host)) for block in blocks]
        contributions = record_contributions(layers, lambda: call(module, example), int(host.sequence_first))
        before = Before(grid, old(grid), contributions)
        fits = fit_position(attached.position, old, [before])
        shares = measure(before, attached.position(grid))
    scaled = (share._replace(kept=None if share.kept is None else share.kept * constant) for share in shares)
    return Certificate(tuple(fits), tuple(scaled)), tokens


def _tokens(module: nn.Module, host: Host, example: Example) -> list[Tensor]:
    """Return the tokens of a pass in evaluation mode, (B, N, D): before the first block, and after each one."""
    tokens: list[Tensor] = []

    def keep(block: nn.Module, args: tuple[Any, ...], *more: Any) -> None:
        values = more[-1] if len(more) > 1 else (*args, *more[0].values())
        tokens.append(first_tensor(values).transpose(0, int(host.sequence_first)).clone())

    blocks = [module.get_submodule(name) for name in host.blocks]
    with evaluating(module), ExitStack() as hooks:
        hooks.callback(blocks[0].register_forward_pre_hook(keep, with_kwargs=True).remove)
        for block in blocks:
            hooks.callback(block.register_forward_hook(keep, with_kwargs=True).remove)
        call(module, example)
    return tokens


def _table_of(module: nn.Module, names: Sequence[str], host: Host, example: Example) -> tuple[Tensor, float]:
    """Return the table w, (N, D), and the share of its effect on the first block that is the same for all images."""
    if isinstance(example, Tensor) and example.is_floating_point() and not example.any():
        noise = torch.empty(example.shape[1:]).normal_(generator=torch.Generator().manual_seed(0))
        example = torch.cat([example[:1], noise[None].to(example)])  # of another image, to see whether it matters
    tokens = _tokens(module, host, example)[0]
    removed = [take_out(module, name) for name in names]
    try:
        without = _tokens(module, host, example)[0]
    finally:
        for tensor in removed:
            put_back(module, tensor)
    added = (tokens - without).double()
    table = added.mean(0)
    total = float(added.square().sum())
    constant = float(table.square().sum()) * len(added) / total if total else 1.0
    if len(names) == 1 and 0 < removed[0].value.numel() <= table.numel():
        stored = removed[0].value.detach().reshape(-1, host.dim)
        stored = F.pad(stored, (0, 0, len(table) - len(stored), 0)).to(tokens)
        if float((stored - added).square().sum()) <= 0.01 * total:  # the rest is rounding
            return stored, 1.0
    return table.to(tokens.dtype), constant


def _projection(block: nn.Module, host: Host) -> Projection | None:
    """Return the projection of a block to queries and keys, if its logits are products of these."""
    attention: Any = block.get_submodule(host.attention) if host.attention else None
    parts: list[Any] = [block.get_submodule(name) for name in host.projections]
    if isinstance(attention, nn.MultiheadAttention) and attention.in_proj_weight is not None:
        parts = [lambda x: F.linear(x, attention.in_proj_weight, attention.in_proj_bias)]
    return projection_of(attention, parts, host.dim, host.num_heads or 0)
