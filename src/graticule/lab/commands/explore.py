"""`graticule explore`."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graticule.lab.arguments import Positional
from graticule.lab.commands.options import NamedModels, command_line, output_file, parse, print_written, read_picture
from graticule.registry.checks import parse_sizes

if TYPE_CHECKING:
    from torch import Tensor

    from graticule.lab.commands.opening import Opened


@dataclass
class Explore(NamedModels):
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
    images: list[str] = dataclasses.field(default_factory=list)
    """files of images, or indices of test images of runs, counted from 0 (default: 0)"""
    sizes: list[str] = dataclasses.field(default_factory=list)
    """sizes of the images, sides in pixels, HEIGHTxWIDTH, or DEPTHxHEIGHTxWIDTH of films (default: that of each
    model)"""
    img_size: str | None = None
    """the size that is shown first, side in pixels or HEIGHTxWIDTH (default: the first of the sizes)"""
    output: Path | None = None
    """folder for explorer.html, or file NAME.html (default: the first run's, or runs/NAME)"""
    open: bool = True
    """open the page in the browser, if there is a terminal"""


def run(arguments: list[str]) -> int:
    """Write the page of the explorer."""
    options = parse(Explore, "explore", arguments)
    if len(options.models) > 2:
        raise ValueError(f"`models` must be one or two, got {len(options.models)}.")
    texts = list(dict.fromkeys([*([] if options.img_size is None else [options.img_size]), *options.sizes]))
    page = output_file(options.output, Path("explorer.html"))
    from graticule.lab.commands.opening import label_models, open_models
    from graticule.lab.pages.explorer import explored, write_explorer

    given = _images(options.images, options.models)
    opened = open_models(options.models, options, "explore")
    found = []
    for one, label in zip(opened, label_models(opened), strict=True):
        assert one.info is not None
        data = one.run.data() if one.run is not None and any(isinstance(image, int) for image in given) else None
        sizes = dict.fromkeys(parse_sizes(texts, axes=len(one.size)) or [one.size])
        images = [_read(one, given, size, data) for size in sizes]
        found.append(explored(one.model, images, one.info.mean, one.info.std, label, one.title))
    page = page if options.output else opened[0].folder / page
    page.parent.mkdir(parents=True, exist_ok=True)
    written = write_explorer(found, page, _made(command_line("explore", arguments)))
    print_written(written)
    if options.open and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(written.resolve().as_uri())
    return 0


def _images(given: list[str], targets: list[str]) -> list[int | Path]:
    """Return the images as indices of test images or as files, before any work."""
    from graticule.lab.commands.opening import has_data

    named = next((target for target in targets if not has_data(target)), None)
    images: list[int | Path] = [int(one) if one.isdecimal() else Path(one) for one in given or ["0"]]
    for one in images:
        if isinstance(one, int) and named is not None:
            raise ValueError(
                f"`images` must be files for {named!r}, the name of a model and no run with test images of its own, "
                f"got {one if given else 'none'}; add --images FILE."
            )
        if isinstance(one, Path) and not one.is_file():
            got = f"the folder {str(one)!r}; give FOLDER/*" if one.is_dir() else f"{str(one)!r}, which does not exist"
            raise FileNotFoundError(f"`images` must be files, or numbers of test images, got {got}.")
    return images


def _read(opened: Opened, given: list[int | Path], size: tuple[int, ...], data: Any) -> Tensor:
    """Return the images as inputs of the model, (n, C, height, width); `data` has the test images."""
    import torch

    from graticule.lab.data.augmentation import Augmentation
    from graticule.lab.data.images import LARGEST, decode
    from graticule.lab.data.transforms import evaluation_transform
    from graticule.system.files import read_bytes

    assert opened.info is not None
    if len(size) > 2 and any(isinstance(one, Path) for one in given):
        raise ValueError("`images` must be numbers of test films for a run on films, got a file.")
    transform = evaluation_transform(opened.info, size, opened.augmentation or Augmentation())
    found: list[Tensor] = []
    for one in given:
        if isinstance(one, int):
            found.append(data.test_images(size, [one])[0][0])
            continue
        image = read_picture(one, lambda path: decode(read_bytes(path, LARGEST)))
        found.append(transform(image.convert("L" if opened.info.channels == 1 else "RGB")))
    return torch.stack(found)


def _made(command: str) -> str:
    """Return the footer with the command, version and date."""
    from datetime import UTC, datetime
    from importlib.metadata import version

    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"Made by {command} with graticule {version('graticule')}, {now}."
