"""Small models for laws of devices, and comparisons in the norm of a tensor."""

import copy
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from graticule.position.joining import JOININGS
from graticule.position.position import ENCODINGS
from tiny import GATED, SMALL, build, draw

Case = tuple[str, str | None, str]
PLAIN = "ViT, DeiT"


def home(encoding: str) -> str:
    """Return the first family that can use an encoding: attention, or layers that mix tokens without it."""
    for family in (PLAIN, *GATED):
        try:
            build(family, encoding)
        except ValueError:
            continue
        return family
    raise AssertionError(f"{encoding} must be usable in {PLAIN} or {', '.join(GATED)}")


#: Every family with its own encoding, every encoding in its family, every joining, and combinations of them.
CASES: list[Case] = [
    *[(family, None, "default") for family in SMALL],
    *[(home(encoding), encoding, "default") for encoding in ENCODINGS],
    *[(PLAIN, "learnable", joining) for joining in JOININGS if joining != "default"],
    (PLAIN, "learnable+relative_bias", "lape"),
    (PLAIN, "peg+learnable+rope", "lape"),
    (PLAIN, "alibi+shaw+learnable", "tupe"),
    (PLAIN, "rope(scaling='yarn', reference=[2, 2])", "default"),
    ("Swin", "learnable", "lape"),
    ("T2T-ViT", "learnable", "lape"),
]
#: The encodings of queries and keys, of pairs and of tokens, in attention and without, and a joining with norms.
FEW: list[Case] = [
    (PLAIN, "learnable+relative_bias", "lape"),
    (PLAIN, "peg+rope", "default"),
    (PLAIN, "shaw", "default"),
    ("Swin", None, "default"),
    ("CPVT, GAP", None, "default"),
    ("PosMLP", None, "default"),
]


def name_of(case: Case) -> str:
    """Return the name of a case in the list of tests."""
    family, encoding, joining = case
    return "-".join(part for part in (family, encoding, joining) if part not in (None, "default"))


def model_of(case: Case, **kwargs: Any) -> Any:
    """Return a copy of the model of a case on the CPU, in evaluation mode, with parameters drawn from a fixed seed."""
    family, encoding, joining = case
    return copy.deepcopy(_drawn(family, encoding, joining, **kwargs))


@cache
def _drawn(family: str, encoding: str | None, joining: str, **kwargs: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = draw(build(family, encoding, joining, **kwargs)).eval()
    for name, parameter in model.named_parameters():
        if "kqv" in name:  # T2T's random features are zero for long queries, and the inverse of their sum is large
            parameter.data.mul_(0.1)
    return model


def devices_of(model: Any) -> set[torch.device]:
    """Return the devices of all parameters and buffers, including those that are not in the state dict."""
    return {tensor.device for tensor in (*model.parameters(), *model.buffers())}


def images_for(model: Any, batch: int = 2, seed: int = 0) -> Tensor:
    """Draw images of the size of a model on the CPU, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, model.in_chans, *model.img_size, generator=generator)


def logits_and_gradients(model: Any, images: Tensor) -> dict[str, Tensor]:
    """Return the logits and the gradient of every parameter that has one, by name."""
    model.zero_grad()
    logits = model(images)
    logits.float().square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def assert_close_in_norm(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Check the norm of the difference of every tensor, relative to the norm of the tensor.

    A gradient that is zero but for rounding, such as of a bias of keys, or the sum of gradients that cancel, is
    compared with the other gradients: with a quarter of their typical element.
    """
    assert found.keys() == expected.keys()
    wide = {name: value.detach().cpu().double() for name, value in expected.items()}
    gradients = [value.flatten() for name, value in wide.items() if name != "logits"]
    typical = float(torch.cat(gradients).square().mean().sqrt()) if gradients else 0.0
    worst, where = 0.0, ""
    for name, value in wide.items():
        least = 0.0 if name == "logits" else 0.25 * typical * value.numel() ** 0.5
        error = float((found[name].detach().cpu().double() - value).norm())
        scale = max(float(value.norm()), least)
        relative = error / scale if scale else error
        if not relative <= worst:
            worst, where = relative, name
    assert worst <= tolerance, f"{where} must be equal within {tolerance:.1e} of its norm, differs by {worst:.1e}"
