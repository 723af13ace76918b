"""`graticule audit`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from graticule import analysis, external
from graticule.lab import pages, studies, training
from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.opening import choose_device, folder_data, open_models, test_data
from graticule.lab.commands.options import JsonOutput, NamedData, NamedModels, OfSize, OnDevice, output_folder, square
from graticule.lab.terminal import bar
from graticule.registry.checks import parse_sizes, printable
from graticule.registry.fields import Count
from graticule.system.files import make_folder, write_json
from graticule.system.tables import format_table

if TYPE_CHECKING:
    import torch


@dataclass
class AuditOptions(OfSize, NamedModels, JsonOutput, OnDevice):
    """Measure the cost of position information, where it can be decoded, and its effects; one page and a JSON file.

        graticule audit RUN
        graticule audit deit_tiny_patch16_224 --images FOLDER
        graticule audit my_model.py:build --images FOLDER --sizes 288

    MODEL is a run folder, a file of weights in it, the name of a model of graticule or timm (timm:NAME if both have
    it), or FILE.py:NAME. It is not changed. The page has parameters and time, position maps, a linear probe of row and
    column per layer, the effects of zeroing, shuffling or removing position, other sizes, translation, and attention.
    """

    model: Positional[str]
    """run or published folder, file of weights, name, timm:NAME, hf:NAME, or FILE.py:NAME"""
    images: Path | None = None
    """folder of images, at any depth; FOLDER/CLASS/*, or FOLDER/val/CLASS/*, where classes are known (default: the test
    images, or videos, of the run)"""
    count: Annotated[int, Field(ge=5)] = 64
    """largest number of images, evenly spaced; at least one for each of the five folds of the probe"""
    sizes: list[str] = field(default_factory=list)
    """other sizes, sides in pixels, HEIGHTxWIDTH, or DEPTHxHEIGHTxWIDTH of videos (default: about 1.5 times the
    model's)"""
    causes: Rare[bool] = False
    """split the effect of each other size: more tokens, then their content, then the values of position"""
    labels: Rare[Path | None] = None
    """file of lines path,label with paths relative to the folder of images (default: by the folders of the classes)"""
    batch_size: Rare[Count] = 16
    """images per forward pass"""
    output: Path | None = None
    """folder for audit.html and audit.json (default: the run's, or runs/NAME)"""

    needs: ClassVar[Mapping[str, str]] = {"labels": "images"}  # a run has labels of its own


#: The default of the other size, as a multiple of the model's own.
_OTHER = 1.5


def run(options: AuditOptions) -> int:
    """Audit the position information of a model."""
    import torch

    from graticule.lab.data.folder_module import find_images

    if options.images is not None:
        find_images(options.images)  # before the model is built
        if options.labels is not None and not options.labels.is_file():
            raise FileNotFoundError(f"`labels` must be a file, got {str(options.labels)!r}, which does not exist.")
    elif training.source_kind(options.model) != "run":
        raise ValueError(f"`images` must be given for {options.model!r}, which is no run with test images of its own.")
    (opened,) = open_models([options.model], options, "audit")
    axes = len(opened.size)
    size = square(options.img_size, axes) or opened.size
    others = parse_sizes(options.sizes, axes=axes)
    view = external.view_of(opened.model).resized_to(size)
    for other in others:
        view.resized_to(other)
    others = others or _other_sizes(view)
    others = [other for other in dict.fromkeys(others) if other != size]
    device, folder = choose_device(options.device), output_folder(options.output, opened.folder)
    if options.images is None:
        data = test_data(opened, NamedData())
        batches = {at: data.spread_test_images(at, options.count) for at in (size, *others)}
        images = {at: batch.to(device) for at, (batch, _) in batches.items()}
        labels: torch.Tensor | None = batches[size][1]
    else:
        sized = dataclasses.replace(opened, img_size=size)
        data = folder_data(sized, options.images, 5, labels=options.labels, count=options.count)
        chosen = range(data.num_test)
        images = {at: data.test_images(at, chosen)[0].to(device) for at in (size, *others)}
        known = data.groups if not opened.num_classes and data.labels is None else data.labels
        labels = None if known is None else torch.from_numpy(known)
    model = opened.model.to(device)

    def announced_bar(total: int, unit: str) -> Any:
        """Print how long as many passes take, by the time of one, and return their bar."""
        seconds = float(analysis.time_in_turns({"model": view.run}, images[size][:1], 1).seconds["model"][0])
        about = f"as much as {total:,} forward passes of one image: about {studies.format_seconds(total * seconds)}"
        print(f"{about}; --count and --img-size change it", file=sys.stderr, flush=True)
        return bar(total=total, unit=unit)

    settings: Any = {"batch_size": options.batch_size, "causes": options.causes, "progress": announced_bar}
    result = analysis.audit(model, images, size, labels, **settings)
    about = _about(opened, options, device, options.line)
    make_folder(folder)
    page = pages.audit_page(result, opened.title, list(about.items()))
    record = {**about, **result.record()}
    written = [page.write(folder / "audit.html"), write_json(folder / "audit.json", record)]
    reasons = result.unavailable.items() if options.causes else ()
    options.say(result.heading, format_table(result.summary(), result.left))
    options.say(*(f"no {name}: {why}" for name, why in reasons if name.startswith("causes")))
    if labels is None:
        options.say(f"no accuracy: the folders in {printable(str(options.images))} are not the classes of the model")
    return options.finish(record, *written)


def _other_sizes(view: external.ModelView) -> list[tuple[int, ...]]:
    """Return the default of the other sizes; empty if the model refuses it."""
    pairs = zip(view.img_size, view.coarsest_patch, strict=True)
    other = tuple(max(round(_OTHER * side / step), 1) * step for side, step in pairs)
    try:
        view.resized_to(other)
    except ValueError:
        return []
    return [other]


def _about(opened: training.LoadedModel, options: AuditOptions, device: str, command: str) -> dict[str, str]:
    around = training.surroundings()
    versions, machine = around["versions"], around["machine"]
    return {
        "model": opened.title,
        "opened from": opened.target,
        "images": "test images of the run" if options.images is None else str(options.images),
        "command": command,
        "versions": f"graticule {versions['graticule']}, torch {versions['torch']}, timm {versions['timm']}",
        "machine": f"{machine['processor']}, {machine['threads']} threads, {device}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
