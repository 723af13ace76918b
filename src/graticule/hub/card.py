"""The model card of a published model, README.md on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graticule.registry.checks import printable

#: The task of each kind of model on the hub, and a description of the model.
_KINDS = {
    "backbone": ("image-classification", "An image classifier"),
    "attached": ("image-classification", "A model with a position"),
    "debiased": ("image-feature-extraction", "A model whose features have position removed,"),
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
    channels, height, width = config["pretrained_cfg"]["input_size"]
    rows = [(name, _code(words[name])) for name in ("model", "encoding", "joining")]
    rows += [(part, _code(text)) for part, text in config.get("parts", {}).items() if text]
    if words["resamplers"]:
        rows.append(("at other sizes", ", ".join(map(_code, words["resamplers"]))))
    rows += [
        ("images", f"{channels} x {height} x {width} (channels, height, width)"),
        ("classes", config["num_classes"]),
        ("parameters", f"{parameters:,}"),
        *([("trained on", _line(card.data))] if card.data else []),
    ]
    tags = "".join(f"- {tag}\n" for tag in (pipeline, "graticule", "timm", "position-encoding"))
    text = f"---\nlibrary_name: graticule\npipeline_tag: {pipeline}\ntags:\n{tags}---\n# {_line(title)}\n\n"
    text += f"{what} of graticule, a library of position encodings for vision backbones.\n\n{_table(rows)}"
    if card.results:
        results = _table((_line(name), _line(value)) for name, value in card.results)
        text += f"\n## Results\n\n{results}\n{_line(card.measured)}\n"
    for file, caption in card.figures:
        text += f"\n![{_line(caption)}]({_line(file)})\n\n{_line(caption)}\n"
    return text + _use([_line(name) for name in words["plugins"]], kind == "backbone")


def _use(plugins: Sequence[str], in_timm: bool) -> str:
    """Return the section on opening the model."""
    named = [f'"{name}"' for name in plugins]
    given = "" if not named else f", plugin={named[0] if len(named) == 1 else '[' + ', '.join(named) + ']'}"
    text = "\n## Use\n\n    import graticule\n\n"
    text += f'    model = graticule.from_pretrained("OWNER/NAME"{given})  # or a folder\n'
    if in_timm:
        text += "\nor by timm:\n\n    import graticule.backbones, timm  # registers the models\n\n"
        text += "".join(f"    graticule.load_plugin({name})\n" for name in named) + ("\n" if named else "")
        text += '    model = timm.create_model("hf-hub:OWNER/NAME", pretrained=True)'
        text += '  # "local-dir:FOLDER" for a folder\n'
        text += "    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n"
    if plugins:
        listed = ", ".join(f"`{name}`" for name in plugins)
        text += f"\nThe model needs the plugin {listed}, a Python file of its authors. "
        text += "It is imported only if you name it.\n"
    return text


def _table(rows: Iterable[tuple[str, object]]) -> str:
    return "| | |\n| --- | --- |\n" + "".join(f"| {name} | {value} |\n" for name, value in rows)


def _code(text: str) -> str:
    return f"`{_line(text)}`"


def _line(text: str) -> str:
    """Return text as one line, escaped so that it ends no code span and opens no tag."""
    return printable(text).replace("`", "'").replace("<", "&lt;").replace("|", "/")
