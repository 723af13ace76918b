"""Audit of the position information of a model: its cost, a probe that reads it, and the effects of changing it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from graticule.analysis.attention import AttentionSummary, attention_summary
from graticule.analysis.effect import Effect, FeatureComparison, standard_error
from graticule.analysis.equivariance import Translation, translation_error
from graticule.analysis.position_maps import StageMaps, position_maps
from graticule.analysis.probe import PositionSums, Probe
from graticule.analysis.share import LayerShares, PositionShare, check_images, different_images
from graticule.analysis.similarity import Array
from graticule.external.debiased import Debiased, Eraser
from graticule.external.images import Size, evaluating, image_channels
from graticule.external.structure import find_structure
from graticule.external.traced_model import TracedModel, view_of
from graticule.external.view import Edit, ModelView, Pass, Unavailable, nearest_of_axis
from graticule.position.grid import Grid
from graticule.position.places import axis_names, by
from graticule.registry.checks import check, checked
from graticule.registry.fields import Count
from graticule.system.tables import PrintedTable, plain

T = TypeVar("T")


class AuditBar:
    """Shows the progress over all views, in passes of one image at the size of the model."""

    def __init__(
        self, passes: int, others: Mapping[Size, int], size: Size, progress: Callable[..., Any] | None
    ) -> None:
        self.size = size
        total = passes + sum(count * self._cost(other) for other, count in others.items())
        self.bar = progress and progress(total=round(total), unit="img")

    def run(self, name: str, view: ModelView, images: Tensor, edit: Callable[..., Tensor] | None = None) -> Pass:
        return self.step(name, len(images) * self._cost(tuple(images.shape[2:])), lambda: view.run(images, edit))

    def step(self, name: str, passes: float, work: Callable[[], T]) -> T:
        """Run `work`, which costs about `passes` passes."""
        if self.bar is None:
            return work()
        self.bar.set_description(name)
        result = work()
        self.bar.update(round(passes))
        return result

    def _cost(self, size: Size) -> float:
        return math.prod(size) / math.prod(self.size)


@dataclass(frozen=True, eq=False)
class Turns:
    """Seconds of a forward pass of several variants of a model, which are measured interleaved.

    batch: images per pass.
    seconds: variant -> seconds of each round, (turns,).
    """

    batch: int
    seconds: Mapping[str, Array]

    def share(self, more: str, less: str) -> tuple[float, float, float]:
        """Return the share of the time of `more` that `less` saves: the median over rounds, and the quartiles.

        In a round in which `less` takes longer, which is noise, it is a share of the time of `less`, from -1 to 0.
        """
        a, b = self.seconds[more], self.seconds[less]
        saved = (a - b) / np.maximum(a, b)
        low, median, high = np.quantile(saved, (0.25, 0.5, 0.75))
        return float(median), float(low), float(high)


@torch.inference_mode()
def time_in_turns(variants: Mapping[str, Callable[[Tensor], object]], images: Tensor, turns: int) -> Turns:
    """Time each variant's forward pass on `images` in `turns` rounds over all variants, after one warm-up pass each."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for forward in variants.values():
        forward(images)
    names = list(variants)
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            wait(images.device)
            start = time.perf_counter()
            variants[name](images)
            wait(images.device)
            seconds[name].append(time.perf_counter() - start)
    return Turns(len(images), {name: np.array(rounds) for name, rounds in seconds.items()})


def wait(device: torch.device) -> None:
    """Wait until the work of a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


#: Maximum numbers of images for attention weights, which are large and differ little between images, and for
#: translation.
_ATTENTION, _TRANSLATION = 16, 32
#: The effects that are printed.
_CHANGED = "position zeroed", "position shuffled"
#: Name of the run of the unchanged model.
_ITSELF = "the model"
#: Images per batch -> rounds in which forward passes are timed.
_TURNS = {1: 15, 8: 7}


@dataclass(frozen=True, eq=False, repr=False)
class Audit(PrintedTable):
    """Results of an audit; printed, the main ones. Layers are counted from 0.

    img_size: (height, width) in pixels of the images, or with a depth.
    images: number of images.
    grids: grid after each layer.
    parameters: number of parameters of the model, before it is set to `img_size`.
    position: number of parameters of each part of the position information, also before that.
    unknown: names of parameters that look like position information and belong to no known part.
    share: shares of the variance of each layer's tokens that position explains, also at the other sizes.
    probe_content: probe of the embedded patches before any position information; None if they were not found.
    probes: probe of each layer.
    effects: effects of changes of the position.
    sizes: effects of other sizes of the images, by size; features are compared with those at `img_size`.
    accuracy: top-1 in percent, and its standard error; None without labels.
    neighbors: whether accuracies are of leave-one-out neighbors, as the model has no head.
    times: times of forward passes, one entry per batch size.
    translation, attention: None if they are not known.
    maps: maps of position information, by stage.
    causes: effects of 'tokens' and 'content' of other sizes, before the effect of the size itself (`audit`).
    unavailable: name of an analysis -> why it was not made.
    """

    img_size: Size
    images: int
    grids: tuple[Grid, ...]
    parameters: int
    position: dict[str, int]
    unknown: list[str]
    share: PositionShare
    probe_content: Probe | None
    probes: list[Probe]
    effects: list[Effect]
    sizes: dict[Size, Effect]
    accuracy: tuple[float, float] | None
    neighbors: bool
    times: list[Turns]
    translation: Translation | None
    attention: AttentionSummary | None
    maps: list[StageMaps]
    unavailable: dict[str, str] = field(default_factory=dict)
    causes: list[Effect] = field(default_factory=list)
    left = 2

    @property
    def heading(self) -> str:
        return f"{self.images} images of {by(self.img_size)}; [95 %], ± standard errors; change in spreads of features"

    def summary(self) -> list[tuple[str, ...]]:
        """Return a header, then the main results, a row each."""
        share, position, axes = self.share, sum(self.position.values()), " and ".join(axis_names(len(self.img_size)))
        end = "features" if share.features else "last layer"
        rows: list[tuple[str, ...]] = [("measure", "result")]
        rows += [("parameters of position", f"{position:,} of {self.parameters:,}")]
        rows += [(f"share of position in the {end}", f"{share.total.text(-1)} %")]
        rows += [("of it linear in " + axes, f"{share.linear.text(-1)} %")]
        if not np.isnan(share.total.value).all():
            most = int(np.nanargmax(share.total.value))
            where = f"in {'' if share.names[most] == 'features' else 'layer '}{share.names[most]}"
            rows += [("largest share of position", f"{share.total.text(most)} %, {where}")]
        best = int(np.argmax([np.nanmean(probe.mean) for probe in self.probes]))
        rows += [(f"linear probe of {axes} (R²)", f"{_numbers(self.probes[best].mean)}, in layer {best}")]
        if self.probe_content is not None:
            rows += [("the same from the patches alone", _numbers(self.probe_content.mean))]
        named = [(effect.name, effect) for effect in self.effects if effect.name in _CHANGED]
        named += [(f"at {effect.name}", effect) for effect in self.causes]
        for name, effect in [*named, *((f"at {by(size)}", effect) for size, effect in self.sizes.items())]:
            parts = [f"change {effect.mean_change[-1]:.2f}"]
            if effect.same is not None:
                parts += [f"{100 * effect.same.mean():.0f} % keep top-1"]
            if effect.accuracy is not None:
                parts += [f"accuracy {effect.accuracy[0]:+.1f} ± {effect.accuracy[1]:.1f}"]
            rows += [(name, ", ".join(parts))]
        if self.times and "without" in (turns := self.times[-1]).seconds:
            median, low, high = (100 * share for share in turns.share("computed", "without"))
            cost = f"{median:.1f} %" if low > 0 else "not measurable here"
            quartiles = f"{cost}, quartiles {low:.1f} to {high:.1f} %"
            rows += [(f"time of position, {turns.batch} images", quartiles)]
        return rows + [("not measured", ", ".join(self.unavailable))] * bool(self.unavailable)

    def record(self) -> dict[str, Any]:
        """Return all numbers except the maps as plain values, with the printed ones as `summary`."""
        record: dict[str, Any] = plain({name: value for name, value in vars(self).items() if name != "maps"})
        return {**record, "summary": {row[0]: row[1] for row in self.summary()[1:]}}


def _numbers(values: Array) -> str:
    return ", ".join(f"{value + 0.0:.2f}".replace("-0.00", "0.00").replace("nan", "-") for value in values)


@checked
def audit(
    model: nn.Module,
    images: Mapping[Size, Tensor] | Tensor,
    img_size: Size | None = None,
    labels: Tensor | None = None,
    *,
    batch_size: Count = 16,
    folds: int = 5,
    timed: bool = True,
    causes: bool = False,
    progress: Callable[..., Any] | None = None,
) -> Audit:
    """Measure what position information costs in a model, where its features contain it, and what depends on it.

    The model is not changed.

    Args:
        model: one of our backbones, or another model of images, as of timm or transformers.
        images: preprocessed images (B, C, height, width), or videos, with a depth; or (height, width) -> images: those
            at `img_size`, and the same images at other sizes. Repeated images are left out, with a warning.
        img_size: (height, width) in pixels; the model's by default, or the images' if they have one size.
        labels: the classes of the images, (B,), in the order of the logits; any classes for a model without a head,
            whose accuracy is for leave-one-out neighbors (`graticule.analysis.effect.neighbors_right`).
        batch_size: images per forward pass.
        folds: of the probe's cross-validation.
        timed: whether forward passes are timed.
        causes: whether the effect of each other size is split, in passes that each change one thing more: 'tokens' has
            the patches of the model's size with their positions, repeated or left out to fill the other grid; 'content'
            has the images of the other size, with those positions; the size itself has its own positions.
        progress: class of the progress bar, such as tqdm (default: none).

    Raises:
        ValueError: if the model, the sizes or the number of images cannot be used.
    """
    if isinstance(images, Tensor):
        check_images(images, videos=True)
        img_size = img_size or tuple(images.shape[2:])
        images = {tuple(images.shape[2:]): images}
    view = view_of(model, None if img_size is None else tuple(img_size))
    size = view.img_size
    if size not in images:
        raise ValueError(f"`images` must contain images of the model's size, {by(size)}, got others only.")
    sized = images[size]
    for at, others_at in images.items():
        check("images", others_at, Tensor)
        if others_at.shape[2:] != at or len(others_at) != len(sized):
            raise ValueError(f"`images` must have {len(sized)} of (height, width) {at}, got {tuple(others_at.shape)}.")
    if labels is not None and (labels.shape != sized.shape[:1] or labels.is_floating_point()):
        raise ValueError(
            f"`labels` must be {len(sized)} classes, whole numbers, got {labels.dtype} {tuple(labels.shape)}."
        )
    check_images(sized, videos=True)
    chosen = different_images(sized)
    images, labels = {at: of_size[chosen] for at, of_size in images.items()}, None if labels is None else labels[chosen]
    sized = images[size]
    if len(sized) < max(folds, 2):
        raise ValueError(f"`images` must be at least {max(folds, 2)}, one for each fold, got {len(sized)}.")
    others: dict[Size, ModelView] = {other: view.resized_to(other) for other in images if other != size}
    unavailable: dict[str, str] = {}
    changed = _changed_views(view, unavailable)
    timed_images = sum(3 * batch * turns for batch, turns in _TURNS.items()) if timed else 0
    further = (len(size) + 2) * min(len(sized), _TRANSLATION) + min(len(sized), _ATTENTION) + timed_images
    passes = 2 + len(changed) + 2  # the model twice, the changed views, and the two edits
    bar = AuditBar(
        passes * len(sized) + further, {other: (1 + 2 * causes) * len(sized) for other in others}, size, progress
    )
    batches = [slice(start, start + batch_size) for start in range(0, len(sized), batch_size)]
    shares = LayerShares(view)
    content, sums = _probe_sums(view, sized, batches, folds, unavailable, bar, shares)
    spreads = [layer.spread() for layer in sums]
    erasers = {
        "probe's directions removed": [layer.eraser() for layer in sums],
        "control's directions removed": [layer.eraser(control=True) for layer in sums],
    }
    runs: dict[str, tuple[Tensor, ModelView, Edit | None]] = {
        _ITSELF: (sized, view, None),
        **{name: (sized, other_view, None) for name, other_view in changed.items()},
        **{name: (sized, view, partial(_erase, layers)) for name, layers in erasers.items()},
        **{by(other): (images[other], other_view, None) for other, other_view in others.items()},
    }
    split: list[str] = []
    for other, other_view in others.items() if causes else ():
        work = partial(_cause_runs, view, other_view, sized, images[other])
        parts = _attempt(f"causes at {by(other)}", unavailable, work) or {}
        runs |= parts
        split += parts
    comparisons = {name: FeatureComparison(name, spreads, copies=name.endswith(", tokens")) for name in runs}
    further_shares = {by(other): LayerShares(other_view) for other, other_view in others.items()}
    for batch in batches:
        before: Pass | None = None
        for name, (inputs, other_view, edit) in runs.items():
            after = bar.run(name, other_view, inputs[batch], edit)
            before = before or after
            comparisons[name].add(before, after, None if labels is None else labels[batch])
            if name in further_shares:
                further_shares[name].add(inputs[batch], after.layers)

    def attempt(name: str, passes: int, work: Callable[[], T]) -> T | None:
        return bar.step(name, passes, lambda: _attempt(name, unavailable, work))

    few, some = sized[:_TRANSLATION], sized[:_ATTENTION]
    translation = attempt("translation", (len(size) + 2) * len(few), lambda: translation_error(model, few))
    attention = attempt("attention", len(some), lambda: attention_summary(view, some))
    times = attempt("time", timed_images, lambda: _times(view, sized)) if timed else None
    if bar.bar is not None:
        bar.bar.close()
    share = shares.share()
    share.others.update({other: further_shares[by(other)].share() for other in others})
    effects = {name: comparison.effect() for name, comparison in comparisons.items()}
    unchanged, sizes = effects.pop(_ITSELF), {other: effects.pop(by(other)) for other in others}
    of_causes = [effects.pop(name) for name in split]
    correct = unchanged.right
    return Audit(
        img_size=size,
        images=len(sized),
        grids=tuple(view.grids(size)),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        position=_position_parameters(model),
        unknown=view.unknown_parameters if isinstance(view, TracedModel) else [],
        share=share,
        probe_content=None if content is None else content.probe(),
        probes=[layer.probe() for layer in sums],
        effects=list(effects.values()),
        sizes=sizes,
        neighbors=correct is not None and unchanged.same is None,
        accuracy=None if correct is None else (100 * float(correct.mean()), 100 * float(standard_error(correct))),
        times=times or [],
        translation=translation,
        attention=attention,
        maps=_attempt("position maps", unavailable, lambda: position_maps(model, size)) or [],
        unavailable=unavailable,
        causes=of_causes,
    )


def _cause_runs(view: ModelView, other: ModelView, images: Tensor, resized: Tensor) -> dict[str, Any]:
    """Return the passes between images of the model's size and the same images at another size."""
    grids = [Grid(*grid.shape) for grid in view.grids(view.img_size)]
    if len(set(grids)) > 1:
        raise Unavailable("its layers have several grids, so a repeated patch has no position of its own in each")
    repeated, target = images, other.grids(other.img_size)[0].shape
    for axis, (side, count) in enumerate(zip(grids[0].shape, target, strict=True), start=2):
        patch = torch.arange(images.shape[axis] // side)
        pixels = nearest_of_axis(count, side)[:, None] * len(patch) + patch
        repeated = repeated.index_select(axis, pixels.flatten().to(images.device))
    if repeated.shape != resized.shape:
        raise Unavailable(f"patches of {by(view.img_size)} do not divide images of {by(other.img_size)}")
    placed = other.with_position_of(view)
    placed.run(repeated[:1])
    size = by(other.img_size)
    return {f"{size}, tokens": (repeated, placed, None), f"{size}, content": (resized, placed, None)}


def _position_parameters(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters of each part of the position information, as the model itself holds them."""
    view = view_of(model)
    parameters: dict[str, int] = {}
    if not isinstance(model, Debiased) and model is not view.model:
        with suppress(Unavailable):  # such as a model that takes all images as one row
            parameters = find_structure(model).position_parameters
    return parameters or view.position_parameters


def _changed_views(view: ModelView, unavailable: dict[str, str]) -> dict[str, ModelView]:
    """Return the views of the model with changed position, by name; reasons for missing ones go to `unavailable`."""
    double = tuple(2 * side for side in view.img_size)
    changes: dict[str, Callable[[], ModelView]] = {
        "position zeroed": view.without_position,
        "position shuffled": view.shuffled,
        f"position of {by(double)}": lambda: view.with_position_of(view.resized_to(double)),
    }

    def tried(change: Callable[[], ModelView]) -> ModelView:
        changed = change()
        changed.grids(changed.img_size)
        weight = next(view.model.parameters())
        changed.run(weight.new_zeros(1, image_channels(view.model), *view.img_size))
        return changed

    views = {name: _attempt(name, unavailable, partial(tried, change)) for name, change in changes.items()}
    return {name: changed for name, changed in views.items() if changed is not None}


def _probe_sums(
    view: ModelView,
    images: Tensor,
    batches: Sequence[slice],
    folds: int,
    unavailable: dict[str, str],
    bar: AuditBar,
    shares: LayerShares,
) -> tuple[PositionSums | None, list[PositionSums]]:
    """Return the sums of the probes of the embedded patches and of each layer, and add the images to `shares`."""
    content: PositionSums | None = None
    sums: list[PositionSums] = []
    for batch in batches:
        try:
            tokens, grid = view.patch_embeddings(images[batch])
            content = content or PositionSums(grid, tokens.shape[-1], folds)
            content.add(tokens)
        except Unavailable as error:
            unavailable["probe of the patches"] = str(error)
        layers = bar.run("probe", view, images[batch]).layers
        sums = sums or [PositionSums(Grid(*grid.shape), x.shape[-1], folds) for x, grid in layers]
        for layer, (tokens, grid) in zip(sums, layers, strict=True):
            layer.add(grid.split(tokens)[1])
        shares.add(images[batch], layers)
    return content, sums


def _erase(erasers: Sequence[Eraser], layer: int, tokens: Tensor, grid: Grid) -> Tensor:
    prefix, patches = grid.split(tokens)
    return torch.cat([prefix, erasers[layer](patches)], 1)


def _attempt(name: str, unavailable: dict[str, str], work: Callable[[], T]) -> T | None:
    """Return the result of an analysis; None if it is not available, with the reason in `unavailable`."""
    try:
        return work()
    except ValueError as error:  # such as `Unavailable`
        unavailable[name] = str(error)
        return None


def _times(view: ModelView, images: Tensor) -> list[Turns]:
    """Time forward passes with position information, without it, and with it folded if the model is a backbone."""
    variants = view.variants()
    with evaluating(view.model):
        return [time_in_turns(variants, images[:batch], turns) for batch, turns in _TURNS.items()]
