"""One size, one model: forward at a size, resized, folded, loaded, saved and opened at it give the same outputs."""

import copy
import re

import pytest
import torch

import graticule
from graticule.position.joining import JOININGS
from graticule.position.position import ENCODINGS
from in_turn import case
from tiny import SMALL, build, draw, shallow

#: Encodings with a reference grid that is none of their options, beside all encodings by their names.
REFERENCES = (
    "learnable + log_n",
    "rope(scaling='interpolation')",
    "rope(preset='pe')",
    "rope_1d(scaling='yarn', ramp=(0.1, 0.5))",
    "rope_mixed(scaling='interpolation')",
)
ALL = [*ENCODINGS, *REFERENCES, "relative_bias + learnable"]
#: In `make test`, the family's own encoding and these.
FAST = {
    "ViT, DeiT": [("learnable + log_n", "default"), ("rope(preset='pe')", "default"), ("learnable", "lape")],
    "Swin": [("learnable + log_n", "lape"), ("relative_bias", "lape"), ("rope(scaling='ntk')", "default")],
    "Swin V2": [("continuous_bias + log_n", "default"), ("learnable", "shared")],
    "PosMLP": [("gqpe", "default")],
}


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    with torch.no_grad():
        yield
    torch.set_default_dtype(torch.float32)


def model_of(family, encoding=None, joining="default"):
    """Return a model in which every second block of a stage can shift windows."""
    sizes = {} if family.startswith("Swin") or family == "PosMLP" else shallow(family)
    return draw(build(family, encoding, joining, **sizes)).eval()


def sizes_of(family, model):
    """Return sizes of more patches on one axis, and for windows also one of which a window covers a whole axis."""
    height, width = model.img_size
    return [(2 * height, width), *([(height, width // 2)] if family.startswith("Swin") else [])]


def check_doors(family, model, folder):
    """Check that all ways to a size give the outputs of the forward pass at it."""
    for size in sizes_of(family, model):
        x = torch.randn(2, model.in_chans, *size)
        expected = model(x)
        resized = graticule.resize(copy.deepcopy(model), size)
        resized.save_pretrained(folder)
        arguments = {**model.created["arguments"], "num_classes": model.num_classes, "img_size": size}
        loaded = graticule.create_model(model.created["name"], **arguments).eval()
        loaded.load_state_dict(resized.state_dict())
        doors = {
            "resized": resized,
            "folded": graticule.fold(copy.deepcopy(model), size),
            "resized, folded": graticule.fold(copy.deepcopy(resized)),
            "folded, resized": graticule.resize(graticule.fold(copy.deepcopy(model)), size),
            "opened": graticule.from_pretrained(folder),
            "loaded": loaded,
        }
        for door, other in doors.items():
            with case(f"{door}, {size}"):
                torch.testing.assert_close(other(x), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=pytest.mark.slow) if family == "Swin V2" else family for family in SMALL]
)
def test_all_ways_to_a_size_give_one_model(family, tmp_path):
    """With the family's encoding and those whose grid of reference or windows change with the size."""
    for encoding, joining in [(None, "default"), *FAST.get(family, [])]:
        check_doors(family, model_of(family, encoding, joining), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ALL)
@pytest.mark.parametrize("family", SMALL)
def test_all_ways_to_a_size_give_one_model_with_every_encoding_and_joining(family, encoding, tmp_path):
    for joining in JOININGS:
        try:
            model = model_of(family, encoding, joining)
        except ValueError as refused:
            assert re.match("`(encoding|joining|layers|head_dim|num_heads|grid|places)` must", str(refused)), refused
            continue
        check_doors(family, model, tmp_path)
