"""`graticule resamplers`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from graticule.checks import printable
from graticule.commands.kinds import check_on_images
from graticule.commands.options import (
    choose_device,
    open_runs,
    output_folder,
    parse,
    parse_checkpoint,
    parse_sizes,
    print_table,
    print_written,
)
from graticule.names import is_path


@dataclass
class Resamplers:
    """Try all resamplers on a model at other image sizes: which keeps its features, and its scores.

    Features are compared with those of the same images at the size of the training. Scores need a run and images in
    one folder per class.
    """

    model: tyro.conf.Positional[str]
    """run folder, or name of a model"""
    images: Path
    """folder of images, at any depth; FOLDER/CLASS/*, or FOLDER/val/CLASS/*, where classes are known"""
    sizes: list[str] = dataclasses.field(default_factory=list)
    """sides in pixels, or HEIGHTxWIDTH"""
    count: int = 256
    """largest number of images, evenly spaced through all"""
    weights: Path | None = None
    """checkpoint for a model that is given by name (default: its published weights, where it has some)"""
    encoding: str | None = None
    """encoding of a model that is given by name (default: its own)"""
    checkpoint: str = "best"
    """best or last, of a run"""
    device: str = "auto"
    """cpu, cuda, ...; auto is a GPU if there is one"""
    output: Path | None = None
    """folder for the values of every image as JSON (default: the run's, or this one)"""


def run(arguments: list[str]) -> int:
    """Try all resamplers on a model at other image sizes."""
    options = parse(Resamplers, "resamplers", arguments)
    sizes = parse_sizes(options.sizes)
    if not sizes or len(set(sizes)) < len(sizes):
        raise ValueError(f"`sizes` must be different sizes, at least one, got {' '.join(options.sizes) or 'none'}.")
    if options.count < 2:
        raise ValueError(f"`count` must be at least 2, for an error bar, got {options.count}.")
    if not options.images.is_dir():
        raise FileNotFoundError(f"`images` must be a folder, got {str(options.images)!r}, which is not there.")
    checkpoint = parse_checkpoint(options.checkpoint)
    if is_path(options.model) or Path(options.model).is_dir():
        if options.weights is not None or options.encoding is not None:
            given = "weights" if options.weights is not None else "encoding"
            raise ValueError(f"`{given}` must be left out with a run, which has its own.")
        (opened,) = open_runs([Path(options.model)], "resamplers")
        check_on_images([opened], "resamplers")
        recipe = opened.recipe()
        model, info = opened.model(checkpoint=checkpoint), opened.data().info
        augmentation, folder, names = recipe.augmentation, opened.folder, info.class_names
    else:
        model, info, augmentation = _named(options)
        folder, names = Path(), ()
    from graticule.data import evaluation_transform
    from graticule.studies import try_resamplers
    from graticule.studies.resamplers import resampled_modules
    from graticule.tasks import check_sizes

    resampled_modules(model)  # which there have to be
    trained_at = tuple(model.img_size)
    check_sizes(model, sizes)
    device, output = choose_device(options.device), output_folder(options.output, folder)
    files, labels = _files(options.images, names, options.count)
    pictures = [_picture(path, info.channels) for path in files]
    images = {
        size: [evaluation_transform(info, size, augmentation)(picture) for picture in pictures]
        for size in dict.fromkeys([trained_at, *sizes])
    }
    study = try_resamplers(model, images, trained_at, labels, device=device)
    header, *rows = study.rows()
    print_table(header, rows)
    for note in study.notes():
        print(note)
    if labels is None and names:
        print(f"no scores: the folders in {printable(str(options.images))} are not the classes of the run")
    output.mkdir(parents=True, exist_ok=True)
    print_written(study.write(output / "resamplers.json"))
    return 0


def _named(options: Resamplers) -> tuple[Any, Any, Any]:
    """Build a model that is given by name; returns it with what its images look like."""
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    from graticule.backbones import create_model
    from graticule.checkpoints import load_checkpoint
    from graticule.data import Augmentation
    from graticule.data.images import DatasetInfo

    chosen: dict[str, Any] = {} if options.encoding is None else {"encoding": options.encoding}
    model: Any = create_model(options.model, **chosen)
    published = model.pretrained_cfg
    if options.weights is not None:
        load_checkpoint(model, options.weights)
    elif options.encoding is None and any(published.get(key) for key in ("hf_hub_id", "url", "file")):
        model = create_model(options.model, pretrained=True)
    else:
        print(
            "the model has no published weights: those of its initialization are used; see --weights", file=sys.stderr
        )
    mean, std = (
        tuple(published.get(key) or known)[: model.in_chans]
        for key, known in (("mean", IMAGENET_DEFAULT_MEAN), ("std", IMAGENET_DEFAULT_STD))
    )
    return model.eval(), DatasetInfo("images", (), model.in_chans, None, mean, std), Augmentation()


def _files(folder: Path, names: Sequence[str], count: int) -> tuple[list[Path], list[int] | None]:
    """Find images, evenly spaced through all, and their classes if the folders in `folder` are those of `names`."""
    from graticule.data.folder import SPLITS, files_below, is_image

    root = next((folder / name for name in SPLITS["test"] if (folder / name).is_dir()), folder)
    found = files_below(root, folder, is_image)
    if len(found) < 2:
        raise ValueError(f"`images` must have two images at least, got {len(found)} in {folder}.")
    kept = [found[index * len(found) // count] for index in range(count)] if len(found) > count else found
    classes = [path.relative_to(root).parts[0] for path in kept]
    return kept, [names.index(name) for name in classes] if set(classes) <= set(names) else None


def _picture(path: Path, channels: int) -> Any:
    """Read an image with 1 or 3 channels."""
    from graticule.data.encoded import LARGEST, decode
    from graticule.files import read_bytes

    try:
        picture = decode(read_bytes(path, LARGEST))
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path} must be an image that can be read: {error}.") from None
    return picture.convert("L") if channels == 1 else picture
