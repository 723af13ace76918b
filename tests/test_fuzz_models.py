"""Arbitrary models and checkpoints: a named error or a correct result; no other error, hang or partial change."""

import copy
import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fuzz import SCALARS, edited, fuzzed, outcome
from graticule import (
    Grid,
    create_language_model,
    create_model,
    fold,
    list_encodings,
    list_joinings,
    list_models,
    load_checkpoint,
    published_state_dict,
    transfer,
)
from graticule.backbones import list_arguments
from graticule.specs import Spec, parse_sum
from tiny import draw, tiny

REFUSED = (ValueError, TypeError)
NUMBERS = st.one_of(SCALARS, st.floats(), st.integers(), st.lists(st.integers(-2, 9), max_size=4))
SMALL = [name for name in list_models() if "nano" in name]
WORDS = st.sampled_from(
    ["learnable", "bicubic", "bilinear", "keys", "heads", "w", "norm", "conv", "avg", "token", "gate"]
)
#: Options that only some names have.
OPTIONS = st.sampled_from(
    [
        *(
            "places",
            "kernel",
            "convolution",
            "layers",
            "padding",
            "bias",
            "form",
            "shift",
            "product",
            "frozen",
            "acts_on",
        ),
        *("clip", "std", "interpolation", "temperature", "ratio", "hidden", "buckets", "decomposition", "over"),
    ]
)


def named(names):
    """Draw names with any options, as text."""
    options = st.dictionaries(OPTIONS, st.one_of(NUMBERS, WORDS), max_size=2)
    return st.builds(lambda name, given: str(Spec(name, given)), st.sampled_from(names), options)


ENCODINGS = st.one_of(named(list_encodings()), st.lists(named(list_encodings()), max_size=2).map("+".join))


@fuzzed(60)
@given(st.one_of(st.text(), st.text("ab(+)=[]'\"1,._ -:*#\\", max_size=40), ENCODINGS.map(lambda text: text[1:])))
def test_any_text_is_a_sum_of_specs_that_writes_itself_or_an_error_that_names_the_argument(text):
    found = outcome(lambda: parse_sum(text, "encoding"), names="`encoding`", allowed=REFUSED)
    if isinstance(found, tuple):
        assert parse_sum(" + ".join(map(str, found))) == found


@fuzzed(30)
@given(data=st.data())
def test_any_arguments_make_a_model_that_runs_or_an_error_that_names_one(data):
    name = data.draw(st.sampled_from(SMALL))
    values = st.one_of(NUMBERS, WORDS)
    given = data.draw(st.dictionaries(st.sampled_from(list_arguments(name)), values, max_size=2))
    for argument, choices in (("encoding", ENCODINGS), ("joining", named(list_joinings()))):
        if data.draw(st.booleans()):
            given[argument] = data.draw(choices)
    model = outcome(lambda: create_model(name, **given).eval(), names="`", allowed=REFUSED)
    if isinstance(model, torch.nn.Module) and max(model.img_size) <= 64:
        images = torch.zeros(1, model.in_chans, *model.img_size)
        with torch.no_grad():
            assert torch.isfinite(model(images)).all()


TEXT = st.sampled_from(["context", "depth", "embed_dim", "num_heads", "mlp_ratio", "tied", "qkv_bias"])


@fuzzed(12)
@given(st.dictionaries(TEXT, NUMBERS, max_size=2), NUMBERS)
def test_any_arguments_make_a_language_model_that_runs_or_an_error_that_names_one(given, vocabulary):
    made = outcome(lambda: create_language_model("lm_nano", vocabulary, **given).eval(), names="`", allowed=REFUSED)
    assert isinstance(made, torch.nn.Module | ValueError | TypeError)
    if isinstance(made, torch.nn.Module):
        with torch.no_grad():
            logits = made(torch.zeros(1, 1, dtype=torch.int64))
        assert logits.shape == (1, 1, vocabulary) and logits.isfinite().all()


@fuzzed(20)
@given(NUMBERS, NUMBERS, NUMBERS)
def test_any_sides_make_a_grid_or_an_error_that_names_one(height, width, prefix):
    found = outcome(lambda: Grid(height, width, prefix), names="`", allowed=REFUSED)
    if isinstance(found, Grid):
        assert found.tokens == found.height * found.width + found.prefix


@pytest.fixture(scope="module")
def target():
    return draw(tiny()).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def load(model, path, way):
    """Load or transfer into a copy of `model`, which must then be complete and finite, or unchanged."""
    here = copy.deepcopy(model)
    found = outcome(lambda: way(here, path), names=path.name, allowed=(ValueError,))
    if isinstance(found, ValueError):
        assert_unchanged(here, model)
    else:
        assert all(value.isfinite().all() for value in here.state_dict().values())


def assert_unchanged(model, before):
    state = before.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


WAYS = st.sampled_from([load_checkpoint, transfer])


@fuzzed(30)
@given(data=st.data())
def test_a_file_with_edited_bytes_is_refused_or_gives_finite_weights(data, target, folder):
    suffix = data.draw(st.sampled_from(["pth", "safetensors"]))
    path = folder / f"weights.{suffix}"
    if suffix == "pth":
        torch.save(target.state_dict(), path, _use_new_zipfile_serialization=False)
    else:
        save_file(target.state_dict(), path)
    path.write_bytes(data.draw(edited(path.read_bytes(), header=4000)))
    load(target, path, data.draw(WAYS))


@fuzzed(16)
@given(data=st.data())
def test_a_safetensors_header_that_says_anything_is_refused_or_gives_finite_weights(data, target, folder):
    path = folder / "header.safetensors"
    save_file(target.state_dict(), path, metadata={"grids": "{}"})
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    for _ in range(data.draw(st.integers(1, 3))):
        entry = header[data.draw(st.sampled_from(sorted(header)))]
        entry[data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "grids"]))] = data.draw(NUMBERS)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    load(target, path, data.draw(WAYS))


def tensors(data, own):
    """Draw a tensor of any shape, kind, layout and values."""
    shape = data.draw(st.one_of(st.just(list(own.shape)), st.lists(st.integers(0, 30), max_size=4)))
    dtype = data.draw(
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
    )
    value = torch.full(
        shape, data.draw(st.sampled_from([0.5, 1e300, float("nan"), float("-inf")])), dtype=torch.float64
    )
    value = value.nan_to_num().to(dtype) if not dtype.is_floating_point else value.to(dtype)
    kind = data.draw(st.sampled_from(["dense", "dense", "sparse", "meta", "endless", "turned"]))
    if kind == "sparse" and value.ndim:
        return value.to_sparse()
    if kind == "meta":
        return value.to("meta")
    if kind == "endless":
        return torch.ones(1).expand(10**10).view(-1, 1, 1).expand(10**10, 1, own.shape[-1] if own.ndim else 1)
    return value.transpose(0, -1) if kind == "turned" and value.ndim > 1 else value


@fuzzed(16)
@given(data=st.data())
def test_a_state_dict_of_any_tensors_is_refused_or_gives_finite_weights(data, target, folder):
    state = published_state_dict(target) if data.draw(st.booleans()) else target.state_dict()
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(list(state)))
        action = data.draw(st.sampled_from(["replace", "replace", "remove", "rename", "grid"]))
        if action == "grid":
            state._metadata[""]["grids"] = data.draw(st.dictionaries(st.just(name), NUMBERS, max_size=1) | NUMBERS)
        elif name in state:
            value = state.pop(name)
            if action != "remove":
                state[data.draw(st.text(max_size=8)) if action == "rename" else name] = tensors(data, value)
    path = folder / "state.pth"
    torch.save(data.draw(st.sampled_from([state, {"model": state}, {"state_dict": state, "epoch": 3}])), path)
    load(target, path, data.draw(WAYS))


@fuzzed(12)
@given(NUMBERS)
def test_a_model_folds_for_any_size_or_stays_as_it_was(size):
    model = tiny("learnable", "lape").train()
    found = outcome(lambda: fold(model, size), names="`", allowed=REFUSED)
    assert model.training is isinstance(found, Exception)
