"""Advice for a frozen model at other image sizes: what its position should do there, chosen by unlabeled images."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from graticule.analysis.effect import resize_images
from graticule.analysis.share import Estimate, check_images, mean_estimate
from graticule.backbones.base import Backbone
from graticule.encodings.forms.rotary import PlaneRotary
from graticule.external.images import Size
from graticule.external.traced_model import convert_stock, view_of
from graticule.lab.studies.significance import LEVEL
from graticule.position.folded import Folded
from graticule.position.places import by
from graticule.position.position import ENCODINGS
from graticule.position.resampling import RESAMPLERS, build_resampler
from graticule.registry.checks import checked
from graticule.registry.specs import Spec
from graticule.surgery.change import change_position
from graticule.surgery.resize import resize, shared_copy, table_of, with_own_resampler
from graticule.system.tables import PrintedTable

#: The option that leaves a model as it is.
OWN = "its own"
#: The least number of images, the least loss that is worth a change, and the change above which only training helps.
LEAST, SMALL, TUNE = 10, 0.0005, 0.15
#: Options of resamplers that are tried in addition to the defaults of each; an offset of 0.1 is that of DINOv2's code.
_FILTERS = ("antialias=False", "antialias=False, align_corners=True", "antialias=False, offset=0.1")
_VARIANTS = *(f"bicubic({options})" for options in _FILTERS), "bilinear(antialias=False)", "geometric(mode='linear')"
#: Scalings of rotations that are tried; the last keeps frequencies of more than one turn, which small grids have.
_SCALINGS: tuple[dict[str, Any], ...] = (
    *({}, {"scaling": "interpolation"}, {"scaling": "ntk"}, {"scaling": "yarn"}),
    {"scaling": "yarn", "ramp": (0.25, 1.0)},
)
#: Images per forward pass.
_BATCH = 16
#: Coordinates that are equal on a square.
_ALIKE = (("separate", "min", "max"), ("corners", "area"))


def size_options(model: Any, size: Size) -> dict[str, str]:
    """Return what a model can do at a size, name -> Python, first what it does; at its own size, all do the same."""
    options = {OWN: "", **dict(_other_resamplers(model, size)), **dict(_other_rotations(model))}
    if hasattr(model, "windows"):
        ratios = [side / home for side, home in zip(size, model.img_size, strict=True)]
        windows = tuple(tuple(max(1, round(n * r)) for n, r in zip(w, ratios, strict=True)) for w in model.windows)
        line = f"model.set_input_size({size}, window_size={windows})"
        names = {name: f"larger windows{'' if name == OWN else f', {name}'}" for name in options}
        options |= {names[name]: f"{python}\n{line}".strip() for name, python in options.items()}
    return options


def _other_resamplers(model: nn.Module, size: Size) -> Iterator[tuple[str, str]]:
    """Yield other resamplers of tables and biases: each with its defaults, and some with other options."""
    kinds, first = set(map(table_of, with_own_resampler(model.modules()))), ""
    if not isinstance(model, Backbone):  # of another library, that does not convert: its tables are resampled once
        kinds, first = {"positions", "displacements"}, f"{size}, "
    options = {name: {option.default for option in RESAMPLERS.options(name).values()} for name in RESAMPLERS}
    for name in (*(name for name in options if inspect.Parameter.empty not in options[name]), *_VARIANTS):
        if RESAMPLERS[Spec.parse(name).name].takes & kinds:
            yield name, f"graticule.resize(model, {first}resampler={name!r})"


def _other_rotations(model: Any) -> Iterator[tuple[str, str]]:
    """Yield other rotations of queries and keys."""
    words = (getattr(model, "created", None) or {}).get("arguments", {})
    specs = list(ENCODINGS.specs(words["encoding"])) if "encoding" in words else []
    scaled = [index for index, spec in enumerate(specs) if "scaling" in ENCODINGS.options(spec.name)]
    rotary = [part for part in model.position.modules() if isinstance(part, PlaneRotary)] if scaled else []
    if len(scaled) != 1 or not rotary:
        return
    joining = "" if words.get("joining", "default") == "default" else f", {words['joining']!r}"
    for name, spec in _rotary_specs(specs[scaled[0]], rotary):
        text = " + ".join(map(str, [*specs[: scaled[0]], spec, *specs[scaled[0] + 1 :]]))
        yield name, f"graticule.change_position(model, {text!r}{joining})"


def _rotary_specs(spec: Spec, rotary: Sequence[Any]) -> Iterator[tuple[str, Spec]]:
    """Yield what differs, and the specs of rotations that are scaled in another way, or have other coordinates."""
    first, shapes = rotary[0], {part.grid.shape for part in rotary}
    options = {**type(first).presets.get(spec.options.get("preset", ""), {}), **spec.options}
    if first.scaling.reference not in (None, first.grid.shape):
        return  # at the size of the model, it is scaled already
    if not first.coordinates.in_patches:
        for other in next((names for names in _ALIKE if options.get("coordinates") in names), ()):
            yield f"coordinates={other!r}", Spec(spec.name, {**spec.options, "coordinates": other})
        return
    options = {key: value for key, value in options.items() if key not in ("preset", "scaling", "reference", "ramp")}
    for scaling in _SCALINGS[: 2 if first.series == "learned" else None]:
        name = ", ".join(f"{key}={value!r}" for key, value in scaling.items()) or "scaling=None"
        reference = {"reference": first.grid.shape} if scaling and len(shapes) == 1 else {}
        yield name, Spec(spec.name, {**options, **scaling, **reference})


def build(model: nn.Module, python: str) -> Any:
    """Return a copy of a model that shares its parameters, after Python of `size_options`: what is printed is run."""
    changed = shared_copy(model)
    exec(python, {"model": changed, "graticule": SimpleNamespace(resize=resize, change_position=change_position)})
    return changed


def distinct(model: Any, size: Size) -> dict[str, Any]:
    """Return the models of the options that are possible at a size, and whose position differs from earlier ones."""
    models: dict[str, tuple[Any, list[Any]]] = {}
    for name, python in size_options(model, size).items():
        with suppress(ValueError):  # a resampler that suits no table, or a method that needs several frequencies
            changed = build(model, python)
            parts: list[Any] = [object()]
            if isinstance(changed, Backbone):
                grid = changed.grid_at(size)
                parts = [grid, *map(_sample, tree_leaves(list(map(tuple, changed.position(grid)))))]
            if not any(len(old) == len(parts) and all(map(_equal, old, parts)) for _, old in models.values()):
                models[name] = changed, parts
    return {name: changed for name, (changed, _) in models.items()}


def _sample(part: Any) -> Any:
    """Return some 10,000 evenly spaced values of a tensor, as biases of large grids are large."""
    return part.detach().flatten()[:: part.numel() // 10_007 + 1].clone() if isinstance(part, Tensor) else part


def _equal(a: Any, b: Any) -> bool:
    """Return whether parts of a position are equal up to rounding."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    return bool(a == b)


class Scores(NamedTuple):
    """Values of an option at a size.

    loss: of each image, one minus the cosine of the features of its patches with those at the size of the model in the
        same places, both without their mean over images at each place, which is position.
    change: the mean over images of half the sum of the changes of class probabilities; without a head, of one minus
        the cosine of the mean patch without position.
    """

    loss: list[float]
    change: float


@dataclass(frozen=True, eq=False)
class SizeAdvice:
    """What to do at a size.

    scores: option -> its values; those that are equal there to an earlier one are left out.
    python: option -> the lines that set it.
    """

    scores: dict[str, Scores]
    python: dict[str, str]

    @cached_property
    def tests(self) -> dict[str, tuple[Estimate, float]]:
        """How much each other option loses less than the model's own, and p, adjusted for the number of options.

        Images are paired: their differences get random signs, and p is the probability that the largest t of all
        options is above that of one. So options that are nearly the same count as nearly one.

        Reference: Resampling-Based Multiple Testing (Westfall and Young, 1993), 'max T'.
        """
        losses, names = np.array(self.scores[OWN].loss), [name for name in self.scores if name != OWN]
        gains = np.array([losses - self.scores[name].loss for name in names]).reshape(-1, len(losses))  # (options, n)
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (9_999, len(losses)))
        means = np.concatenate([np.ones((1, len(losses))), signs]) @ gains.T / len(losses)
        with np.errstate(divide="ignore", invalid="ignore"):  # of gains that are all 0
            t = np.nan_to_num(np.abs(means) / np.sqrt((gains**2).mean(1) - means**2), posinf=1e9)
        p = (t.max(1, initial=0)[:, None] >= t[0] * (1 - 1e-12)).mean(0)
        return {name: (mean_estimate(gain), float(value)) for name, gain, value in zip(names, gains, p, strict=True)}

    @property
    def ranked(self) -> list[str]:
        """The options, from the least loss on."""
        return sorted(self.scores, key=lambda name: fmean(self.scores[name].loss))

    @property
    def chosen(self) -> str:
        """The option with the least loss if it is better beyond chance, by what is printed as 0.1; else the own."""
        gain, p = self.tests.get(self.ranked[0], (None, 1.0))
        return self.ranked[0] if gain and gain.value >= SMALL and p < LEVEL else OWN

    def lines(self) -> list[str]:
        """Return the advice for people."""
        change = self.scores[self.chosen].change
        lines = [f"{self.chosen}, {100 * change:.0f} % of the output changes"]
        if self.chosen == OWN:
            why = "nothing else is better" if self.ranked[0] == OWN else "no difference found"
            lines[0] += f"; {why if self.tests else 'there is nothing to choose'}, so leave the model as it is"
        lines += self.python.get(self.chosen, "").splitlines()
        return lines + ["nothing here keeps the features: fine-tune at this size"] * (change > TUNE)


@dataclass(frozen=True, eq=False, repr=False)
class Advice(PrintedTable):
    """What a model should do at other sizes; printed, the best options at each size with what to paste.

    img_size: (height, width) in pixels of the model.
    sizes: (height, width) -> what to do there.
    """

    img_size: Size
    sizes: dict[Size, SizeAdvice]
    left = 2

    @property
    def heading(self) -> str:
        """What the numbers are."""
        count = len(next(iter(self.sizes.values())).scores[OWN].loss)
        return (
            f"{count} images against the same at {by(self.img_size)}: loss of the patches without position, and change "
            "of the output, in %;\n95 % over images; *: differs from its own beyond chance, corrected for all options"
        )

    def summary(self, most: int = 3) -> list[tuple[str, ...]]:
        """Return a header, then the model's own option and the `most` best others at each size."""
        rows: list[tuple[str, ...]] = [("size", "option", "loss", "below its own", "change")]
        for size, advice in self.sizes.items():
            for name in (OWN, *[name for name in advice.ranked if name != OWN][:most]):
                loss, change = advice.scores[name]
                gain, p = advice.tests.get(name, (None, 1.0))
                below = "" if gain is None else gain.text() + "*" * (p < LEVEL)
                rows.append((by(size), name, mean_estimate(np.array(loss)).text(), below, f"{100 * change:.1f}"))
        return rows

    def lines(self) -> list[str]:
        """Return the advice for each size."""
        return [f"{by(size)}: " + "\n    ".join(advice.lines()) for size, advice in self.sizes.items()]

    @property
    def footer(self) -> list[str]:
        """The advice for each size."""
        return [line for text in self.lines() for line in text.splitlines()]


@checked
def advise(
    model: nn.Module,
    images: Tensor | Callable[[Size], Tensor],
    sizes: Sequence[Size],
    progress: Callable[..., Any] | None = None,
) -> Advice:
    """Choose what the position of a frozen model should do at other sizes, by unlabeled images; nothing is trained.

    Options that leave the model as it is at its own size are compared with it there: resamplers of tables and biases,
    scalings of rotations (none, interpolation, NTK, YaRN with two ramps) or their coordinates where these are relative
    to the grid, and windows that grow with the image. The model is not changed. One of timm or transformers is
    converted; of one that does not convert, the tables that `resize` takes are resampled.

    Args:
        model: one of our backbones, or another model of images, as of timm or transformers; it runs on its device.
        images: preprocessed images (B, C, height, width), to be resized; or a function that returns those of a size.
        sizes: (height, width) in pixels.
        progress: class of the progress bar, such as tqdm (default: none).

    Raises:
        ValueError: before any work, if the model is folded, or the sizes or images cannot be used.

    Example:
        >>> import graticule, torch
        >>> model = graticule.create_model("deit_tiny_patch16_224", depth=2, img_size=64, encoding="rope")
        >>> advice = graticule.advise(model, torch.randn(12, 3, 64, 64), [(96, 96)])
        >>> len(advice.sizes[96, 96].scores)
        5
    """
    if isinstance(getattr(model, "position", None), Folded):
        raise ValueError("`model` must not be folded; call graticule.unfold(model) first.")
    converted = None if isinstance(model, Backbone) else convert_stock(model)
    network: Any = model if converted is None else converted
    view, device = view_of(network), next(model.parameters()).device
    home: Any = view.img_size
    sizes = [tuple(size) for size in sizes]
    if not sizes or len({home, *sizes}) <= len(sizes):
        raise ValueError(
            f"`sizes` must be one or more different sizes other than that of the model, {by(home)}, got "
            f"{', '.join(map(by, sizes)) or 'none'}."
        )
    for size in sizes:
        view.resized_to(size).grids(size)  # refuses others
    check_images(images if isinstance(images, Tensor) else (images := lru_cache(2)(images))(home), LEAST)
    get = partial(resize_images, images) if isinstance(images, Tensor) else images
    tried = {size: distinct(network, size) for size in sizes}
    bar = progress and progress(total=1 + sum(map(len, tried.values())), unit="option")

    def run(changed: nn.Module, size: Size) -> tuple[Tensor, Tensor]:
        """Return patches (B, D, H, W), and logits (B, classes) or nothing."""
        outputs, at = [], view_of(changed, size)
        for batch in get(size).split(_BATCH):
            result = at.run(batch.to(device))
            patches = at.features(batch.to(device), result.layers).mT.unflatten(2, result.layers[-1][1].shape)
            logits = patches[:, :0, 0, 0] if result.logits is None else result.logits
            outputs.append((patches.float().cpu(), logits.float().cpu()))
        if bar:
            bar.update()
        patches, logits = map(torch.cat, zip(*outputs, strict=True))
        return patches, logits

    reference, advice = run(network, home), {}
    before = "" if converted is None else "model = graticule.convert(model)\n"
    for size, models in tried.items():
        scores = {name: _scores(reference, run(changed, size)) for name, changed in models.items()}
        python = {name: before + line for name, line in size_options(network, size).items() if line and name in scores}
        advice[size] = SizeAdvice(scores, python)
    if bar:
        bar.close()
    return Advice(home, advice)


def _scores(home: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Scores:
    """Compare patches and logits with those at the size of the model."""
    (old, new), (first, second) = zip(home, other, strict=True)
    new = build_resampler("bilinear")(new, old.shape[2:])
    a, b = old - old.mean(0), new - new.mean(0)
    loss = 1 - F.cosine_similarity(a.flatten(1), b.flatten(1))
    change = 1 - F.cosine_similarity(a.mean((2, 3)), b.mean((2, 3)))
    if first.numel():
        change = (first.softmax(-1) - second.softmax(-1)).abs().sum(-1) / 2
    return Scores(loss.tolist(), float(change.mean()))
