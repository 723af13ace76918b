"""Trace a model into a program that needs no Python."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from graticule.surgery.export_sizes import Sizes
from graticule.surgery.export_subject import Subject


class Program(nn.Module):
    """Module with the outputs of an exported model: the logits, then the maps of chosen blocks; or all maps.

    Args:
        subject: a model in evaluation mode.
        features: indices of blocks, or of stages if there are several.
    """

    def __init__(self, subject: Subject, features: Sequence[int] = ()) -> None:
        super().__init__()
        self.model = subject.model
        self.subject = subject
        self.features = tuple(features)

    @property
    def names(self) -> list[str]:
        """Return the names of the outputs."""
        return self.subject.names(self.features)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs for images (B, C, height, width)."""
        return self.subject.outputs(images, self.features)


def prepared(subject: Subject, sizes: Sizes, folded: bool = True) -> Subject:
    """Return a copy of a plain model for images of `sizes`, folded if height and width are fixed."""
    if sizes.free - {"batch"}:
        return Subject.of(copy.deepcopy(subject.model))
    return subject.at(sizes.fixed, folded)


def trace(program: Program, sizes: Sizes) -> torch.export.ExportedProgram:
    """Trace a program for images of `sizes`.

    Raises:
        ValueError: if it cannot be traced, with the reason.
    """
    batch, size = sizes.example()
    images = torch.zeros(batch, program.subject.channels, *size)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.export.export(program, (images,), dynamic_shapes=({**sizes.dimensions()},))
    except ValueError as error:
        if type(error) is ValueError:  # errors of this library already give the reason
            raise
        raise _refusal(sizes, error) from error
    except (RuntimeError, TypeError, AssertionError) as error:
        raise _refusal(sizes, error) from error
    _remove_unused(traced)
    for node in traced.graph.nodes:
        node.meta.pop("stack_trace", None)  # lines of code, and paths of this machine
    return traced


def _refusal(sizes: Sizes, error: Exception) -> ValueError:
    free = ", ".join(sorted(sizes.free)) or "nothing"
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ValueError(f"`model` must be one that torch.export can trace with {free} free, got the error: {said[:300]}")


def _remove_unused(traced: torch.export.ExportedProgram) -> None:
    """Remove the tensors that no operator uses, such as tables and norms that folding has replaced by constants."""
    signature = traced.graph_signature
    kinds = (torch.export.graph_signature.InputKind.PARAMETER, torch.export.graph_signature.InputKind.BUFFER)
    nodes = {node.name: node for node in traced.graph.nodes if node.op == "placeholder"}
    unused = [s for s in signature.input_specs if s.kind in kinds and not nodes[s.arg.name].users]
    for spec in unused:
        traced.graph.erase_node(nodes[spec.arg.name])
        signature.input_specs.remove(spec)
        traced.state_dict.pop(spec.target, None)
        traced.constants.pop(spec.target, None)
    traced.graph_module.recompile()
