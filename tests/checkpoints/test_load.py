"""Checkpoints of several families are loaded completely; others are refused by name without changing the model."""

import argparse
import pickle
import warnings
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import graticule
from graticule import load_checkpoint, transfer
from graticule.checkpoints.read import read_checkpoint, save_weights
from in_turn import case, in_turn
from tiny import SIZE, assert_same, draw, holds, images, tiny

DISTILLED = "deit_tiny_distilled_patch16_224"
GOLDEN = Path(__file__).parents[1] / "parity" / "golden"


def timms(name="deit_tiny_patch16_224", **kwargs):
    return draw(timm.create_model(name, **{**SIZE, **kwargs})).eval()


def assert_refused(model, path, kind=ValueError):
    """Load a file that must be refused: the model does not change and the message names the file."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(kind) as error:
        load_checkpoint(model, path)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert Path(path).name in str(error.value)
    return str(error.value)


@pytest.fixture
def saved(tmp_path):
    """Save an object; returns the path."""

    def save(contents, name="checkpoint.pth", **options):
        torch.save(contents, tmp_path / name, **options)
        return tmp_path / name

    return save


def with_prefix(prefix, state):
    return {prefix + name: value for name, value in state.items()}


WRAPPERS = {
    "timm": lambda state: state,
    "deit": lambda state: {"model": state},
    "lightning": lambda state: {"state_dict": state, "epoch": 3},
    "lape": lambda state: {
        "model": state,
        "optimizer": {"state": {}, "param_groups": [{"lr": 5e-4}]},
        "epoch": 299,
        "args": argparse.Namespace(model="deit_tiny", pe="learnable", join_type="LaPE", lr=5e-4, nested=[1, 2]),
    },
    "parallel": lambda state: {"state_dict": with_prefix("module.", state)},
    "compiled": lambda state: with_prefix("_orig_mod.", state),
    "parallel of compiled": lambda state: {"model": with_prefix("module._orig_mod.", state)},
    "compiled of parallel": lambda state: {"model": with_prefix("_orig_mod.module.", state)},
    "a part": lambda state: with_prefix("model.", state),
}


@in_turn("wrapper", WRAPPERS)
def test_a_checkpoint_of_deit_or_timm_is_loaded_with_any_wrapper(wrapper, saved):
    original, model, x = timms(DISTILLED), tiny(name=DISTILLED).eval(), images()
    assert load_checkpoint(model, saved(WRAPPERS[wrapper](original.state_dict()))) is model
    assert_same(model(x), original(x), atol=1e-5)


def lapes(case):
    """Return the recorded state dict of LaPE's code, under its names."""
    tensors = load_file(GOLDEN / f"{case}.safetensors")
    state = {name.removeprefix("weight."): value for name, value in tensors.items() if name.startswith("weight.")}
    return state, tensors["input"], tensors["output"]


@in_turn(
    ("case", "encoding", "joining"),
    [
        ("lape_learnable_basic", "learnable", "default"),
        ("lape_learnable_share", "learnable", "shared"),
        ("lape_learnable_unshare", "learnable", "unshared"),
        ("lape_learnable_lape", "learnable", "lape"),
        ("lape_sin1d_lape", "sinusoidal_1d", "lape"),
        ("lape_sin2d_lape", "sinusoidal_2d", "lape"),
        ("lape_rpe2d_basic", "relative_bias", "default"),
        ("lape_distilled_basic", "learnable", "default"),
    ],
)
def test_a_checkpoint_of_lapes_code_is_loaded_despite_its_options_and_has_our_published_names(
    case, encoding, joining, saved
):
    state, x, output = lapes(case)
    depth = 1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks."))
    name = DISTILLED if "distilled" in case else "deit_tiny_patch16_224"
    model = tiny(encoding, joining, name, depth=depth).eval()
    load_checkpoint(model, saved(WRAPPERS["lape"](state)))
    assert_same(model(x).double(), output, atol=1e-4)
    published = graticule.published_state_dict(model).keys()
    assert published == {key for key in state if not key.endswith("relative_position_index")}


def test_a_fixed_table_of_another_grid_is_left_to_its_formula(saved):
    first = draw(tiny("sinusoidal_2d", "lape", img_size=48)).eval()
    path = saved(graticule.published_state_dict(first))
    with pytest.warns(UserWarning, match="is computed from 6 x 6 to 4 x 4 patches by the formula"):  # T2T-ViT#45
        model = load_checkpoint(tiny("sinusoidal_2d", "lape").eval(), path)
    x = images()
    assert_same(model(x), first(x), atol=1e-6)


def test_a_table_without_the_axis_of_one_is_taken(saved):
    state = timms().state_dict()
    state["pos_embed"] = state["pos_embed"][0]
    model = load_checkpoint(tiny(), saved(state))
    assert torch.equal(model.position.encodings[0].pos_embed[0], state["pos_embed"])


#: Our model, timm's, changes of its tensors, and parts of the error.
MISFITS = [
    (tiny, lambda: timms(num_classes=7), {}, ("it has 7 classes where the model has 5", "num_classes=7")),
    (tiny, lambda: timms(mlp_ratio=2.0), {}, ("fc1.weight is (48, 24) where the model has (96, 24)",)),
    (tiny, timms, {"head.weight": torch.zeros(5, 48)}, ("head.weight is (5, 48) where the model has (5, 24)",)),
    (tiny, timms, {"blocks.1.mlp.fc1.bias": None}, ("lacks blocks.1.mlp.fc1.bias",)),
    (lambda: tiny(depth=2), timms, {}, ("blocks.2.", "and 8 more")),
    (lambda: tiny("learnable", "lape"), timms, {}, ("lacks blocks.0.pe_norm.bias",)),
    (tiny, lambda: timms(DISTILLED), {}, ("pos_embed is (1, 18, 24) where the model has (1, 17, 24)", "dist_token")),
]


@in_turn(("build", "build_timm", "changes", "messages"), MISFITS)
def test_a_checkpoint_that_does_not_fit_is_refused_with_names_and_shapes(build, build_timm, changes, messages, saved):
    state = {**build_timm().state_dict(), **changes}
    message = assert_refused(build(), saved({name: value for name, value in state.items() if value is not None}))
    assert all(words in message for words in messages)
    assert ("classes" in message) == ("classes" in messages[0])


@in_turn("name", ["none.pth", "none.safetensors", "."])
def test_a_file_that_does_not_exist_is_named(name, tmp_path):
    assert "which does not exist" in assert_refused(tiny(), tmp_path / name, FileNotFoundError)


@pytest.mark.parametrize("format", ["zip", "legacy", "safetensors"])
def test_a_truncated_file_is_refused(format, saved, tmp_path):
    state, model = timms().state_dict(), tiny()
    path = tmp_path / "model.safetensors"
    if format == "safetensors":
        save_file(state, path)
    else:
        path = saved(state, _use_new_zipfile_serialization=format == "zip")
    content = path.read_bytes()
    for length in (0, 1, 7, 8, 1000, len(content) // 2, -1000, -20, -1):
        path.write_bytes(content[:length])
        with case(f"{length} bytes"):
            assert "truncated" in assert_refused(model, path)


TEXTS = [b"<!DOCTYPE html><html></html>", b'{"model": {"pos_embed": [0.1]}}', b"(", b"I1\n.", b"}s."]
TEXTS += [b"cos\nsystem\n(S'true'\ntR."]


@in_turn("suffix", ["pth", "safetensors"])
def test_random_bytes_and_text_are_refused(suffix, tmp_path):
    path, model = tmp_path / f"noise.{suffix}", tiny()
    noise = [bytes(torch.randint(256, (10 ** (seed % 4 + 1),)).tolist()) for seed in range(8)]
    for content in (*noise, *TEXTS):
        path.write_bytes(content)
        with case(content[:100]):
            assert_refused(model, path)


class Hostile:
    """Writes a file when it is unpickled by a reader that executes code."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return open, (str(self.target), "w")


@in_turn("beside", [False, True])
@in_turn("format", ["zip", "legacy", "pickle"])
def test_code_in_a_checkpoint_does_not_run_and_is_named(beside, format, tmp_path, saved):
    target = tmp_path / "written_by_the_checkpoint"
    content = {"model": timms().state_dict(), "args": Hostile(target)} if beside else Hostile(target)
    path = tmp_path / "checkpoint.pth"
    if format == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        saved(content, _use_new_zipfile_serialization=format == "zip")
    message = assert_refused(tiny(), path)
    assert not target.exists() and (format != "zip" or ("could run code" in message and "open" in message))


@in_turn(
    "content",
    [
        {},
        {"model": {}},
        {"epoch": 3, "args": argparse.Namespace(lr=1.0)},
        {"model": {"pos_embed": [1.0, 2.0]}},
        [torch.zeros(2)],
        torch.zeros(2),
        None,
        {0: torch.zeros(2)},
        {"model": {("a", 1): torch.zeros(2)}},
        {"pos_embed": torch.tensor(1.0)},
        {"pos_embed": torch.zeros(1, 0, 24)},
        {"head.weight": torch.tensor(1.0)},
    ],
)
def test_an_object_that_is_not_a_state_dict_is_refused(content, saved):
    assert_refused(tiny(), saved(content))


@pytest.mark.parametrize("encoding", ["learnable", "sinusoidal_2d"])
def test_a_table_of_another_shape_is_resampled_or_refused(encoding, saved):
    """No shape may break the loader; a table that fits gets the shape of the model's."""
    model, state = tiny(encoding), timms().state_dict()
    for shape in ((), (0,), (24,), (17, 23), (1, 1, 17, 24), (2, 17, 24), (1, 5, 24), (1, 6, 24), (1, 0, 24)):
        path = saved(state | {"pos_embed": torch.zeros(shape)})
        with case(shape):
            try:
                load_checkpoint(model, path)
            except ValueError as error:
                assert "checkpoint.pth" in str(error)
            report = transfer(model, path)
            assert model.position.encodings[0].pos_embed.shape == (1, 17, 24) and report.totals["loaded"]


def test_equal_weights_give_equal_bytes(tmp_path):
    state = {"weight": torch.ones(3), "größe.bias": torch.zeros(2, dtype=torch.bfloat16)}
    files = {save_weights(state, tmp_path / "a.safetensors").read_bytes() for _ in range(20)}
    read = read_checkpoint(tmp_path / "a.safetensors")
    assert len(files) == 1 and all(torch.equal(value, state[name]) for name, value in read.items())


def test_reading_keeps_the_other_entries_of_a_checkpoint(saved):
    written = WRAPPERS["lape"]({"weight": torch.ones(2)})
    checkpoint = read_checkpoint(saved(written))
    assert torch.equal(checkpoint.pop("model")["weight"], torch.ones(2))
    assert checkpoint == {key: value for key, value in written.items() if key != "model"}


# Tensors that are not weights


def with_values(value, *numbers):
    value = value.double() if 1e300 in numbers else value.clone()
    value.view(-1)[7 : 7 + len(numbers)] = torch.tensor(numbers, dtype=value.dtype)
    return value


#: What the refusal and the report of a transfer say -> a tensor that cannot be a weight.
STRANGE = {
    "sparse": lambda value: value.to_sparse(),
    "quantized": lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
    "without values": lambda value: value.to("meta"),
    "is int64 where the model has float32": lambda value: value.long(),
    "is bool where the model has float32": lambda value: value > 0,
    "is complex64 where the model has float32": lambda value: value + 0j,
    "has 1 values that are not finite as float32": lambda value: with_values(value, torch.nan),
    "has 2 values that are not finite as float32": lambda value: with_values(value, torch.inf, -torch.inf),
    "has 3 values that are not finite as float32": lambda value: with_values(value, 1e300, 1e300, 1e300),
}


@in_turn("reason", STRANGE)
def test_sparse_quantized_and_other_unusable_tensors_are_refused_by_name(reason, saved):
    """A transfer leaves them and takes the rest."""
    state = draw(tiny()).state_dict()
    for name in ("patch_embed.proj.weight", "blocks.0.norm1.weight", "head.weight", "position.encodings.0.pos_embed"):
        with warnings.catch_warnings(), case(name):
            warnings.simplefilter("ignore")  # PyTorch has deprecated quantized tensors
            path, model = saved({**state, name: STRANGE[reason](state[name])}), tiny()
            message = assert_refused(model, path)
            assert reason in message and name in message
            rows = {row.name: row for row in transfer(model, path).rows if row.status != "unused"}
            why = "not finite" if "finite" in reason else reason.removeprefix("is ").partition(" where")[0]
            why = "qint8" if reason == "quantized" else why
            assert rows[name].status == "new"
            assert rows[name].detail == ("5 -> 5 classes" if name == "head.weight" else f"{why} there")
            assert rows["blocks.1.attn.qkv.weight"].status == "loaded"


def test_a_view_that_repeats_its_values_is_refused(saved):
    endless = torch.ones(1).expand(10**12).view(1, -1, 1).expand(1, 10**12, 24)
    state = {**tiny().state_dict(), "position.encodings.0.pos_embed": endless}
    path = saved(state)
    assert path.stat().st_size < 300_000
    assert "repeats its values" in assert_refused(tiny(), path)
    (row,) = [row for row in transfer(tiny(), path).rows if row.name.endswith("pos_embed") and row.status == "new"]
    assert "repeats its values" in row.detail


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_name_with_line_ends_and_escape_codes_is_shown_in_one_line_and_escaped(suffix, saved, tmp_path):
    state = {**tiny().state_dict(), "a\nb\x1b[31m" + "c" * 1000: torch.ones(2)}
    path = saved(state) if suffix == "pth" else tmp_path / "model.safetensors"
    if suffix == "safetensors":
        save_file(state, path)
    message = assert_refused(tiny(), path)
    assert r"a\nb\x1b[31mccc" in message
    assert message.isprintable() and len(message) < 500


def test_a_checkpoint_that_a_model_is_created_with_is_refused_as_by_the_loader(saved):
    path = saved(timms(num_classes=7).state_dict())
    with pytest.raises(ValueError) as error:
        tiny(checkpoint_path=path)
    assert str(error.value) == assert_refused(tiny(), path)


UNKNOWN = [None, [4], [0, 16], [-4, -4], ["a", "b"], [True, 16], [4.0, 4.0], [3, 5], [10**30, 1]]


# Tables of a grid with as many patches and different sides

#: Function that writes a checkpoint, and its contents.
SAVED = {
    "own": (torch.save, lambda model: model.state_dict()),
    "published": (torch.save, lambda model: {"model": graticule.published_state_dict(model)}),
    "compiled": (torch.save, lambda model: {"state_dict": torch.nn.ModuleDict({"module": model}).state_dict()}),
    "weights": (save_weights, lambda model: model.state_dict()),
    "published weights": (save_weights, graticule.published_state_dict),
}


def stored(model, how, folder):
    write, contents = SAVED[how]
    path = folder / ("a.pth" if write is torch.save else "a.safetensors")
    write(contents(model), path)
    return path


@pytest.mark.parametrize("how", SAVED)
@pytest.mark.parametrize(
    ("encoding", "joining", "sides"),
    [
        ("learnable", "default", ((32, 32), (16, 64))),
        ("learnable", "default", ((24, 40), (40, 24))),
        ("relative_bias", "lape", ((16, 64), (32, 32))),
    ],
)
def test_a_table_of_a_grid_of_other_sides_is_resampled_though_it_has_the_same_shape(
    how, encoding, joining, sides, tmp_path
):
    there, here = sides
    first = draw(tiny(encoding, joining, img_size=there)).eval()
    model = load_checkpoint(tiny(encoding, joining, img_size=here).eval(), stored(first, how, tmp_path))
    second = tiny(encoding, joining, img_size=here).eval()
    transfer(second, stored(first, how, tmp_path))
    first.set_input_size(here)
    assert holds(model, first.state_dict()) and holds(second, first.state_dict())


@pytest.mark.filterwarnings("ignore:.* does not say what grid it is for")
@pytest.mark.parametrize("how", [*SAVED, "safetensors"])
@pytest.mark.parametrize(("joining", "encoding"), [("default", "learnable"), ("lape", "relative_bias")])
def test_a_table_of_its_own_grid_is_taken_as_it_is_though_it_could_be_a_square(how, encoding, joining, tmp_path):
    first = draw(tiny(encoding, joining, img_size=(16, 64)))
    if how == "safetensors":  # which stores only tensors
        save_file(first.state_dict(), tmp_path / "a.safetensors")
    path = tmp_path / "a.safetensors" if how == "safetensors" else stored(first, how, tmp_path)
    model = load_checkpoint(tiny(encoding, joining, img_size=(16, 64)), path)
    assert holds(first, model.state_dict())


SIZES = {
    "ours": (lambda: tiny(img_size=(24, 40)).state_dict(), "1 from 3 x 5 to 4 x 4 patches"),
    "timm's": (lambda: timms(img_size=48).state_dict(), "1 from 6 x 6 to 4 x 4 patches"),
    "without metadata": (lambda: dict(tiny(img_size=(16, 72)).state_dict()), r"1 from \(1, 19, 24\) to 4 x 4 patches"),
    "biases": (lambda: tiny("relative_bias", img_size=48).state_dict(), "3 from 6 x 6 to 4 x 4 patches"),
    "biases without metadata": (
        lambda: dict(tiny("relative_bias", img_size=48).state_dict()),
        "3 from 6 x 6 to 4 x 4 patches",
    ),
}


@in_turn("of", SIZES)
@pytest.mark.filterwarnings("default")
def test_a_warning_names_the_grids_of_tables_that_are_resampled_once(of):
    make, reason = SIZES[of]
    model = tiny("relative_bias" if "biases" in of else "learnable")
    if of == "without metadata":
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict(make())
        return
    with pytest.warns(UserWarning) as warned:
        model.load_state_dict(make())
    assert [str(record.message) for record in warned] == [
        f"the position tables of the checkpoint are resampled: {reason}."
    ]


#: Weights of one position and models of another, whose names and shapes agree.
EXCHANGED = [
    ("rope", "default", "alibi", "default"),
    ("rope", "default", "rope(base=1000)", "default"),
    ("learnable", "default", "learnable", "shared"),
    ("learnable", "lape", "learnable", "lape_sharing"),
    ("none", "default", "rope", "default"),
]


@in_turn(("encoding", "joining", "other", "other_joining"), EXCHANGED)
def test_weights_of_another_position_are_named_in_a_warning(encoding, joining, other, other_joining, tmp_path):
    model, path = draw(tiny(encoding, joining)), tmp_path / "weights.safetensors"
    save_weights(model.state_dict(), path)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    for load in (
        lambda other_model: other_model.load_state_dict(model.state_dict()),
        lambda other_model: load_checkpoint(other_model, path),
        lambda other_model: load_checkpoint(other_model, tmp_path / "weights.pt"),
    ):
        load(tiny(encoding, joining))
        with pytest.warns(UserWarning, match="the weights are of a model with encoding .* the model has encoding"):
            load(tiny(other, other_joining))


@in_turn(
    ("encoding", "joining", "other", "other_joining"),
    [
        ("peg", "default", "peg(kernel=3)", "default()"),
        ("learnable", "lape", "learnable()", "lape()"),
        ("log_n + learnable", "default", "log_n(reference=16) + learnable", "default"),
    ],
)
def test_options_that_have_their_default_may_be_written_or_not(encoding, joining, other, other_joining):
    model, state = tiny(other, other_joining), draw(tiny(encoding, joining)).state_dict()
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        model.load_state_dict(state)
    assert records == [] and all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_options_that_weights_do_not_depend_on_may_differ():
    model = draw(tiny("learnable(std=0.1) + rope"))
    assert tiny("rope + learnable(resampler='bilinear')").load_state_dict(model.state_dict(), strict=False)


@in_turn("reason", [None, 3, [], {3: [4, 4]}, *({"pos_embed": shape} for shape in UNKNOWN)])
def test_invalid_shapes_of_grids_are_ignored(reason, saved):
    state = graticule.published_state_dict(draw(tiny()))
    state._metadata[""]["grids"] = reason
    model = load_checkpoint(tiny(), saved(state))
    assert torch.equal(model.position.encodings[0].pos_embed, state["pos_embed"])
