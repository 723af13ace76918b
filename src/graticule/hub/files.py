"""Files of a published model: write them and a model card to a folder, upload them to the hub, and find them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub
from huggingface_hub import constants, get_session
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError
from torch import nn

from graticule.checkpoints.obstacles import check_savable
from graticule.checkpoints.read import save_weights
from graticule.position.places import by
from graticule.registry.checks import printable, sides
from graticule.registry.fields import read_typed
from graticule.system.files import make_folder, read_json, write_json, write_text

#: Timeout for a connection to the hub, in seconds.
_SECONDS = 3.0


@contextmanager
def quick_hub() -> Iterator[None]:
    """Let downloads use the cache of the hub, or fail, immediately if the hub cannot be reached."""
    if constants.HF_HUB_OFFLINE or can_connect(constants.ENDPOINT):
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    except LocalEntryNotFoundError as error:
        raise ConnectionError(
            f"{constants.ENDPOINT} does not answer within {_SECONDS:.0f} s, and the file is not in the cache"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = False


def can_connect(address: str) -> bool:
    """Return True if the server at `address`, a URL, answers in time."""
    answers: list[Any] = []

    def connect() -> None:
        with suppress(Exception):  # of the client, which knows proxies
            answers.append(get_session().head(address, timeout=_SECONDS))

    thread = Thread(target=connect, daemon=True)  # a look-up of a host name has no timeout
    thread.start()
    thread.join(_SECONDS)
    return bool(answers)


CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
#: The index of weights of transformers that are in several files, and the names that these can have.
INDEX, _SHARD = "model.safetensors.index.json", re.compile(r"\w[\w.-]*\.safetensors")


@dataclass(frozen=True)
class _Index:
    """Entries that are read from an index: the file of each tensor."""

    weight_map: dict[str, str]


#: The preprocessing of images of a model of transformers, and the position that is attached to one.
PREPROCESSOR, POSITION = "preprocessor_config.json", "graticule.safetensors"
#: Files of other libraries that hold pickled Python objects.
_PICKLES = ("pytorch_model.bin", "pytorch_model.pth", "model.pth", "model.pt")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def check_folder(folder: Path) -> None:
    """Check that a model can be written to `folder`."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`folder` must be a folder, got {str(folder)!r}, which is a file.")
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {"graticule": {}}
    if not isinstance(config, dict) or "graticule" not in config:
        raise ValueError(
            f"`folder` must be new or contain a published model of this library, got {str(folder)!r}, whose {CONFIG} "
            "is of another program."
        )
    if not (folder / CONFIG).is_file() and (taken := [name for name in (WEIGHTS, CARD) if (folder / name).exists()]):
        raise ValueError(
            f"`folder` must be new or contain a published model of this library, got {str(folder)!r}, whose {taken[0]} "
            "would be replaced; name another folder."
        )


def write_model(
    model: nn.Module, folder: Path, config: Mapping[str, Any], card: Card, skeleton: nn.Module | None = None
) -> Path:
    """Write config.json, model.safetensors and README.md to `folder`, each completely or not at all, and return it.

    `skeleton` is what config.json builds, if this library does; a model that differs from it is refused.
    """
    check_savable(model, skeleton)
    text = model_card(folder.resolve().name, config, sum(p.numel() for p in model.parameters()), card)
    make_folder(folder)
    save_weights(model.state_dict(), folder / WEIGHTS)
    write_json(folder / CONFIG, config)
    write_text(folder / CARD, text)
    return folder


def check_repo_id(repo_id: str) -> None:
    """Check that a name is valid for a repository on the hub."""
    if not _HUB_ID.fullmatch(repo_id):
        raise ValueError(f"`repo_id` must be OWNER/NAME, got {repo_id!r}.")


def push_folder(
    folder: Path, repo_id: str, private: bool = False, token: str | None = None, revision: str | None = None
) -> str:
    """Upload a folder that `save_pretrained` wrote, and return the address of the commit."""
    check_repo_id(repo_id)
    api = huggingface_hub.HfApi(token=token, library_name="graticule")
    try:
        name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        sent: Any = {"folder_path": str(folder), "revision": revision, "commit_message": "Add model"}
        return str(api.upload_folder(repo_id=name, **sent))
    except Exception as error:  # of the client, or of one of the two libraries by which it connects
        raise OSError(f"{folder} could not be uploaded to {repo_id}: {error}") from error


def find_files(source: str | Path, hub: Mapping[str, Any]) -> tuple[Path, Path]:
    """Return config.json and model.safetensors of a folder, or of a repository on the hub.

    If a model of transformers has its weights in several files, their index is returned; `shards` lists the files.
    """
    folder = Path(source)
    find = partial(_within, folder) if folder.is_dir() else partial(_downloaded, str(source), hub=hub)
    config = find(CONFIG)
    try:
        return config, find(WEIGHTS)
    except FileNotFoundError as error:
        try:
            index = find(INDEX)
        except FileNotFoundError:
            raise error from None
    for file in shards(index):
        find(file.name)
    return config, index


def shards(weights: Path) -> list[Path]:
    """Return the files of weights: the one that is given, or those that an index names, which are in its folder."""
    if weights.name != INDEX:
        return [weights]
    names = dict.fromkeys(read_typed(weights, _Index).weight_map.values())
    for name in names:
        if not _SHARD.fullmatch(name):
            raise ValueError(
                f"{weights} must name files in its folder that end in .safetensors, got {printable(name)!r}."
            )
    return [weights.parent / name for name in names]


def find_beside(source: str | Path, names: Iterable[str], hub: Mapping[str, Any]) -> None:
    """Download further files of a repository beside its others, such as preprocessing, those that it has."""
    for name in () if Path(source).is_dir() else names:
        with suppress(FileNotFoundError):
            _downloaded(str(source), name, hub)


def _within(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        pickles = [pickle for pickle in _PICKLES if (folder / pickle).exists()]
        why = f"; {pickles[0]}, which can hold code, is not read" if pickles and name == WEIGHTS else ""
        raise FileNotFoundError(f"`source` must be a folder with {CONFIG} and {WEIGHTS}, got {folder}, no {name}{why}.")
    return path


def _downloaded(repo_id: str, name: str, hub: Mapping[str, Any]) -> Path:
    """Return a file of a repository on the hub, from the cache or downloaded."""
    if not _HUB_ID.fullmatch(repo_id):
        raise FileNotFoundError(
            f"`source` must be a folder, or OWNER/NAME on the hub, got {repo_id!r}, which does not exist."
        )
    try:
        with nullcontext() if hub.get("local_files_only") else quick_hub():
            return Path(huggingface_hub.hf_hub_download(repo_id, name, library_name="graticule", **hub))
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"{repo_id} is not a folder, and could not be downloaded from the hub: {str(error).splitlines()[0]}"
        ) from error
    except EntryNotFoundError as error:
        raise FileNotFoundError(
            f"{repo_id} on the hub has no {name}, so it is not a model of graticule; timm.create_model opens timm's."
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{repo_id} is neither a folder nor a repository on the hub that you can read; check its name, or log in."
        ) from error


# The model card

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
    figures: Sequence[tuple[str, str]] = ()


def model_card(title: str, config: Mapping[str, Any], parameters: int, card: Card) -> str:
    """Return the text of the model card of a model that `config` describes."""
    words = config["graticule"]
    kind = words.get("kind", "backbone")
    pipeline, noun = _KINDS[kind]
    channels, *image = config["pretrained_cfg"]["input_size"]
    rows = [(name, _code(words[name])) for name in ("model", "encoding", "joining")]
    rows += [(part, _code(text)) for part, text in config.get("parts", {}).items() if text]
    if words["resamplers"]:
        rows.append(("at other sizes", ", ".join(map(_code, words["resamplers"]))))
    rows += [
        ("images", f"{by([channels, *image])} (channels, {', '.join(sides(len(image)))})"),
        ("classes", config["num_classes"]),
        ("parameters", f"{parameters:,}"),
        *([("trained on", _line(card.data))] if card.data else []),
    ]
    tags = "".join(f"- {tag}\n" for tag in (pipeline, "graticule", "timm", "position-encoding"))
    text = f"---\nlibrary_name: graticule\npipeline_tag: {pipeline}\ntags:\n{tags}---\n# {_line(title)}\n\n"
    text += f"{noun} of graticule, a library of position encodings for vision backbones.\n\n{_table(rows)}"
    if card.results:
        results = _table((_line(name), _line(value)) for name, value in card.results)
        text += f"\n## Results\n\n{results}\n{_line(card.measured)}\n"
    for file, caption in card.figures:
        text += f"\n![{_line(caption)}]({_line(file)})\n\n{_line(caption)}\n"
    return text + _use([_line(name) for name in words["plugins"]], kind == "backbone")


def _use(plugins: Sequence[str], in_timm: bool) -> str:
    listed = ", ".join(f'"{name}"' for name in plugins)
    argument = "" if not plugins else f", plugin={listed if len(plugins) == 1 else f'[{listed}]'}"
    text = "\n## Use\n\n    import graticule\n\n"
    text += f'    model = graticule.from_pretrained("OWNER/NAME"{argument})  # or a folder\n'
    if in_timm:
        text += "\nor by timm:\n\n    import graticule.backbones, timm  # registers the models\n\n"
        text += "".join(f'    graticule.load_plugin("{name}")\n' for name in plugins) + "\n" * bool(plugins)
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
