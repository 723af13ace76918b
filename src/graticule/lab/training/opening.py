"""Open a trained model from its files, which describe the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import timm
from torch import nn

from graticule.hub.files import CONFIG, quick_hub
from graticule.hub.kinds import HUB, TIMM, from_pretrained
from graticule.lab.training.devices import load_weights
from graticule.lab.training.run import Run, run_of
from graticule.registry.checks import checked
from graticule.registry.plugins import load_plugins


@checked
def load(
    source: str | Path,
    plugin: str | Path | Sequence[str | Path] | None = None,
    checkpoint: Literal["best", "last"] = "best",
) -> nn.Module:
    """Open a trained model with its weights, in evaluation mode.

    Args:
        source: `hf:OWNER/NAME` on the Hugging Face hub, or `timm:NAME` with its published weights, both as backbones of
            this library; the folder of a run; a file of its weights in that folder: `weights.safetensors`, a checkpoint
            (`checkpoints/step-000000100.ckpt`, one file or sharded), or that of `graticule export --consolidate`; or a
            folder of `graticule publish` or `save_pretrained`, also of transformers.
        plugin: a Python file or an installed entry point that registers the classes of the run, or several. Code that
            is not named is not imported.
        checkpoint: the checkpoint of a run, best or last.

    Raises:
        FileNotFoundError: if there is no such run or file, or the run has saved nothing yet.
        ValueError: if the file is damaged, does not fit the model of its run, belongs to no run, or needs a plugin.
    """
    if str(source).startswith((HUB, TIMM)):
        if checkpoint != "best":
            raise ValueError(f"`checkpoint` must be left out for a published model, got {checkpoint!r}.")
        named: nn.Module = from_pretrained(source, plugin=plugin) if str(source).startswith(HUB) else _of_timm(source)
        return named
    path = Path(source)
    run = run_of(path)
    if not path.exists():
        raise FileNotFoundError(
            f"`source` must be a run or a file of its weights, got {str(path)!r}, which does not exist."
        )
    if run is None and (path / CONFIG).is_file():
        if checkpoint != "best":
            raise ValueError(f"`checkpoint` must be left out for a published model, got {checkpoint!r}.")
        published: nn.Module = from_pretrained(path, plugin=plugin)
        return published
    if run is None:
        what = "has no recipe.json" if path.is_dir() else "is not in the folder of a run"
        raise ValueError(
            f"`source` must be a run or a file of its weights, whose model is known, got {str(path)!r}, "
            f"which {what}; build the model and call graticule.load_checkpoint(model, path)."
        )
    if run.folder != path and checkpoint != "best":
        raise ValueError(f"`checkpoint` must be left out if `source` is a file, got {checkpoint!r}.")
    load_plugins(plugin)
    return run.model(checkpoint=checkpoint) if run.folder == path else _with_weights(run, path)


def _of_timm(source: str | Path) -> nn.Module:
    """Return a model of timm with its published weights, converted.

    Raises:
        ValueError: if there is no such model, or its weights cannot be downloaded.
    """
    from graticule.external.convert.conversion import convert

    name = str(source).removeprefix(TIMM)
    try:
        with quick_hub():
            model = timm.create_model(name, pretrained=True)
    except (OSError, RuntimeError) as error:  # unknown names, and errors of the client of the hub
        reason = str(error).strip().partition("\n")[0][:200]
        raise ValueError(
            f"`source` must be a model of timm with published weights, got {str(source)!r}: {reason}"
        ) from error
    return convert(model).eval()


def _with_weights(run: Run, path: Path) -> nn.Module:
    """Build the model of a run with the weights at `path`."""
    return load_weights(run.task().build_model(run.described()), path).eval()
