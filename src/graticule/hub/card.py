"""The model card of a published model, README.md on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from graticule.registry.checks import printable

_TEMPLATES = Environment(  # Markdown, so nothing is escaped for HTML
    loader=PackageLoader("graticule.hub"), autoescape=False, undefined=StrictUndefined, trim_blocks=True
)


#: The task of each kind of model on the hub, and a description of the model.
_KINDS = {
    "backbone": ("image-classification", "An image classifier"),
    "attached": ("image-classification", "A model with a position"),
    "segmenter": ("image-segmentation", "A model of semantic segmentation"),
    "detector": ("object-detection", "A detector"),
}


@dataclass(frozen=True)
class Card:
    """Contents of a model card in addition to the names of the model.

    data: training data.
    results: measured results, ordered pairs of a name and a value.
    measured: when, where and on what the results were measured.
    figures: pairs of the name of a file in the folder and its caption.
    """

    data: str = ""
    results: Sequence[tuple[str, str]] = ()
    measured: str = ""
    figures: Sequence[tuple[str, str]] = field(default=())


def model_card(title: str, config: Mapping[str, Any], parameters: int, card: Card) -> str:
    """Return the text of the model card of a model that `config` describes."""
    words = config["graticule"]
    kind = words.get("kind", "backbone")
    pipeline, what = _KINDS[kind]
    return _TEMPLATES.get_template("model_card.md").render(
        title=_line(title),
        kind=kind,
        pipeline=pipeline,
        what=what,
        parts={name: _line(text) for name, text in config.get("parts", {}).items() if text},
        words={name: _line(words[name]) for name in ("model", "encoding", "joining")},
        resamplers=[_line(one) for one in words["resamplers"]],
        plugins=[_line(name) for name in words["plugins"]],
        size=config["pretrained_cfg"]["input_size"],
        classes=config["num_classes"],
        parameters=f"{parameters:,}",
        data=_line(card.data),
        results=[(_line(name), _line(value)) for name, value in card.results],
        measured=_line(card.measured),
        figures=[(_line(file), _line(caption)) for file, caption in card.figures],
    )


def _line(text: str) -> str:
    """Return text as one line, escaped so that it ends no code span and opens no tag."""
    return printable(text).replace("`", "'").replace("<", "&lt;").replace("|", "/")
