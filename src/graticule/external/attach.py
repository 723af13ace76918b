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

from graticule.checkpoints.obstacles import check_intact
from graticule.encodings.build import build_position
from graticule.encodings.forms.absolute import JoinedPosition
from graticule.encodings.learnable import Learnable
from graticule.external.attach_survey import Access, Example, Survey, make_example, survey_module
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
from graticule.surgery.attached import AttachedPosition, first_tensor, put_back, take_out
from graticule.surgery.change import Certificate, drift_of, measure
from graticule.surgery.fits.contributions import record_contributions
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
    check_intact(module, "wrapped", "compiled", "quantized", name="module", values=False)
    if any(isinstance(part, Position | AttachedPosition) for part in module.modules()):
        raise ValueError(
            f"`module` must have no position of this library, got {type(module).__name__}, which has one; call "
            "graticule.detach(module) first, or choose encoding and joining in graticule.create_model."
        )
    if hasattr(module, NAME):
        raise ValueError(f"`module` must have no attribute {NAME!r}, which the position is attached as.")
    images = make_example(module, patch_grid) if example is None else example
    survey = survey_module(module, images, blocks, norm)
    removed = _replaced_tables(module, remove, survey.tables)
    grid = _grid(survey, patch_grid)
    num_heads = survey.access.num_heads or 1
    position = build_position(
        grid, dim=survey.dim, depth=len(survey.blocks), num_heads=num_heads, encoding=encoding, joining=joining
    )
    with torch.no_grad():
        positions = position(grid)
    _check_fields(positions, survey.access, type(module).__name__)
    weight = next(module.get_submodule(survey.blocks[0]).parameters())
    dynamic = survey.patches is not None and survey.shape == grid.shape
    attached = AttachedPosition(position, grid, _patch(survey, grid), dynamic, survey.sequence_first)
    attached.to(weight.device, weight.dtype)
    if start == "host" and weight.device.type != "meta":
        attached.certificate, before = start_position(attached.position, module, removed, survey, grid, images)
    attached.install(module, survey.patches, survey.blocks, survey.access.hooks, positions)
    attached.removed = [take_out(module, name) for name in removed]
    attached.created = {
        **{"encoding": _text(encoding), "joining": _text(joining), "blocks": survey.pattern, "norm": survey.norm},
        **{"patch_grid": patch_grid, "remove": list(removed), "image": survey.image},
    }
    module.add_module(NAME, attached.train(module.training))
    if attached.certificate is not None and example is not None:
        with evaluating(module), recorded_tokens(module, survey) as tokens:
            call(module, example)
        attached.certificate = replace(attached.certificate, drift=drift_of(before, tokens[1:]))
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


def _text(spec: str | Spec | tuple[Spec, ...]) -> str:
    return " + ".join(map(str, spec)) if isinstance(spec, tuple) else str(spec)


def _replaced_tables(module: nn.Module, remove: str | tuple[str, ...] | None, usual: Sequence[str]) -> Sequence[str]:
    """Return the names of the position embeddings to replace by zeros."""
    if remove is None and len(usual) > 1:
        raise ValueError(
            f"`remove` must name the position embeddings that are replaced, of {', '.join(usual)}; () keeps all."
        )
    names = usual if remove is None else (remove,) if isinstance(remove, str) else remove
    tensors = {name for name, _ in (*module.named_buffers(), *module.named_parameters())}
    if missing := [name for name in names if name not in tensors]:
        known = f"; did you mean {usual[0]!r}?" if usual else ""
        raise ValueError(f"`remove` must name a parameter or buffer of the module, got {missing[0]!r}{known}")
    return names


def _grid(survey: Survey, patch_grid: tuple[int, int] | None) -> Grid:
    """Return the grid of the tokens of the forward pass."""
    shape = survey.shape if patch_grid is None else patch_grid
    if shape is None:
        raise ValueError(
            "`patch_grid` must be given: no convolution before the blocks makes a map of at most "
            f"{survey.tokens} patches."
        )
    ahead = survey.tokens - math.prod(shape)
    if ahead < 0:
        raise ValueError(
            f"`patch_grid` must be that of the {survey.tokens} tokens that the blocks get, with the prefix tokens "
            f"before them, got {by(shape)} patches."
        )
    patches = survey.shape
    if patches is not None and tuple(shape) != patches and math.prod(shape) <= math.prod(patches):
        raise ValueError(
            f"`patch_grid` must be that of the {by(patches)} patches that {survey.patches} makes, got {by(shape)}; "
            "leave it out, and it is found."
        )
    return Grid(*shape, prefix=ahead)


def _patch(survey: Survey, grid: Grid) -> tuple[int, int] | None:
    """Return (height, width) of a patch in pixels; None for videos, or if images are not divided into whole patches."""
    if survey.image is None or len(grid.shape) > 2:
        return None
    (height, rest), (width, others) = (divmod(side, n) for side, n in zip(survey.image, grid.shape, strict=True))
    return None if rest or others else (height, width)


def _check_fields(positions: Sequence[LayerPosition], access: Access, kind: str) -> None:
    """Check that hooks can pass all fields of the position to the layers."""
    for position in positions:
        for field, value in position._asdict().items():
            reason = access.reasons.get(field, "it acts within attention or an MLP, where no hook reaches")
            reaches = field in access.hooks
            if field == "bias" and value is not None and Bias.of(value).function:
                reason, reaches = "a bias that depends on queries must be computed within the attention", False
            if value is not None and not reaches:
                raise ValueError(
                    f"`encoding` and `joining` must be such that {kind} can use them, got one that gives layers "
                    f"`{field}`: {reason}."
                )


def start_position(
    position: Position, module: nn.Module, names: Sequence[str], survey: Survey, grid: Grid, example: Example
) -> tuple[Certificate, list[Tensor]]:
    """Fit a position to the module's own embedding, and report what it keeps; also return the tokens after each block.

    The table w of the embedding is what it adds to the input of the first block: the difference that zeros in its stead
    make there. The values of the embedding are used where they agree. If a norm follows the embedding, the difference
    depends on the image; then w is its mean, and the shares count only what is the same for all images.

    Args:
        position: the new position, which is changed.
        module: the module, with its own embedding.
        names: those of the parameters of the embedding, if any.
        survey: of the module.
        grid: of its tokens.
        example: input on which the contributions of w to the layers are measured.
    """
    depth = len(survey.blocks)
    with evaluating(module):
        table, constant = _table_of(module, names, survey, grid, example) if names else (None, 1.0)
        old: Position = NoPosition(depth)
        layers: list[Any] = [None] * depth
        if table is not None and table.any():
            learnable = Learnable(grid, survey.dim).to(table)
            learnable.pos_embed.copy_(table)
            old = JoinedPosition([learnable], Default(depth))
            blocks = [module.get_submodule(name) for name in survey.blocks]
            layers = [(table, block.get_submodule(survey.norm), _attention(block, survey)) for block in blocks]
        with recorded_tokens(module, survey) as tokens:
            contributions = record_contributions(layers, lambda: call(module, example), int(survey.sequence_first))
        before = Before(grid, old(grid), contributions)
        fits = fit_position(position, old, [before])
        shares = measure(before, position(grid))
    scaled = (share._replace(kept=None if share.kept is None else share.kept * constant) for share in shares)
    return Certificate(tuple(fits), tuple(scaled)), tokens[1:]


@contextmanager
def recorded_tokens(module: nn.Module, survey: Survey) -> Iterator[list[Tensor]]:
    """Yield a list that a call of the module adds tokens to, (B, N, D): before the first block, and after each one."""
    tokens: list[Tensor] = []

    def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens.append(first_tensor(args, kwargs).transpose(0, int(survey.sequence_first)).clone())

    def leave(block: nn.Module, args: object, output: Any) -> None:
        enter(block, output if isinstance(output, tuple) else (output,), {})

    blocks = [module.get_submodule(name) for name in survey.blocks]
    with ExitStack() as stack:
        stack.callback(blocks[0].register_forward_pre_hook(enter, with_kwargs=True).remove)
        for block in blocks:
            stack.callback(block.register_forward_hook(leave).remove)
        yield tokens


def _table_of(
    module: nn.Module, names: Sequence[str], survey: Survey, grid: Grid, example: Example
) -> tuple[Tensor, float]:
    """Return the table w, (N, D), and the share of its effect on the first block that is the same for all images."""
    if isinstance(example, Tensor) and example.is_floating_point() and not example.any():
        noise = torch.empty(example.shape[1:]).normal_(generator=torch.Generator().manual_seed(0))
        example = torch.cat([example[:1], noise[None].to(example)])  # of another image, to see whether it matters
    with recorded_tokens(module, survey) as tokens:
        call(module, example)
    removed = [take_out(module, name) for name in names]
    try:
        with recorded_tokens(module, survey) as without:
            call(module, example)
    finally:
        for tensor in removed:
            put_back(module, tensor)
    added = (tokens[0] - without[0]).double()
    table = added.mean(0)
    total = float(added.square().sum())
    constant = float(table.square().sum()) * len(added) / total if total else 1.0
    if len(names) == 1 and removed[0].value.numel() in (table.numel(), grid.patches * survey.dim):
        stored = removed[0].value.detach().reshape(-1, survey.dim)
        stored = F.pad(stored, (0, 0, len(table) - len(stored), 0)).to(tokens[0])
        if float((stored - added).square().sum()) <= 0.01 * total:  # the rest is rounding
            return stored, 1.0
    return table.to(tokens[0].dtype), constant


def _attention(block: nn.Module, survey: Survey) -> nn.Module:
    """Return attention of ours with the projections of a block, or the block if its logits are computed otherwise."""
    access, dim = survey.access, survey.dim
    if access.attention is None or access.num_heads is None or dim % access.num_heads:
        return block
    attention: Any = block.get_submodule(access.attention)
    others = (getattr(attention, name, None) for name in ("q_norm", "k_norm", "q_bias"))
    if any(not isinstance(part, nn.Identity | None) for part in others):
        return block
    if isinstance(attention, nn.MultiheadAttention):
        tensors: list[Any] = [(attention.in_proj_weight, attention.in_proj_bias)]
    else:
        names = (*access.projections, *access.projections[1:])  # keys instead of values, which have no effect here
        linear = [block.get_submodule(name) for name in names]
        if any(not isinstance(part, nn.Linear) or part._forward_hooks for part in linear):  # as with LoRA
            return block
        tensors = [(getattr(part, "weight", None), getattr(part, "bias", None)) for part in linear]
    weights, biases = ([pair[at] for pair in tensors] for at in (0, 1))
    if not weights or any(weight is None for weight in weights) or sum(map(len, weights)) != 3 * dim:
        return block
    biased = all(bias is not None for bias in biases)
    qkv = nn.Linear(dim, 3 * dim, bias=biased).to(weights[0])
    qkv.weight.copy_(torch.cat(weights))
    if biased:
        qkv.bias.copy_(torch.cat(biases))
    return Attention(dim, access.num_heads, qkv=qkv)
