"""Options and commands that are for images only, or for text only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_kind(on_text: bool, *, lengths: Sequence[int], **of_images: Sequence[Any]) -> None:
    """Check that what is on text is given no option of images, and the other way round.

    Raises:
        ValueError: naming the option, and what belongs to which.
    """
    belongs = f"--lengths is for text, {' and '.join(f'--{name}' for name in of_images)} for images"
    given = of_images if on_text else {"lengths": lengths}
    for name, values in given.items():
        if values:
            what = "text" if on_text else "images"
            raise ValueError(f"`{name}` must be left out with {what}, got {' '.join(map(str, values))}; {belongs}.")


def check_on_images(runs: Sequence[Any], command: str) -> None:
    """Check that all runs are on images.

    Raises:
        ValueError: for the first on text, with the commands that take one.
    """
    from graticule.tasks import Recipe

    for run in runs:
        if not isinstance(run.recipe(), Recipe):
            raise ValueError(
                f"`runs` must be on images, which graticule {command} looks at, got {str(run.folder)!r}, which "
                "is on text; what a language model learned is told by graticule evaluate RUN --lengths 128 512, "
                "graticule correlations RUN and graticule generate RUN."
            )
