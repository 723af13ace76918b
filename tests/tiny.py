"""Small models for tests: images of 32 pixels, patches of 8, 24 channels, 3 layers of 3 heads, 5 classes."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import graticule
from graticule.backbones.registry import MODELS, list_small_models
from graticule.encodings.forms.mixing import TokenMixing
from graticule.position.joining import JOININGS
from graticule.position.position import ENCODINGS
from graticule.registry.specs import Spec
from graticule.testing.model_under_test import NotApplicable
from graticule.testing.places import LAWS, check_law

SIZE: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 5}
TOKENS, DIM, DEPTH, CLASSES = 17, 24, 3, 5

#: Family -> name and arguments of its small model.
SMALL = list_small_models()
#: Families whose layers mix tokens without attention, and those with several stages.
GATED = tuple(family for family, (name, _) in SMALL.items() if "mixing" in MODELS[name].kind.needs)
PYRAMIDS = tuple(family for family, (name, _) in SMALL.items() if len(MODELS[name].depths) > 1)
#: A plain backbone, a pyramid, and one without attention, which has several stages, too.
THREE = ("ViT, DeiT", "Swin", "PosMLP")


def families(fast: Collection[str], among: Iterable[str] = SMALL) -> Any:
    """Test some families in `make test`, and the others in `make test-slow`."""
    chosen = [family if family in fast else pytest.param(family, marks=pytest.mark.slow) for family in among]
    return pytest.mark.parametrize("family", chosen)


every_family = families(SMALL)
#: For laws of public functions; in `make test`, the contract in tests/testing covers all families.
three_families = families(THREE)

#: The name of the smallest model of every class.
SMALLEST = list(
    {
        size.kind: name for name, size in sorted(MODELS.items(), key=lambda item: -(item[1].parameters or math.inf))
    }.values()
)

#: The encodings that attention, or a convolution between blocks, can use: all but the encodings of gated MLPs.
ENCODERS = [name for name, kind in ENCODINGS.items() if not issubclass(kind, TokenMixing)]


def build(family: str, encoding: str | None = None, joining: str = "default", **kwargs: Any) -> Any:
    """Build the small model of `family`, with the family's own encoding if none is given."""
    name, sizes = SMALL[family]
    chosen: dict[str, Any] = {} if encoding is None else {"encoding": encoding}
    return graticule.create_model(name, joining=joining, num_classes=5, **{**sizes, **chosen, **kwargs})


def takes(joining: str, encoding: str) -> bool:
    """Return whether a joining supports an encoding, by their classes and learned parameters."""
    kind, how = ENCODINGS[encoding], JOININGS[joining]
    if how.per_layer and not any(p.requires_grad for p in _position(encoding).parameters()):
        return False  # all layers would have the same table
    return joining == "default" or kind.joinable_as in how.accepts


@cache
def fields(encoding: str, joining: str = "default") -> frozenset[str]:
    """Return the fields of `LayerPosition` that an encoding and a joining give to layers."""
    positions = layers(encoding, joining)
    return frozenset(name for layer in positions for name, value in layer._asdict().items() if value is not None)


def layers(encoding: str, joining: str = "default") -> list[graticule.LayerPosition]:
    """Return the positions of two layers of three heads on a grid of 2 x 2."""
    positions: list[graticule.LayerPosition] = _position(encoding, joining)(graticule.Grid(2, 2))
    return positions


@cache
def _position(encoding: str, joining: str = "default") -> Any:
    return graticule.build_position(
        graticule.Grid(2, 2), dim=24, depth=2, num_heads=3, encoding=encoding, joining=joining
    )


#: Every encoding alone with every joining that supports it.
PAIRS = [(encoding, joining) for encoding in ENCODERS for joining in JOININGS if takes(joining, encoding)]
#: Every encoding with the default joining, every joining with one encoding, and an absolute encoding with a relative or
#: a conditional one: laws of encodings, of joinings and of backbones do not need their product.
CHOICES = [
    *[pair for pair in PAIRS if pair[1] == "default" or pair[0] in ("learnable", "relative_bias")],
    ("learnable+relative_bias", "default"),
    ("sinusoidal_2d+relative_bias", "shared"),
    ("learnable+relative_bias", "lape"),
    ("learnable+rope", "lape"),
    ("peg+learnable", "lape"),
]


def goes_with(others: str, encoding: str) -> bool:
    """Return whether an encoding can be added to a sum of others."""
    try:
        layers(f"{others}+{encoding}")
    except ValueError:
        return False
    return True


def _sums(most: int = 5) -> list[str]:
    """Return sums of at most `most` encodings that contain every encoding once."""
    sums: list[str] = []
    for encoding in ENCODERS:
        place = next(
            (i for i, other in enumerate(sums) if other.count("+") < most - 1 and goes_with(other, encoding)), None
        )
        if place is None:
            sums.append(encoding)
        else:
            sums[place] += f"+{encoding}"
    return sums


#: Models that contain every encoding and every joining at least once, for laws of backbones: a law that holds with
#: several encodings together holds with each; laws of single encodings are tested in tests/testing/test_contract.py.
COVER = [
    *[(encoding, "default") for encoding in _sums()],
    *[("learnable", joining) for joining in JOININGS if joining != "default"],
    ("relative_bias", "lape"),
    ("peg+learnable", "lape"),
]


def spec(name: str, **options: Any) -> str:
    """Write a name with options: spec("shaw", clip=4) is 'shaw(clip=4)'."""
    return str(Spec(name, options))


def having(encoding: str, **options: dict[str, Any]) -> str:
    """Add options to names of a sum: having("peg+learnable", peg={"kernel": 5}) is 'peg(kernel=5)+learnable'."""
    return "+".join(spec(name, **options.get(name, {})) for name in encoding.split("+"))


def tiny(
    encoding: str = "learnable", joining: str = "default", name: str = "vit_tiny_patch16_224", **kwargs: Any
) -> Any:
    """Build a small model of the kind of `name`."""
    return graticule.create_model(name, encoding=encoding, joining=joining, **{**SIZE, **kwargs})


class _Unfilled(TorchFunctionMode):
    """Skips functions that fill tensors, half of the time of building a model without memory."""

    FILLS = frozenset({"uniform_", "normal_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_"})

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.__name__ in self.FILLS:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


@contextmanager
def without_memory() -> Iterator[None]:
    """Build models of any size without memory."""
    with torch.device("meta"), _Unfilled():
        yield


@cache
def full_size(name: str, **kwargs: Any) -> Any:
    """Build a model of full size without memory, once for all tests, which must not change it."""
    with without_memory():
        return graticule.create_model(name, **kwargs)


def shallow(family: str) -> dict[str, Any]:
    """Return depths for the small model of a family with one block per stage, or two if it needs two."""
    sizes = SMALL[family][1]
    if "depths" in sizes:
        return {"depths": (1,) * len(sizes["depths"])}
    return {"num_blocks": 1} if "num_blocks" in sizes else {"depth": 2 if family == "ConViT" else 1}


@torch.no_grad()
def draw(model: nn.Module) -> nn.Module:
    """Draw every trainable parameter, including norms and biases, so that each one has an effect."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1) * 0.5)
    return model


def draw_double(module: Any) -> Any:
    """Draw every trainable parameter of a module, in float64, and put it into evaluation mode."""
    return draw(module.double().eval())


def render(figure: Any) -> Any:
    """Lay out a figure, which warns about texts that do not fit and glyphs that do not exist."""
    figure.draw_without_rendering()
    return figure


def images(height: int = 32, width: int = 32, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw images (batch, 3, height, width)."""
    return torch.randn(batch, 3, height, width, dtype=dtype)


def shuffle_patches(images: Tensor, order: Tensor, side: int = 8) -> Tensor:
    """Put patch order[i] of images (B, C, H, W), cut into patches of `side` pixels, at position i."""
    cut = images.unfold(2, side, side).unfold(3, side, side)  # (B, C, h, w, side, side)
    return cut.flatten(2, 3)[:, :, order].unflatten(2, cut.shape[2:4]).transpose(3, 4).reshape(images.shape)


def images_for(model: Any, batch: int = 2, taller: int = 1, wider: int = 1) -> Tensor:
    """Draw images (batch, channels, height, width) of a multiple of the size of a model, in its dtype."""
    height, width = model.img_size
    dtype = next(model.parameters()).dtype
    return torch.randn(batch, model.in_chans, taller * height, wider * width, dtype=dtype)


def assert_same(actual: Any, expected: Any, atol: float = 1e-11) -> None:
    """Check that tensors, or lists and dictionaries of them, are equal to rounding; with atol=0, bit for bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradient of every trainable parameter by name."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def holds(model: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Return whether a model has these tensors, bit for bit; it may have others."""
    tensors = model.state_dict()
    return all(torch.equal(tensors[name], value) for name, value in state.items())


def count(model: nn.Module) -> int:
    """Count the parameters, trained or not."""
    return sum(parameter.numel() for parameter in model.parameters())


def laws_of_places(encoding, joining="default"):
    """Check the laws of places, and return the names of those that apply."""
    names = []
    for name in LAWS:
        with suppress(NotApplicable):
            check_law(name, encoding, joining)
            names.append(name)
    return names
