"""Count the files, functions and calls of this library on the usual paths, such as image to logits.

    python benchmarks/paths.py

Each path runs in a new process, once without counting if it is a forward pass, so that only the pass is counted, and
once under `sys.setprofile`. Only functions of this library count, not the bodies of modules while they are imported.
The last column is the number of its modules that the path imported.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import graticule

_HOME = str(Path(graticule.__file__).parent)
#: The training that the commands after it use.
_TRAIN = ["train", "digits_quick", "--quick", "--output"]


def command(*arguments: str) -> Callable[[], object]:
    """Return a function that runs a command of the library in this process."""
    from graticule.lab.cli import main

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main(list(arguments))

    return run


def image_to_logits(name: str, side: int, **options: Any) -> Callable[[], object]:
    """Return a forward pass of one image, after one that is not counted."""
    import torch

    model = graticule.create_model(name, img_size=side, **options).eval()
    images = torch.zeros(1, model.in_chans, side, side)

    def run() -> None:
        with torch.no_grad():
            model(images)

    run()
    return run


#: The paths: functions of the folder of a trained run and of a picture that return what is counted.
PATHS: dict[str, Callable[[str, str], Callable[[], object]]] = {
    "image to logits, vit_nano with LaPE": lambda run, picture: image_to_logits(
        "vit_nano_patch4_28", 28, encoding="learnable", joining="lape"
    ),
    "image to logits, Swin-T of 56 px": lambda run, picture: image_to_logits("swin_tiny_patch4_window7_224", 56),
    "create_model": lambda run, picture: lambda: graticule.create_model("vit_nano_patch4_28"),
    "recipe to run, digits_quick --quick": lambda run, picture: command(*_TRAIN, f"{run}-again"),
    "run to model": lambda run, picture: lambda: graticule.load(run),
    "picture to prediction": lambda run, picture: command("predict", run, picture),
    "run to scores of two sizes": lambda run, picture: command("evaluate", run, "--sizes", "28", "36"),
}


def count(name: str, run: str, picture: str) -> tuple[int, int, int, int]:
    """Run the path `name`; returns its numbers of files, functions, calls and newly imported modules."""
    path = PATHS[name](run, picture)
    before = _modules()
    calls: dict[tuple[str, str, int], int] = {}

    def seen(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_HOME) and code.co_name != "<module>":
            key = code.co_filename, code.co_qualname, code.co_firstlineno
            calls[key] = calls.get(key, 0) + 1

    sys.setprofile(seen)
    try:
        path()
    finally:
        sys.setprofile(None)
    return len({file for file, *_ in calls}), len(calls), sum(calls.values()), len(_modules() - before)


def _modules() -> set[str]:
    """Return the modules of the library that are imported."""
    return {name for name in sys.modules if name.split(".")[0] == "graticule"}


def main() -> None:
    """Count every path and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two paths in one new process, as a test")
    options = parser.parse_args()
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        run, picture = str(Path(folder) / "run"), str(Path(folder) / "picture.png")
        command(*_TRAIN, run)()
        Image.new("RGB", (28, 28)).save(picture)
        print("| path | files | functions | calls | modules imported |\n| --- | ---: | ---: | ---: | ---: |")
        spawn = multiprocessing.get_context("spawn")
        names = ["image to logits, vit_nano with LaPE", "run to model"] if options.quick else list(PATHS)
        with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=2 if options.quick else 1) as pool:
            for name in names:
                numbers = pool.submit(count, name, run, picture).result()
                print(f"| {name} | {' | '.join(f'{number:,}' for number in numbers)} |", flush=True)


if __name__ == "__main__":
    main()
