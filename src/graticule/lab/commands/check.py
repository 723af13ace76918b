"""`graticule check`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graticule import testing
from graticule.lab import training
from graticule.lab.arguments import Positional
from graticule.lab.commands.options import JsonOutput, OfSize, square
from graticule.lab.recipes.load import RECIPES
from graticule.lab.training.recipe import TrainingRecipe
from graticule.registry.plugins import describe_error, load_plugin, source_of

if TYPE_CHECKING:
    from torch import nn


@dataclass
class CheckOptions(OfSize, JsonOutput):
    """Check the position code of a model: axes, pairs of channels, prefix tokens, autocast, sizes, caches, export.

        graticule check vit_small_patch16_rope_224 --skip export
        graticule check my_model.py:build --img-size 64x96
        graticule check my_methods.py        # the classes of a plugin

    MODEL is any model. A timm or graticule name gets random weights, in timm with two layers per stage. FILE.py:NAME
    is a module, position code alone (`graticule.testing.RotationCode`, `BiasCode` or `TableCode`), or a function that
    builds one. FILE.py is a plugin: its encodings, joinings, resamplers, backbones and tasks are checked, tasks by
    short runs of the first recipe in it. The exit code is 1 if a check failed.
    """

    target: Positional[str]
    """MODEL, FILE.py or FILE.py:NAME"""
    skip: list[str] = field(default_factory=list)
    """names of checks to leave out"""


def run(options: CheckOptions) -> int:
    """Check the position code of a model or a plugin."""
    sizes = {"img_size": square(options.img_size)} if options.img_size else {}
    if options.target.endswith(".py"):
        _check_alone(options, sizes, "a plugin")
        title, findings = options.target, list(_plugin(options.target))
    else:
        title, model = _model(options.target, sizes)
        if isinstance(model, testing.PositionCode):
            _check_alone(options, sizes, "position code")
            findings = testing.inspect_code(model)
        else:
            findings = testing.inspect_model(model, **sizes, skip=options.skip)
    outcomes = [finding.outcome for finding in findings]
    options.say(title)
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        options.say(f"  {finding.check:{width}}  {finding.outcome:14}  {finding.detail}")
    options.say(", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "not applicable")))
    options.finish({"target": options.target, "title": title, "findings": findings})
    return int("failed" in outcomes)


def _check_alone(options: CheckOptions, sizes: dict[str, tuple[int, int]], noun: str) -> None:
    if sizes or options.skip:
        raise ValueError(f"`img_size` and `skip` must be left out for {noun}, got one of them.")


def _plugin(file: str) -> Iterator[testing.Finding]:
    """Check the classes that a plugin registers, by the contracts of `graticule.testing`."""
    from graticule.backbones.registry import backbone_of, list_models
    from graticule.lab.testing import check_task, check_training  # imports the engine, which takes seconds
    from graticule.position.joining import JOININGS
    from graticule.position.position import ENCODINGS
    from graticule.position.resampling import RESAMPLERS

    load_plugin(file)
    place = Path(file).resolve()

    def here(definition: Any) -> bool:
        source = source_of(definition) if definition is not None else None
        return source is not None and source.resolve() == place

    entries = [entry for entry in RECIPES.values() if here(entry.function)]
    recipes: list[TrainingRecipe] = [entry.function(**entry.arguments) for entry in entries]
    of_task = {recipe.task: recipe for recipe in reversed(recipes)}  # the first recipe of each task

    def check_its_task(name: str) -> None:
        if name not in of_task:
            raise testing.NotApplicable(f"no recipe for it is registered in {file}")
        check_task(of_task[name])

    def check_its_backbone(name: str) -> list[testing.Finding]:
        findings = testing.check_backbone(name)
        check_training(name)
        return findings

    names = list_models()
    laws: list[tuple[str, Callable[[str], list[testing.Finding] | None], str]] = [
        *(("encoding", testing.check_encoding, name) for name, entry in ENCODINGS.items() if here(entry)),
        *(("joining", testing.check_joining, name) for name, entry in JOININGS.items() if here(entry)),
        *(("resampler", testing.check_resampler, name) for name, entry in RESAMPLERS.items() if here(entry)),
        *(("backbone", check_its_backbone, name) for name in names if here(backbone_of(name))),
        *(("task", check_its_task, name) for name, entry in training.list_tasks().items() if here(entry)),
    ]
    if not laws:
        raise ValueError(
            f"`target` must register an encoding, a joining, a resampler, a backbone or a task, got {file}, which "
            "registers none."
        )
    for kind, law, name in laws:
        title = f"{kind} {name}"
        findings: Sequence[testing.Finding] = ()
        try:
            findings = law(name) or ()
        except testing.BrokenLaws as error:
            findings = error.findings
        except testing.NotApplicable as reason:
            yield testing.Finding(title, "not applicable", str(reason))
            continue
        except Exception as error:
            text = str(error).partition("\n")[0] if isinstance(error, AssertionError) else describe_error(error)
            yield testing.Finding(title, "failed", text)
            continue
        if all(finding.outcome != "failed" for finding in findings):
            yield testing.Finding(title, "passed", "fulfills the contract")
        for finding in findings:
            if finding.outcome != "passed":
                yield dataclasses.replace(finding, check=f"{title}, {finding.check}")


def _model(target: str, sizes: dict[str, tuple[int, int]]) -> tuple[str, nn.Module | testing.PositionCode]:
    """Return a title and the model, or position code, that `target` names; `sizes` gets the size of its images."""
    import timm
    import torch

    from graticule.external.images import pair
    from graticule.hub.kinds import TIMM

    name = target.removeprefix(TIMM)
    if training.source_kind(target) != "name" or not timm.is_model(name):
        return target, training.open_module(target, testing.PositionCode)
    depths: tuple[dict[str, Any], ...] = ({"depth": 2}, {"depths": (2, 2, 2, 2)}, {})
    image = sizes.get("img_size")
    # whole patches of 16 or of 14, and windows of 2 x 3 in four stages of patches of 4
    small, odd = {"img_size": (64, 96)}, {"img_size": (56, 84)}
    frames: tuple[dict[str, Any], ...] = (small | {"window_size": (2, 3)}, small, odd, {"img_size": (64, 64)}, {})
    if image:
        frames = ({"img_size": image},)
    for shape in (depth | frame for frame in frames for depth in depths):
        size = shape.get("img_size")
        torch.manual_seed(0)  # the same weights each time
        try:
            model: Any = timm.create_model(name, **shape).eval()
            if size is not None:
                with torch.no_grad():
                    model(torch.zeros(1, model.default_cfg["input_size"][0], *size))
        except (TypeError, ValueError, AssertionError, RuntimeError, IndexError):
            continue
        patch = pair(getattr(getattr(model, "patch_embed", getattr(model, "stem", None)), "patch_size", None))
        if size is not None:
            if patch and any(side % step for side, step in zip(size, patch, strict=True)):
                continue
            sizes["img_size"] = size
        return ", ".join([name, "random weights", *(f"{key} {value}" for key, value in shape.items())]), model
    raise ValueError(f"`target` must be a model that can be built without arguments, got {target!r}.")
