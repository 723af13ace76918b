"""`graticule explore`."""

from __future__ import annotations

import sys
import webbrowser
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import graticule
from graticule.lab import data, pages, training
from graticule.lab.arguments import Positional
from graticule.lab.commands.opening import label_models, open_models, read_input
from graticule.lab.commands.options import NamedModels, output_folder, print_written
from graticule.registry.checks import parse_sizes
from graticule.system.files import make_folder, read_bytes


@dataclass
class ExploreOptions(NamedModels):
    """Write one page to explore position in a model, or in two side by side, and open it in the browser.

        graticule explore RUN
        graticule explore RUN RUN --images 0 5 --sizes 224 288
        graticule explore deit_tiny_patch16_224 --images photo.jpg

    Choose layer, head and token, by pointer or keys: the page shows the position correlations of the token, its
    attention with and without position, the bias, the similarity under rotation, and mixing weights. The page contains
    all its data, so it can be sent as one file.
    """

    models: Positional[list[str]]
    """one or two: runs, published folders, files of weights, names, timm:NAME, hf:NAME, or FILE.py:NAME"""
    images: list[str] = field(default_factory=list)
    """files of images, or indices of test images of runs, counted from 0 (default: 0)"""
    sizes: list[str] = field(default_factory=list)
    """sizes of the images, sides in pixels or HEIGHTxWIDTH, the first shown first (default: each model's)"""
    output: Path | None = None
    """folder for explorer.html (default: the first run's, or runs/NAME)"""
    open: bool = True
    """open the page in the browser, if there is a terminal"""


def run(options: ExploreOptions) -> int:
    """Write the page of the explorer."""
    if len(options.models) > 2:
        raise ValueError(f"`models` must be one or two, got {len(options.models)}.")
    images = _find_images(options.images, options.models)
    opened = open_models(options.models, options, "explore")
    models = []
    for model, label in zip(opened, label_models(opened), strict=True):
        assert model.images is not None
        sizes = dict.fromkeys(parse_sizes(options.sizes) or [model.size])
        tests = model.run.data() if model.run is not None and any(isinstance(image, int) for image in images) else None
        batches = [_read_images(model, images, size, tests) for size in sizes]
        models.append(pages.compute_maps(model.model, batches, model.images.mean, model.images.std, label, model.title))
    page = output_folder(options.output, opened[0].folder) / "explorer.html"
    make_folder(page.parent)
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    about = f"Made by {options.line} with graticule {graticule.__version__}, {date}."
    print_written(pages.write_explorer(models, page, about))
    if options.open and sys.stdout.isatty():
        webbrowser.open(page.resolve().as_uri())
    return 0


def _find_images(images: list[str], targets: list[str]) -> list[int | Path]:
    """Return the images as indices of test images or as files, before any work."""
    without_data = next((target for target in targets if training.source_kind(target) != "run"), None)
    sources: list[int | Path] = [int(text) if text.isdecimal() else Path(text) for text in images or ["0"]]
    for source in sources:
        if isinstance(source, int) and without_data is not None:
            raise ValueError(
                f"`images` must be files for {without_data!r}, which is no run with test images of its own, got "
                f"{source if images else 'none'}; add --images FILE."
            )
        if isinstance(source, Path) and not source.is_file():
            text = f"the folder '{source}'; give FOLDER/*" if source.is_dir() else f"'{source}', which does not exist"
            raise FileNotFoundError(f"`images` must be files, or numbers of test images, got {text}.")
    return sources


def _read_images(opened: training.LoadedModel, sources: list[int | Path], size: tuple[int, int], tests: Any) -> Any:
    """Return the images as inputs of the model, (n, C, height, width); `tests` has the test images."""
    import torch

    assert opened.images is not None
    transform = data.evaluation_transform(opened.images, size, opened.augmentation)
    mode = "L" if opened.images.channels == 1 else "RGB"
    images = []
    for source in sources:
        if isinstance(source, int):
            images.append(tests.test_images(size, [source])[0][0])
        else:
            image = read_input(source, lambda path: data.decode(read_bytes(path, data.LARGEST)))
            images.append(transform(image.convert(mode)))
    return torch.stack(images)
