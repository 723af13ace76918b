"""Publish and load models of every kind: backbones, also converted ones, dense models, and attached positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from graticule import dense, surgery
from graticule.backbones import Card, HubModel
from graticule.backbones.hub import open_pretrained
from graticule.backbones.hub_files import check_folder, write_model
from graticule.checks import checked
from graticule.surgery.attach import NAME
from graticule.surgery.attach_hooks import AttachedPosition
from graticule.surgery.attach_hub import attached_config

#: The functions that load kinds of models; importing their modules registers them.
OPENERS = (dense.open_detector, dense.open_segmenter, surgery.open_attached)


@checked
def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    host: str | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    card: Card | None = None,
) -> Path:
    """Write config.json, model.safetensors and README.md to `folder`, as `model.save_pretrained` does; returns it.

    It also works for a module of timm or torchvision with an attached position, which lacks that method.

    Args:
        model: a backbone, also a converted one; a detector or a segmentation model; or a module with an attached
            position that timm or torchvision builds by name.
        folder: created if it does not exist.
        host: the name that a module with an attached position was built from, with its options, as
            'torchvision:vit_b_16(num_classes=10)'. Not needed for a module of timm, unless it was built with other
            options than `img_size`, `in_chans` and `num_classes`.
        preprocessing: entries of timm's configuration, such as `mean`, `std` and `label_names`.
        card: text of the model card, in addition to the names of the model.

    Raises:
        ValueError: if the model cannot be built again from names, such as a module of your own.
    """
    if isinstance(model, HubModel):
        if host is not None:
            raise ValueError(f"`host` must be left out with a model of this library, got {host!r}.")
        return model.save_pretrained(folder, preprocessing=preprocessing, card=card)
    if not isinstance(getattr(model, NAME, None), AttachedPosition):
        raise ValueError(
            f"`model` must be a backbone or a dense model of this library, or have an attached position, got "
            f"{type(model).__name__}; graticule.convert makes a backbone of a model of timm."
        )
    folder = Path(folder)
    check_folder(folder)
    return write_model(model, folder, attached_config(model, host, preprocessing or {}), card or Card())


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

    Only config.json and model.safetensors are read; no code in them is run.

    Args:
        source: a folder, or OWNER/NAME on the Hugging Face hub.
        plugin: a Python file or an installed entry point that registers the classes of the model, or several.
        revision: branch, tag or commit on the hub.
        token: access token of the hub.
        cache_dir: where downloaded files are kept, instead of the hub's own folder.
        local_files_only: whether to download nothing.

    Raises:
        FileNotFoundError: if there is no such folder, or a file is missing in it.
        ValueError: if a file is damaged or invalid, or needs a plugin.
    """
    return open_pretrained(
        source,
        plugin=plugin,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
    )
