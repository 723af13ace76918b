"""Models in folders and on the Hugging Face hub, in timm's layout: config.json, model.safetensors and a model card."""

from __future__ import annotations

import inspect
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import timm
from pydantic import ConfigDict, with_config
from torch import nn
from typing_extensions import TypedDict

from graticule.backbones.model_card import Card, model_card
from graticule.checkpoints import load_checkpoint, save_weights
from graticule.checks import checked
from graticule.files import write_json, write_text
from graticule.names import known_name
from graticule.plugins import load_plugin, missing_plugins, plugins_of, registered_plugins
from graticule.specs import Spec
from graticule.typed import read_typed

PREFIX = "graticule_"
#: What timm's `create_model` and builder take themselves, beside the arguments of a backbone.
OF_TIMM = (
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "pretrained_model_args"),
    *("checkpoint_path", "cache_dir", "features_only", "feature_cls", "out_indices"),
)
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
#: Files of other libraries that hold pickled Python objects.
_PICKLES = ("pytorch_model.bin", "pytorch_model.pth", "model.pth", "model.pt")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class _Words(TypedDict, total=False):
    """What names the model, in our grammar."""

    model: str
    encoding: str
    joining: str
    resamplers: list[str]
    plugins: dict[str, str]


@with_config(ConfigDict(extra="allow"))
class _Config(TypedDict):
    """What is read of config.json; timm reads further keys."""

    architecture: str
    model_args: dict[str, Any]
    graticule: _Words


class HubModel(nn.Module):
    """A model that can be saved to a folder or to the hub, and opened from there."""

    #: The name of the model and the arguments that `create_model` built it with; None where something else did.
    created: Mapping[str, Any] | None = None
    pretrained_cfg: dict[str, Any]

    @checked
    def save_pretrained(
        self,
        folder: str | Path,
        *,
        preprocessing: Mapping[str, Any] | None = None,
        card: Card | None = None,
    ) -> Path:
        """Write config.json, model.safetensors and README.md to `folder`, each whole or not at all; returns it.

        `timm.create_model("local-dir:FOLDER", pretrained=True)` opens it too, once graticule is imported.

        Args:
            folder: is made if it is not there.
            preprocessing: entries of timm's configuration that differ from the model's, such as `mean`, `std` and
                `label_names`.
            card: what the model card says beside the names of the model.

        Raises:
            ValueError: if the model was not built by `create_model`, or with arguments that no file can hold.
        """
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"`folder` must be a folder, got {str(folder)!r}, which is none.")
        config = _config(self, preprocessing or {})
        text = model_card(folder.resolve().name, config, sum(p.numel() for p in self.parameters()), card or Card())
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(self.state_dict(), folder / WEIGHTS)
        write_json(folder / CONFIG, config)
        write_text(folder / CARD, text)
        return folder

    @checked
    def push_to_hub(
        self, repo_id: str, *, private: bool = False, token: str | None = None, revision: str | None = None
    ) -> str:
        """Upload what `save_pretrained` writes to the Hugging Face hub; returns the address of the commit.

        Args:
            repo_id: OWNER/NAME; the repository is made if it is not there.
            private: whether a new repository is private.
            token: of the hub, by default the one that `hf auth login` has saved.
            revision: branch.
        """
        check_repo_id(repo_id)
        with tempfile.TemporaryDirectory() as folder:
            written = self.save_pretrained(Path(folder) / repo_id.rpartition("/")[2])
            return push_folder(written, repo_id, private, token, revision)

    @classmethod
    def from_pretrained(cls, source: str | Path, **options: Any) -> Self:
        """Open a model as `graticule.from_pretrained` does.

        Raises:
            ValueError: also if it is of another class.
        """
        found = from_pretrained(source, **options)
        if not isinstance(found, cls):
            raise ValueError(f"`source` must be a {cls.__name__}, got {str(source)!r}, a {type(found).__name__}.")
        return found


def check_repo_id(repo_id: str) -> None:
    """Check that a name can be one of a repository on the hub.

    Raises:
        ValueError: if it cannot.
    """
    if not _HUB_ID.fullmatch(repo_id):
        raise ValueError(f"`repo_id` must be OWNER/NAME, got {repo_id!r}.")


def push_folder(
    folder: Path, repo_id: str, private: bool = False, token: str | None = None, revision: str | None = None
) -> str:
    """Upload a folder that `save_pretrained` wrote; returns the address of the commit."""
    check_repo_id(repo_id)
    from huggingface_hub import HfApi

    api = HfApi(token=token, library_name="graticule")
    made = api.create_repo(repo_id, private=private, exist_ok=True)
    done = api.upload_folder(
        repo_id=made.repo_id, folder_path=str(folder), revision=revision, commit_message="Add model"
    )
    return str(done)


@checked
def from_pretrained(
    source: str | Path,
    *,
    plugin: str | Path | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Any:
    """Open a model that `save_pretrained` or `push_to_hub` wrote, with its weights, in evaluation mode.

    Only config.json and model.safetensors are read, and no code that is in a file is run.

    Args:
        source: a folder, or OWNER/NAME on the Hugging Face hub.
        plugin: a Python file or an installed entry point that registers the classes of the model.
        revision: branch, tag or commit on the hub.
        token: of the hub.
        cache_dir: where downloaded files are kept, instead of the hub's own folder.
        local_files_only: whether nothing is downloaded.

    Raises:
        FileNotFoundError: if there is no such folder, or a file is missing in it.
        ValueError: if a file is damaged, says something that cannot be, or needs a plugin.
    """
    if plugin is not None:
        load_plugin(plugin)
    if Path(source).is_dir():
        config, weights = (_inside(Path(source), name) for name in (CONFIG, WEIGHTS))
    else:
        hub = {"revision": revision, "token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        config, weights = (_downloaded(str(source), name, hub) for name in (CONFIG, WEIGHTS))
    model = _build(config)
    return load_checkpoint(model, weights).eval()


def _inside(folder: Path, name: str) -> Path:
    """Return a file in a folder.

    Raises:
        FileNotFoundError: if it is not there.
        ValueError: if it is a link that leads out of the folder.
    """
    path = folder / name
    if not path.is_file():
        pickles = [one for one in _PICKLES if (folder / one).exists()]
        why = f"; {pickles[0]}, which can hold code, is not read" if pickles and name == WEIGHTS else ""
        raise FileNotFoundError(f"`source` must be a folder with {CONFIG} and {WEIGHTS}, got {folder}, no {name}{why}.")
    # the hub's own cache keeps files in blobs/ beside snapshots/
    within = folder.resolve().parents[1] if folder.resolve().parent.name == "snapshots" else folder.resolve()
    if not path.resolve().is_relative_to(within):
        raise ValueError(f"`source` must hold its files itself, got {path}, a link out of the folder.")
    return path


def _downloaded(repo_id: str, name: str, hub: Mapping[str, Any]) -> Path:
    """Return a file of a repository on the hub, from the cache or downloaded."""
    if not _HUB_ID.fullmatch(repo_id):
        raise FileNotFoundError(
            f"`source` must be a folder, or OWNER/NAME on the hub, got {repo_id!r}, which is not there."
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(hf_hub_download(repo_id, name, library_name="graticule", **hub))
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{repo_id} is no folder, and could not be downloaded from the hub: {str(error).splitlines()[0]}"
        ) from error
    except EntryNotFoundError as error:
        raise FileNotFoundError(
            f"{repo_id} on the hub has no {name}, so it is no model of graticule; timm.create_model opens one of timm."
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{repo_id} is no folder, and no repository on the hub that you can read; check its name, or log in."
        ) from error


def _build(path: Path) -> Any:
    """Build the model that a config.json describes."""
    config = read_typed(path, _Config)
    words = config["graticule"]
    missing, _ = missing_plugins(words.get("plugins", {}))
    if missing:
        raise ValueError(
            f"{path} needs the plugin {missing[0]}, which is imported only if you name it: pass plugin={missing[0]!r}, "
            f"or --plugin {missing[0]} on the command line."
        )
    try:
        known_name("architecture", config["architecture"], timm.list_models(f"{PREFIX}*"))
        return timm.create_model(config["architecture"], **_arguments(config["model_args"]))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} describes no model that can be built: {error}") from error


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the arguments of a model in a config.json: plain values, and none that names a file or a class."""
    refused = {*OF_TIMM, "position", "embed_layer", "block_layer", "norm_layer", "act_layer"}
    for name, value in given.items():
        if name in refused:
            raise ValueError(f"`model_args` must not set `{name}`, which names files or classes.")
        if not all(
            isinstance(one, str | int | float | None) for one in (value if isinstance(value, list) else [value])
        ):
            raise ValueError(f"`model_args` must hold plain values, got {name} = {value!r}.")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _config(model: Any, preprocessing: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json says of a model.

    Raises:
        ValueError: if the model was not built by `create_model`, or with arguments that no file can hold.
    """
    if model.created is None:
        raise ValueError(
            f"`model` must be built by create_model, whose name and arguments a file can hold, got a "
            f"{type(model).__name__} that was built in another way."
        )
    name, arguments = model.created["name"], dict(model.created["arguments"])
    arguments |= {"img_size": list(model.img_size), "num_classes": model.num_classes, "in_chans": model.in_chans}
    arguments["global_pool"] = model.global_pool
    sizes = inspect.signature(model.set_input_size).parameters  # the size of windows may have been changed with it
    arguments |= {argument: getattr(model, argument) for argument in sizes if argument != "img_size"}
    for argument, value in arguments.items():
        try:
            json.dumps(value)
        except TypeError:
            raise ValueError(
                f"`model` must be built from plain values, got `{argument}` of type {type(value).__name__}."
            ) from None
    modules = list(model.modules())
    kinds = {type(module) for module in modules}
    return {
        "architecture": PREFIX + name,
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "global_pool": model.global_pool,
        "model_args": arguments,
        "pretrained_cfg": {
            **{key: value for key, value in model.pretrained_cfg.items() if key not in ("hf_hub_id", "url", "file")},
            "input_size": [model.in_chans, *model.img_size],
            "num_classes": model.num_classes,
            **preprocessing,
        },
        "graticule": {
            "model": name,
            "encoding": arguments["encoding"],
            "joining": arguments["joining"],
            "resamplers": sorted({str(module.resampler) for module in modules if hasattr(module, "resampler")}),
            "plugins": {file: digest for file, digest in plugins_of(kinds).items() if file in registered_plugins()},
        },
    }


def written_words(builder: Callable[..., Any]) -> dict[str, str] | None:
    """Return encoding and joining as text, of a builder of `take_position`; None for another one."""
    if not isinstance(builder, partial):
        return None
    given = builder.keywords
    encoding, joining = given.get("encoding", "learnable"), given.get("joining", "default")
    specs: Sequence[Any] = encoding if isinstance(encoding, tuple) else (encoding,)
    return {"encoding": " + ".join(map(str, specs)), "joining": str(joining) if isinstance(joining, Spec) else joining}
