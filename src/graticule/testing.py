"""The contract of encodings, joinings and backbones, for tests of your own methods.

    import graticule.testing, my_methods

    def test_my_encoding():
        graticule.testing.check_encoding("my_encoding(hidden=8)")

Each function raises an AssertionError that names the law which does not hold.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from graticule.backbones import create_model
from graticule.encodings import ENCODINGS, TokenMixing
from graticule.surgery import fold, unfold

_PATCH, _DIM, _HEADS, _DEPTH, _CLASSES = 8, 24, 3, 3, 5
#: Grids of patches, (H, W): the first is that of the model, none is square.
_GRIDS = ((3, 5), (4, 2), (5, 7))


def check_encoding(encoding: str, joining: str = "default", *, compiled: bool = True) -> None:
    """Check that an encoding does what every encoding must, in a small ViT, or gMLP if it mixes tokens.

    Args:
        encoding: its name with options, as 'fire(hidden=8)'.
        joining: the joining that brings it to the layers.
        compiled: whether to compile the model too, which takes most of the time.

    Raises:
        AssertionError: naming what does not hold.
    """

    def build(**kwargs: Any) -> Any:
        return _small(encoding, joining, **kwargs)

    _check_model(build, compiled)
    _check_layers(build())


def check_joining(joining: str, encoding: str = "learnable", *, compiled: bool = True) -> None:
    """Check a joining in the same way, with an absolute encoding."""
    check_encoding(encoding, joining, compiled=compiled)


def check_backbone(name: str, *, compiled: bool = True, **kwargs: Any) -> None:
    """Check that a registered backbone does what every backbone must.

    Args:
        name: of the model.
        compiled: whether to compile the model too.
        kwargs: arguments of the model, such as smaller sizes.

    Raises:
        AssertionError: naming what does not hold.
    """

    def build(**more: Any) -> Any:
        return create_model(name, **{"num_classes": _CLASSES, **kwargs, **more})

    _check_model(build, compiled)


def _small(encoding: str, joining: str, **kwargs: Any) -> Any:
    size: dict[str, Any] = {
        "img_size": tuple(_PATCH * side for side in _GRIDS[0]),
        "patch_size": _PATCH,
        "num_classes": _CLASSES,
    }
    if any(issubclass(ENCODINGS[spec.name], TokenMixing) for spec in ENCODINGS.specs(encoding)):
        gated: dict[str, Any] = {"embed_dim": _DIM, "num_blocks": _DEPTH, "groups": _HEADS}
        return create_model("gmlp_s16_224", encoding=encoding, joining=joining, **size, **gated, **kwargs)
    more: dict[str, Any] = {"embed_dim": _DIM, "depth": _DEPTH, "num_heads": _HEADS}
    return create_model("vit_tiny_patch16_224", encoding=encoding, joining=joining, **size, **more, **kwargs)


def _check_model(build: Any, compiled: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = _drawn(build()).double()
        images = torch.randn(2, model.in_chans, *model.img_size, dtype=torch.float64)
        _check_gradients(model, images)
        model.eval()
        logits = _outputs(model, images)
        assert logits.shape == (2, _CLASSES), f"logits must be (2, {_CLASSES}), got {tuple(logits.shape)}"
        assert logits.isfinite().all(), "logits must be finite"
        _check_other_grids(model)
        _check_copies(build, model, images, logits)
        _check_folding(model, images, logits)
        _check_dtypes(model, images)
        if compiled:
            graph = torch.compile(copy.deepcopy(model), fullgraph=True, backend="eager")
            _assert_same(_outputs(graph, images), logits, "a compiled model (fullgraph) must compute the same")


def _check_layers(model: Any) -> None:
    """What each layer gets has the shapes that `LayerPosition` documents."""
    grid = model.grid
    tokens, found = grid.tokens, model.position(grid)
    assert len(found) == _DEPTH, f"there must be one LayerPosition per layer, {_DEPTH}, got {len(found)}"
    shapes = {"pre": (tokens, _DIM), "inner": (tokens, _DIM), "bias": (_HEADS, tokens, tokens), "gate": (tokens,)}
    for position in found:
        for field, shape in shapes.items():
            value = getattr(position, field)
            if isinstance(value, Tensor):
                assert tuple(value.shape) == shape, f"`{field}` must be {shape}, got {tuple(value.shape)}"


@torch.no_grad()
def _drawn(model: nn.Module) -> nn.Module:
    """Draw every trainable parameter anew, so that each one matters."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1) * 0.5)
    return model


@torch.no_grad()
def _outputs(model: Any, images: Tensor) -> Tensor:
    found: Tensor = model(images)
    return found


def _check_gradients(model: Any, images: Tensor) -> None:
    model.train()
    found = model(images)
    (found if isinstance(found, Tensor) else sum(found)).square().sum().backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without, f"a gradient must reach every parameter, not {', '.join(without)}"
    model.zero_grad()


def _check_other_grids(model: Any) -> None:
    """Another image size works, and `set_input_size` gives the same there."""
    patch = [side // n for side, n in zip(model.img_size, model.grid.shape, strict=True)]
    for grid in _GRIDS[1:]:
        size = tuple(side * n for side, n in zip(patch, grid, strict=True))
        images = torch.randn(1, model.in_chans, *size, dtype=torch.float64)
        try:
            logits = _outputs(model, images)
        except ValueError:
            continue  # a clear error is an answer
        assert logits.isfinite().all(), f"logits must be finite at a grid of {grid}"
        moved = copy.deepcopy(model)
        moved.set_input_size(size)
        _assert_same(_outputs(moved, images), logits, f"set_input_size must compute the same at a grid of {grid}", 1e-9)


def _check_copies(build: Any, model: Any, images: Tensor, logits: Tensor) -> None:
    _assert_same(_outputs(copy.deepcopy(model), images), logits, "a copy must compute the same")
    _assert_same(_outputs(pickle.loads(pickle.dumps(model)), images), logits, "an unpickled model must be the same")
    other = build().double().eval()
    other.load_state_dict(model.state_dict())
    _assert_same(_outputs(other, images), logits, "a model with the same state dict must compute the same")
    again = _drawn(build()).double().eval()
    assert not torch.equal(_outputs(again, images), logits), "two models with other parameters must differ"
    _assert_same(_outputs(model, images), logits, "a second model must not change the first: no process-wide state")


def _check_folding(model: Any, images: Tensor, logits: Tensor) -> None:
    folded = fold(copy.deepcopy(model))
    _assert_same(_outputs(folded, images), logits, "a folded model must compute the same")
    _assert_same(_outputs(unfold(folded), images), logits, "an unfolded model must compute the same")


def _check_dtypes(model: Any, images: Tensor) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for each in (copy.deepcopy(model).to(dtype), fold(copy.deepcopy(model)).to(dtype)):
            logits = _outputs(each, images.to(dtype))
            assert logits.dtype == dtype and logits.isfinite().all(), f"logits must be finite {dtype}"


def _assert_same(found: Tensor, expected: Tensor, law: str, tolerance: float = 1e-12) -> None:
    difference = (found - expected).abs().max().item()
    assert difference <= tolerance, f"{law}; the largest difference is {difference:.1e}"
