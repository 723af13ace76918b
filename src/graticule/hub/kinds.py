"""Models in folders and on the Hugging Face hub, in timm's layout: config.json, model.safetensors and a model card."""

from __future__ import annotations

import tempfile
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from torch import nn

from graticule.checkpoints.skeleton import build_skeleton
from graticule.hub import files
from graticule.hub.config import built_from
from graticule.hub.files import POSITION, PREPROCESSOR, WEIGHTS, Card, shards
from graticule.registry.checks import checked, known_name
from graticule.registry.fields import read_typed
from graticule.registry.plugins import load_plugins, missing_plugins, named_again
from graticule.registry.registry import NameTable
from graticule.system.files import write_json
from graticule.system.memory import sized_as


@dataclass(frozen=True)
class ModelWords:
    """Names of the model, its encoding and its joining, in our grammar."""

    kind: str = "backbone"
    model: str = ""
    encoding: str = ""
    joining: str = ""
    resamplers: list[str] = field(default_factory=list)
    plugins: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _KindConfig:
    """Entries that are read from every config.json."""

    graticule: ModelWords | None = None
    model_type: str | None = None


#: The prefix of names on the hub, where other names are possible.
HUB = "hf:"
#: The prefix of models of timm, whose names graticule has, too.
TIMM = "timm:"
#: Opens a model of a kind from its config.json and its weights; with None instead of these it only builds the model.
Opener = Callable[..., nn.Module]
#: Prefix of a name -> the function of the rest of it that opens the model; the modules that convert register it.
SOURCES: NameTable[str, Callable[[str], nn.Module]] = NameTable("source", "graticule.external")
Function = TypeVar("Function", bound=Opener)
#: The kinds of published models; the modules that build a kind register it.
KINDS: NameTable[str, Opener] = NameTable("kind", "graticule.backbones", "graticule.dense", "graticule.external")


def register_kind(kind: str) -> Callable[[Function], Function]:
    """Return a decorator that registers the function that opens published models of a kind."""
    return KINDS.register(kind)


class HubModel(nn.Module):
    """A model that can be saved to a folder or to the hub, and opened from there."""

    #: The name and the arguments that `create_model` built the model from; None if it was built in another way.
    created: Mapping[str, Any] | None = None
    #: Reason for which `graticule.export` cannot write a program of it, as a part of a sentence; empty if it can.
    no_program: ClassVar[str] = ""

    @abstractmethod
    def hub_config(self, preprocessing: Mapping[str, Any]) -> dict[str, Any]:
        """Return the contents of the model's config.json; `preprocessing` has entries of timm's configuration.

        Raises:
            ValueError: if a file cannot describe how it is built.
        """

    @checked
    def save_pretrained(
        self, folder: str | Path, *, preprocessing: Mapping[str, Any] | None = None, card: Card | None = None
    ) -> Path:
        """Write config.json, model.safetensors and README.md to `folder`, each completely or not at all, and return it.

        `graticule.from_pretrained` opens it. A backbone is opened by `timm.create_model("local-dir:FOLDER",
        pretrained=True)` too, once graticule is imported. A warning says what is not kept: a dtype other than float32,
        which parameters are frozen, hooks, functions and rates of training.

        Args:
            folder: created if it does not exist.
            preprocessing: entries of timm's configuration that differ from the model's, such as `mean`, `std` and
                `label_names`.
            card: contents of the model card in addition to the names of the model.

        Raises:
            ValueError: if the model was not built from names, or with arguments that a file cannot contain, or was
                changed, so that what its file builds would be another model; nothing is written.
        """
        folder = Path(folder)
        files.check_folder(folder)
        config = self.hub_config(preprocessing or {})
        return files.write_model(self, folder, config, card or Card(), skeleton_of(self, config))

    @checked
    def push_to_hub(
        self, repo_id: str, *, private: bool = False, token: str | None = None, revision: str | None = None
    ) -> str:
        """Upload the files of `save_pretrained` to the Hugging Face hub, and return the address of the commit.

        Args:
            repo_id: OWNER/NAME; the repository is created if it does not exist.
            private: whether a new repository is private.
            token: token of the hub; by default the one that `hf auth login` has saved.
            revision: branch.
        """
        files.check_repo_id(repo_id)
        with tempfile.TemporaryDirectory() as folder:
            written = self.save_pretrained(Path(folder) / repo_id.rpartition("/")[2])
            return files.push_folder(written, repo_id, private, token, revision)

    @classmethod
    def from_pretrained(cls, source: str | Path, **options: Any) -> Self:
        """Open a model as `graticule.from_pretrained` does.

        Raises:
            ValueError: also if it is of another class.
        """
        model = from_pretrained(source, **options)
        if not isinstance(model, cls):
            raise ValueError(f"`source` must be a {cls.__name__}, got {str(source)!r}, a {type(model).__name__}.")
        return model


def skeleton_of(model: nn.Module, config: Mapping[str, Any]) -> nn.Module:
    """Build what `from_pretrained` builds from a config.json of a model, without weights."""
    kind = ModelWords(**config["graticule"]).kind
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / files.CONFIG
        write_json(path, config)
        try:
            return build_skeleton(lambda: KINDS[kind](path, None))
        except ValueError as error:
            raise ValueError(
                f"`model` must be one that its arguments build, got {type(model).__name__}, which could not be opened "
                f"again: {str(error).replace(str(path), 'its config.json')}"
            ) from error


@checked
def from_pretrained(
    source: str | Path,
    *,
    plugin: str | Path | Sequence[str | Path] | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Any:
    """Load a model that `save_pretrained` or `push_to_hub` wrote, with its weights, in evaluation mode.

    A model of transformers or timm is converted, with the preprocessing of its images; one that does not convert is
    returned as it is, with a warning. Only JSON files and
    model.safetensors are read; no code in them is run.

    Args:
        source: a folder; OWNER/NAME on the Hugging Face hub, also as hf:OWNER/NAME; or timm:NAME with its published
            weights, for which the options below are left out.
        plugin: a Python file or an installed entry point that registers the classes of the model, or several.
        revision: branch, tag or commit on the hub.
        token: access token of the hub.
        cache_dir: where downloaded files are kept, instead of the hub's own folder.
        local_files_only: whether to download nothing.

    Raises:
        FileNotFoundError: if there is no such folder, or a file is missing in it.
        ValueError: if a file is damaged or invalid, or needs a plugin.
    """
    load_plugins(plugin)
    hub = {"revision": revision, "token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
    if str(source).startswith(TIMM):
        if names := [name for name, value in hub.items() if value]:
            raise ValueError(f"`{names[0]}` must be left out with a model of timm, got {hub[names[0]]!r}.")
        return SOURCES["timm"](str(source).removeprefix(TIMM)).eval()
    source = str(source).removeprefix(HUB)
    config, weights = files.find_files(source, hub)
    described = read_typed(config, _KindConfig)
    words = described.graticule or ModelWords("transformers")
    if described.graticule is None and described.model_type is None:
        raise ValueError(f"{config} describes no model of graticule or transformers.")
    if described.model_type is not None:
        files.find_beside(source, (PREPROCESSOR, POSITION), hub)
    missing, changed = missing_plugins(words.plugins)
    if missing:
        how = f"pass plugin={(missing[0] if len(missing) == 1 else missing)!r}"
        raise ValueError(
            f"{config} needs the plugin {' and '.join(missing)}, which is imported only if named: {how}, or "
            f"{named_again(missing)} on the command line."
        )
    for name in changed:
        warnings.warn(f"the plugin {name} has changed since {config} was written.", stacklevel=2)
    with built_from(config):
        opener = KINDS[known_name("kind", words.kind, KINDS)]
    if (weight_files := shards(weights)) != [weights] and words.kind != "transformers":
        raise ValueError(f"{config} must be of a model whose weights are in {WEIGHTS}, got {weights}.")
    with sized_as(sum(file.stat().st_size for file in weight_files)):
        return opener(config, weights).eval()
