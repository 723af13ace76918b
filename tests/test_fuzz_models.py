"""Arbitrary models and checkpoints: a named error or a correct result; no other error, hang or partial change."""

import copy
from functools import partial

import PIL.Image
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.utils._pytree import tree_leaves

import graticule
from fuzz import JSON, SCALARS, altered, edited, fuzzed, outcome, replaced
from graticule.backbones.registry import list_arguments
from graticule.dense.detector import HEADS
from graticule.dense.features import NECKS
from graticule.dense.segmentation import DECODERS
from graticule.position.joining import JOININGS
from graticule.position.position import ENCODINGS
from graticule.registry.specs import Spec, parse_sum
from tiny import SMALL, draw, tiny

REFUSED = (ValueError, TypeError)
#: Calls a function, which may refuse its arguments if it names one in backticks.
attempt = partial(outcome, names="`", allowed=REFUSED)
NUMBERS = st.one_of(SCALARS, st.floats(), st.integers(), st.lists(st.integers(-2, 9), max_size=4))
WORDS = ("learnable", "bicubic", "keys", "heads", "w", "norm", "conv", "avg", "token", "timm:x", "half")
VALUES = st.one_of(NUMBERS, st.sampled_from(WORDS))
#: Values without valid sizes that take gigabytes, as a vocabulary of 2**24 or images of 2**15 pixels.
LIGHT = VALUES.filter(lambda value: not (isinstance(value, int) and 2**11 < value <= 2**28))
#: Small models, with their sizes.
SMALLEST = [*SMALL.values(), *((name, {}) for name in graticule.list_models() if "nano" in name)]
#: Arguments that every model of timm accepts.
OF_TIMM = ["img_size", "in_chans", "num_classes", "drop_path_rate", "pretrained_cfg", "pretrained_cfg_overlay"]


def named(registry):
    """Draw names with any of their options, as text."""

    def options(name):
        keys = st.sampled_from([*registry.options(name), "layers"])
        return st.dictionaries(keys, VALUES, max_size=2).map(lambda values: str(Spec(name, values)))

    return st.sampled_from(list(registry)).flatmap(options)


def summed(registry):
    """Draw one name or a sum of two, with any of their options."""
    return st.one_of(named(registry), st.lists(named(registry), max_size=2).map("+".join))


ENCODED = st.fixed_dictionaries({}, optional={"encoding": summed(ENCODINGS), "joining": named(JOININGS)})
SIGNS = st.text("ab(+)=[]'\"1,._ -:*#\\", max_size=40)


@fuzzed(60, st.one_of(st.text(), SIGNS, summed(ENCODINGS).map(lambda text: text[1:])))
def test_any_text_is_a_sum_of_specs_that_writes_itself_or_an_error_that_names_the_argument(text):
    specs = attempt(lambda: parse_sum(text, "encoding"), names="`encoding`")
    if isinstance(specs, tuple):
        assert parse_sum(" + ".join(map(str, specs))) == specs


def assert_finite(values):
    assert all(value.isfinite().all() for value in tree_leaves(values))


@torch.no_grad()
def assert_finite_on_zeros(model, size):
    """Run a small model on an image of zeros; its outputs must be finite."""
    if max(size) <= 64 and sum(parameter.numel() for parameter in model.parameters()) < 10**7:
        assert_finite(model(torch.zeros(1, 3, *size)))


@fuzzed(60, data=st.data())
def test_any_arguments_make_a_model_that_runs_or_an_error_that_names_one(data):
    name, sizes = data.draw(st.sampled_from(SMALLEST))
    values = data.draw(st.dictionaries(st.sampled_from([*list_arguments(name), *OF_TIMM]), LIGHT, max_size=2))
    model = attempt(lambda: graticule.create_model(name, **{**sizes, **values, **data.draw(ENCODED)}).eval())
    if isinstance(model, torch.nn.Module) and model.in_chans == 3:
        assert_finite_on_zeros(model, model.img_size)


SIDES = st.sampled_from([0, 1, 2, 3, 4, 7])


@fuzzed(60, SIDES, SIDES, named(ENCODINGS), st.one_of(st.just("default"), named(JOININGS)), st.booleans())
def test_any_encoding_gives_positions_or_an_error_that_names_an_option(height, width, encoding, joining, causal):
    def build():
        grid, options = graticule.Grid(height, width), {"encoding": encoding, "joining": joining, "causal": causal}
        return graticule.build_position(grid, dim=24, depth=2, num_heads=3, **options)(grid)

    layers = attempt(build)
    if isinstance(layers, list):
        tensors = [value for layer in layers for value in layer if isinstance(value, torch.Tensor)]
        assert not any(tensor.isnan().any() for tensor in tensors)  # -inf is a mask


#: Functions of a name of a backbone -> further arguments and their values.
DENSE = {
    graticule.create_detector: {"head": named(HEADS), "neck": summed(NECKS)},
    graticule.create_segmenter: {"decoder": named(DECODERS), "neck": summed(NECKS), "auxiliary": named(DECODERS)},
}


@fuzzed(30, data=st.data())
def test_any_arguments_make_a_dense_model_that_runs_or_an_error_that_names_one(data):
    create = data.draw(st.sampled_from(list(DENSE)))
    name, sizes = data.draw(st.sampled_from([SMALL["ViT, DeiT"], SMALL["Swin"], SMALL["PVT"]]))
    drawn = st.fixed_dictionaries({}, optional={**DENSE[create], "class_token": NUMBERS, "img_size": NUMBERS})
    classes, values = data.draw(st.one_of(st.just(3), NUMBERS)), {**sizes, **data.draw(drawn), **data.draw(ENCODED)}
    model = attempt(lambda: create(name, classes, **values).eval())
    if isinstance(model, torch.nn.Module) and create is graticule.create_segmenter:
        assert_finite_on_zeros(model, (40, 36))


#: Other kinds of inputs than tensors, and tensors of other kinds.
KINDS = [
    *(lambda x: x,) * 5,
    *(lambda x: [x], lambda x: list(x), lambda x: [x, None], lambda x: {"x": x}, lambda x: x.numpy(), lambda x: "x"),
    *(lambda x: [x.numpy()], lambda x: None, lambda x: PIL.Image.new("RGB", (32, 32)), lambda x: x.to("meta")),
    lambda x: x.to_sparse() if x.numel() < 10**5 else x,  # which takes 8 bytes per axis of each value
]


@fuzzed(30, data=st.data())
@torch.no_grad()
def test_images_of_any_shape_and_kind_are_refused_or_give_finite_outputs(data, targets):
    model = data.draw(st.sampled_from(targets))
    shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 31, 32, 33]), min_size=1, max_size=5))
    images = torch.ones(shape if data.draw(st.booleans()) else [1, 3, *shape[-2:]])
    images = data.draw(st.sampled_from(KINDS))(images)
    outputs = attempt(lambda: model(images))
    assert isinstance(outputs, REFUSED) or outputs.isfinite().all()


@fuzzed(30, data=st.data())
@torch.no_grad()
def test_any_tokens_and_caches_are_refused_or_give_finite_logits(data, texts):
    model, other = data.draw(st.permutations(texts))
    shape = data.draw(st.lists(st.integers(0, 9), max_size=3))
    dtype = data.draw(st.sampled_from([torch.int64, torch.int64, torch.int32, torch.float32]))
    tokens = torch.full(data.draw(st.one_of(st.just([2, 3]), st.just(shape))), data.draw(st.integers(-2, 11)))
    tokens = data.draw(st.sampled_from([tokens.to(dtype), tokens.to(dtype), tokens.numpy(), tokens.tolist(), None]))
    cache = data.draw(st.one_of(st.none(), NUMBERS, st.just(other), st.just(model)))
    if isinstance(cache, torch.nn.Module):
        maker, cache = cache, cache.new_cache(8)
        maker(torch.zeros(data.draw(st.integers(1, 3)), 2, dtype=torch.int64), cache)
    logits = attempt(lambda: model(tokens, cache))
    assert isinstance(logits, REFUSED) or logits.isfinite().all()


@pytest.fixture(scope="module")
def texts():
    return [graticule.create_language_model("lm_nano", 10, context=8, depth=depth).eval() for depth in (1, 2)]


@pytest.fixture(scope="module")
def targets():
    return [graticule.create_model(name, **sizes).eval() for name, sizes in SMALL.values()]


@pytest.fixture(scope="module")
def target():
    return draw(tiny()).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def assert_unchanged(model, state):
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def assert_loaded_or_unchanged(model, path, way):
    """Load or transfer into a copy of `model`, which must then be complete and finite, or unchanged."""
    here = copy.deepcopy(model)
    if isinstance(outcome(lambda: way(here, path), names=path.name), ValueError):
        assert_unchanged(here, model.state_dict())
    else:
        assert_finite(here.state_dict())


WAYS = st.sampled_from([graticule.load_checkpoint, graticule.transfer])


@fuzzed(40, data=st.data())
def test_a_file_with_edited_bytes_is_refused_or_gives_finite_weights(data, target, folder):
    path = folder / data.draw(st.sampled_from(["weights.pth", "weights.safetensors"]))
    if path.suffix == ".pth":
        torch.save(target.state_dict(), path, _use_new_zipfile_serialization=False)
    else:
        save_file(target.state_dict(), path, metadata={"grids": "{}"})
    path.write_bytes(data.draw(edited(path.read_bytes(), header=4000)))
    assert_loaded_or_unchanged(target, path, data.draw(WAYS))


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def any_tensor(data, like):
    """Draw a tensor of any shape, kind, layout and values."""
    shapes = st.lists(st.integers(0, 30), max_size=4)
    # `like` may be a tensor drawn before, and endless
    shape = data.draw(shapes if like.numel() > 2**20 else st.one_of(st.just(list(like.shape)), shapes))
    dtype, number = (
        data.draw(st.sampled_from(DTYPES)),
        data.draw(st.sampled_from([0.5, 1e300, float("nan"), -torch.inf])),
    )
    value = torch.full(shape, number, dtype=torch.float64)
    value = (value if dtype.is_floating_point else value.nan_to_num()).to(dtype)
    match data.draw(st.sampled_from(["dense", "dense", "sparse", "meta", "endless", "turned"])):
        case "sparse" if value.ndim:
            return value.to_sparse()
        case "meta":
            return value.to("meta")
        case "endless":
            return torch.ones(1).expand(10**10).view(-1, 1, 1).expand(10**10, 1, like.shape[-1] if like.ndim else 1)
        case "turned" if value.ndim > 1:
            return value.transpose(0, -1)
    return value


@fuzzed(16, data=st.data())
def test_a_state_dict_of_any_tensors_is_refused_or_gives_finite_weights(data, target, folder):
    state = graticule.published_state_dict(target) if data.draw(st.booleans()) else target.state_dict()
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(list(state)))
        action = data.draw(st.sampled_from(["replace", "replace", "remove", "rename", "grid"]))
        if action == "grid":
            state._metadata[""]["grids"] = data.draw(st.dictionaries(st.just(name), NUMBERS, max_size=1) | NUMBERS)
            continue
        value = state.pop(name)
        if action != "remove":
            state[data.draw(st.text(max_size=8)) if action == "rename" else name] = any_tensor(data, value)
    path = folder / "state.pth"
    torch.save(data.draw(st.sampled_from([state, {"model": state}, {"state_dict": state, "epoch": 3}])), path)
    assert_loaded_or_unchanged(target, path, data.draw(WAYS))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return folders of published models: a backbone, a detector and a segmentation model."""
    root, (name, sizes) = tmp_path_factory.mktemp("published"), SMALL["ViT, DeiT"]
    detector = graticule.create_detector(name, 3, "fcos", "simple_pyramid(channels=32)", **sizes)
    models = [graticule.create_model(name, **sizes), detector, graticule.create_segmenter(name, 3, **sizes)]
    return [graticule.save_pretrained(model, root / str(number)) for number, model in enumerate(models)]


@fuzzed(40, data=st.data())
def test_a_published_folder_with_other_values_is_refused_or_opened(data, published):
    folder = data.draw(st.sampled_from(published))
    path = folder / data.draw(st.sampled_from(["config.json"] * 4 + ["model.safetensors"]))
    with replaced(path, data.draw(altered(path, st.one_of(JSON, summed(ENCODINGS), VALUES), header=4000))):
        model = outcome(lambda: graticule.from_pretrained(folder), names=str(folder))
        assert isinstance(model, ValueError) or assert_finite(model.state_dict()) is None
