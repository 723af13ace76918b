"""Positions that a file holds are the model's, or the file is refused or a warning names the difference."""

import warnings
from argparse import Namespace

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import graticule
from graticule import Grid, create_model, load_checkpoint, transfer
from graticule.encodings.sinusoidal import Sinusoidal2d
from in_turn import case, in_turn
from tiny import SIZE, build, draw, tiny


def waves(places, dim):
    return np.outer(places, 1 / 10000 ** (np.arange(dim // 2) / (dim / 2)))


def mae(dim, height, width):
    """Rebuild the table of MAE's code: of each patch sines, then cosines, of its column, then of its row."""
    x, y = (waves(axis.ravel(), dim // 2) for axis in np.meshgrid(np.arange(width), np.arange(height)))
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], 1)


def moco(dim, height, width):
    """Rebuild the table of MoCo v3's code, where both coordinates are of a square with the first axis the slowest."""
    w, h = (waves(axis.ravel(), dim // 2) for axis in np.meshgrid(np.arange(width), np.arange(height), indexing="ij"))
    return np.concatenate([np.sin(w), np.cos(w), np.sin(h), np.cos(h)], 1)


def detr(dim, height, width):
    y, x = (waves(axis.ravel(), dim // 2) for axis in np.mgrid[:height, :width])
    return np.concatenate([np.stack([np.sin(a), np.cos(a)], -1).reshape(len(a), -1) for a in (y, x)], 1)


def timms(dim, height, width):
    y, x = (waves(axis.ravel(), dim // 2) for axis in np.mgrid[:height, :width])
    return np.concatenate([np.sin(y), np.sin(x), np.cos(y), np.cos(x)], 1)


#: Order -> its table: facebookresearch/mae#18, #151, #63 and MCG-NJU/VideoMAE#83, moco-v3, DETR, timm.
ORDERS = {"mae": mae, "moco_v3": moco, "detr": detr, "timm": timms}


@in_turn("order", ORDERS)
def test_an_order_of_sinusoids_is_that_of_its_authors(order):
    for grid in (Grid(4, 4), Grid(5, 5), *([Grid(3, 5)] if order != "moco_v3" else [])):
        table = Sinusoidal2d(grid, 24, order=order).formula(grid)
        torch.testing.assert_close(table, torch.tensor(ORDERS[order](24, *grid.shape)), rtol=0, atol=1e-12)


@pytest.fixture
def written(tmp_path):
    def write(state):
        torch.save(dict(state), tmp_path / "file.pth")
        return tmp_path / "file.pth"

    return write


def with_table(table, prefix=1):
    rows = torch.cat([torch.zeros(prefix, 24), torch.tensor(table).float()])
    return {**draw(timm.create_model("vit_tiny_patch16_224", **SIZE)).state_dict(), "pos_embed": rows[None]}


#: Encoding, table of the file and what the refusal names: mae#151, T2T-ViT#45, MIMDet#15, moco-v3, YOLOS#21.
OTHERS = [
    ("sinusoidal_2d", mae(24, 4, 4), "sinusoidal_2d(order='mae')"),
    ("sinusoidal_2d", mae(24, 6, 6), "sinusoidal_2d(order='mae')"),
    ("sinusoidal_2d(order='mae')", moco(24, 4, 4), "sinusoidal_2d(order='moco_v3')"),
    ("sinusoidal_1d", detr(24, 4, 4), "sinusoidal_2d(order='detr')"),
    ("sinusoidal_2d", np.ones((16, 24)), "learnable"),
    ("sinusoidal_1d", np.ones((36, 24)), "learnable"),
]


@in_turn(("encoding", "table", "name"), OTHERS)
def test_a_fixed_table_of_another_formula_is_refused_with_the_name_of_that(encoding, table, name, written):
    path, model = written(with_table(table)), tiny(encoding)
    for load in (load_checkpoint, lambda model, path: model.load_state_dict(torch.load(path))):
        with pytest.raises(ValueError, match="must be the table of the formula of") as refusal:
            load(model, path)
        assert name in str(refusal.value)
    (row,) = [row for row in transfer(model, path).rows if row.name.endswith("pos_embed") and row.status == "new"]
    assert name in row.detail


@in_turn("order", ORDERS)
def test_a_file_of_an_order_is_loaded_and_computed_at_other_sizes(order, written):
    model = load_checkpoint(tiny(f"sinusoidal_2d(order={order!r})"), written(with_table(ORDERS[order](24, 4, 4))))
    graticule.resize(model, 40)
    table = model.position(model.grid)[0].added_to_stream[1:]
    torch.testing.assert_close(table, torch.tensor(ORDERS[order](24, 5, 5)).float(), rtol=0, atol=1e-6)


@in_turn("encoding", ["sinusoidal_1d", "sinusoidal_2d", "sinusoidal_2d(order='mae')", "sinusoidal_2d(spread=0.02)"])
def test_a_file_without_its_fixed_table_is_loaded(encoding, written):
    """pengzhiliang/MAE-pytorch#26."""
    for size in (32, 48, (24, 40)):
        first, model = draw(tiny(encoding)), draw(tiny(encoding, img_size=size))
        state = {name: value for name, value in graticule.published_state_dict(first).items() if name != "pos_embed"}
        table = model.position.encodings[0].pos_embed.clone()
        load_checkpoint(model, written(state))
        assert torch.equal(model.position.encodings[0].pos_embed, table)
        assert torch.equal(model.head.weight, first.head.weight)


@in_turn("encoding", ["sinusoidal_1d(spread=0.02)", "sinusoidal_2d(spread=0.5,order='mae')"])
def test_a_fixed_table_keeps_the_factor_of_the_grid_that_it_was_built_for(encoding, written, tmp_path):
    model = draw(tiny(encoding)).eval()
    built_for = model.position.encodings[0]
    for size in (48, (24, 40)):
        other = load_checkpoint(tiny(encoding, img_size=size), written(model.state_dict()))
        expected = built_for(other.grid)
        torch.testing.assert_close(other.position.encodings[0].pos_embed[0], expected, rtol=0, atol=1e-6)
    graticule.resize(model, 48)
    model.save_pretrained(tmp_path / "model")
    again, x = graticule.from_pretrained(tmp_path / "model").eval(), torch.randn(1, 3, 64, 64)
    for opened in (model, again):
        graticule.resize(opened, 64)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=1e-6)


def test_names_in_errors_are_those_of_the_file(written):
    state = timm.create_model("vit_tiny_patch16_224", **SIZE).state_dict()
    lacking = {f"encoder.{name}": value for name, value in state.items() if name not in ("pos_embed", "head.bias")}
    with pytest.raises(ValueError, match=r"it lacks encoder\.head\.bias, encoder\.pos_embed"):
        load_checkpoint(tiny(), written(lacking))


# The grid of a table

#: Pixels of the file and of the model, `grid`: Union14M#12, cav-mae#27, timm#2190, dinov2#506, dino#8, timm#2737.
GRIDS = [
    ((16, 64), (16, 64), None),
    ((16, 64), (16, 64), (2, 8)),
    ((16, 64), (32, 32), (2, 8)),
    ((64, 16), (16, 64), (8, 2)),
    ((24, 40), (32, 32), (3, 5)),
    ((32, 32), (16, 64), (4, 4)),
    ((32, 32), (24, 40), None),
]


@pytest.mark.filterwarnings("ignore:.*(resampled|what grid it is for)")
@in_turn(("there", "here", "grid"), GRIDS)
def test_the_grid_of_a_table_is_that_which_is_given(there, here, grid, written):
    state = draw(timm.create_model("vit_tiny_patch16_224", **{**SIZE, "img_size": there})).state_dict()
    sides = Grid(there[0] // 8, there[1] // 8, prefix=1), Grid(here[0] // 8, here[1] // 8, prefix=1)
    expected = sides[0].resize(state["pos_embed"][0], sides[1])
    for load in (load_checkpoint, transfer):
        model = tiny(img_size=here)
        load(model, written(state), grid=grid)
        assert torch.equal(model.position.encodings[0].pos_embed[0], expected)


def wrapped(state):
    return {f"model.{name}": value for name, value in state.items()}


#: What a file has beside a bare state dict for 2 x 8 patches, as its own metadata or in a `.safetensors` file.
NAMED = {
    "DeiT": lambda state: {"model": state, "args": Namespace(input_size=(16, 64), arch="vit")},
    "timm": lambda state: {"state_dict": state, "args": Namespace(input_size=(3, 16, 64), img_size=None)},
    "Lightning": lambda state: {"state_dict": wrapped(state), "hyper_parameters": {"vit": {"img_size": [16, 64]}}},
    "two sizes, one of which fits": lambda state: {"model": state, "a": {"img_size": 224}, "b": {"img_size": (16, 64)}},
    "safetensors": {"img_size": "[16, 64]"},
    "transformers": {"config": '{"vision_config": {"image_size": [16, 64]}}'},
}


@in_turn("name", NAMED)
def test_the_grid_of_a_table_is_that_of_the_image_size_that_its_file_names(name, tmp_path):
    state = draw(timm.create_model("vit_tiny_patch16_224", **{**SIZE, "img_size": (16, 64)})).state_dict()
    expected, contents = Grid(2, 8, prefix=1).resize(state["pos_embed"][0], Grid(4, 4, prefix=1)), NAMED[name]
    if callable(contents):
        torch.save(contents(dict(state)), path := tmp_path / "file.pth")
    else:
        save_file(state, path := tmp_path / "file.safetensors", contents)
    for load in (load_checkpoint, transfer):
        load(model := tiny(), path)
        assert torch.equal(model.position.encodings[0].pos_embed[0], expected)
    load_checkpoint(model := tiny(img_size=(16, 64)), path)  # without a warning
    assert torch.equal(model.position.encodings[0].pos_embed, state["pos_embed"])
    with pytest.warns(UserWarning, match="resampled: 1 from 4 x 4 to 2 x 8"):
        load_checkpoint(model, path, grid=(4, 4))  # what is given comes first


def test_a_table_that_is_a_map_is_for_the_grid_of_its_shape():
    first, model = (draw(build("SAM", img_size=size)) for size in ((16, 64), 32))
    model.load_state_dict(dict(graticule.published_state_dict(first)))
    first.set_input_size(32)
    state = first.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


#: Image size of the file and of the model, and the grid that is assumed, if several fit.
UNCLEAR = [(32, 32, None), ((24, 40), (24, 40), None), ((16, 64), (16, 64), "2 x 8"), ((32, 48), (24, 64), "3 x 8")]


@in_turn(("there", "here", "assumed"), UNCLEAR)
def test_a_table_for_one_of_several_grids_is_said(there, here, assumed, written):
    path = written(timm.create_model("vit_tiny_patch16_224", **{**SIZE, "img_size": there}).state_dict())
    for load in (load_checkpoint, transfer):
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always")
            load(tiny(img_size=here), path)
        said = (
            [f"pos_embed does not say what grid it is for: {assumed}, as in the model, is assumed"] if assumed else []
        )
        assert [str(record.message).partition(";")[0] for record in records] == said


#: Rows of a table that was replaced by hand, and its grid: YuanGongND/ast#27, Martinser/REG#9, LLaVA#1090, SelfMedMAE.
REPLACED = [((6, 6), None), ((12, 25), None), ((12, 25), (12, 25)), ((3, 12), (3, 12)), ((2, 8), (2, 8))]


@in_turn(("rows", "grid"), REPLACED)
def test_the_grid_of_a_table_that_was_replaced_is_found_or_refused(rows, grid, written, tmp_path):
    table = torch.randn(1, 1 + rows[0] * rows[1], 24)
    theirs = timm.create_model("vit_tiny_patch16_224", **SIZE)
    theirs.pos_embed, ours = torch.nn.Parameter(table), tiny()
    ours.position.encodings[0].pos_embed = torch.nn.Parameter(table)  # while 4 x 4 are recorded
    expected = Grid(*rows, prefix=1).resize(table[0], Grid(4, 4, prefix=1))
    for state in (theirs.state_dict(), ours.state_dict()):
        torch.save(state, path := tmp_path / "file.pth")
        model = tiny()
        if rows == (12, 25) and grid is None:
            with pytest.raises(ValueError, match=r"pos_embed is \(1, 301, 24\) where .*; give its grid"):
                load_checkpoint(model, path)
        elif rows == (2, 8) and "pos_embed" not in state:  # as many rows as are recorded
            with pytest.raises(ValueError, match="`grid` must be that which the file records"):
                load_checkpoint(model, path, grid=grid)
        else:
            with pytest.warns(UserWarning, match=f"resampled: 1 from {rows[0]} x {rows[1]} to 4 x 4"):
                load_checkpoint(model, path, grid=grid)
            assert torch.equal(model.position.encodings[0].pos_embed[0], expected)


def test_the_grid_of_tables_of_a_pyramid_and_of_windows_is_given(written):
    name, size = "pvt_tiny", {"img_size": (32, 64), "embed_dims": (8, 16), "depths": (1, 1), "num_heads": (1, 2)}
    size |= {"mlp_ratios": (2, 2), "sr_ratios": (2, 1), "num_classes": 0}
    first, model = (draw(create_model(name, **{**size, "img_size": side})) for side in ((32, 64), (64, 64)))
    path = written(dict(graticule.published_state_dict(first)))
    load_checkpoint(model, path, grid=(8, 16))
    first.set_input_size((64, 64))
    assert all(torch.equal(value, first.state_dict()[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match=r"`grid` must be the grid of a table in the file, in patches, got \(3, 7\)"):
        load_checkpoint(model, path, grid=(3, 7))


# Rows of prefix tokens, and windows of pretraining


@in_turn(("name", "tokens"), [("vit_tiny_patch16_224", 1), ("deit_tiny_distilled_patch16_224", 2)])
def test_rows_of_tokens_that_a_model_lacks_are_added_to_the_tokens(name, tokens, written):
    """ywyue/FiT3D#16, timm#2014, and distilled DeiT; at another size, with registers."""
    theirs = draw(timm.create_model(name, **{**SIZE, "num_classes": 0})).eval()
    for size, registers in ((32, 0), (32, 4), (48, 0)):
        ours = tiny("learnable(prefix_rows=False)", name="vit_tiny_patch16_224", img_size=size, reg_tokens=registers)
        with case((size, registers)):
            report = transfer(ours.eval(), written(theirs.state_dict()))
            (row,) = [row for row in report.rows if row.name.endswith("pos_embed")]
            assert row.status == "resized" and "cls_token" in row.detail
            expected = Grid(4, 4).resize(theirs.pos_embed[0, tokens:], Grid(size // 8, size // 8))
            assert torch.equal(ours.position.encodings[0].pos_embed[0], expected)
            assert torch.equal(ours.cls_token, theirs.cls_token + theirs.pos_embed[:, :1])
    ours = tiny("learnable(prefix_rows=False)", name=name, num_classes=0).eval()
    with pytest.warns(UserWarning, match="the rows of cls_token.* are added to .*cls_token"):
        load_checkpoint(ours, written(theirs.state_dict()))
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


#: Window of the model, its pixels, and pretrained windows: Swin-Transformer#251, #259, #385, #335, #372; vision#6246.
REFERENCES = [(4, 32, 4), (8, 64, 4), (6, 48, 3), (8, 64, 8), (4, 32, 7), (1, 8, 4)]


@in_turn(("window", "size", "pretrained"), REFERENCES)
def test_the_window_of_pretraining_of_swin_v2_is_that_of_the_coordinates_in_the_file(window, size, pretrained, written):
    shape = {"img_size": size, "window_size": window, "embed_dim": 12, "depths": (2, 2), "num_heads": (1, 2)}
    shape |= {"num_classes": 0}
    name, fixed = "swinv2_tiny_window8_256", {"pretrained_window_sizes": (pretrained, pretrained)}
    theirs = draw(timm.create_model(name, **shape, **fixed)).eval()
    state = {key.replace("layers.1.downsample", "layers.0.downsample"): v for key, v in theirs.state_dict().items()}
    for key in [key for key in state if key.endswith("cpb_mlp.0.weight")]:
        block = theirs.get_submodule(key.removesuffix(".cpb_mlp.0.weight"))
        state[f"{key.removesuffix('cpb_mlp.0.weight')}relative_coords_table"] = block.relative_coords_table
    x = torch.randn(1, 3, size, size)
    for load in (load_checkpoint, transfer):
        ours = create_model(name, **shape).eval()
        load(ours, written(state))
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_a_window_of_pretraining_that_a_file_does_not_say_is_named(written):
    """Swin-Transformer#251: the window of a name is its published weights' window."""
    shape = {"img_size": 32, "embed_dim": 12, "depths": (1, 1), "num_heads": (1, 2), "num_classes": 0}
    for more, assumed in (({}, None), ({"window_size": 4}, "4 x 4"), ({"pretrained_window_sizes": (8, 8)}, None)):
        theirs = timm.create_model("swinv2_tiny_window8_256", **shape, **more)
        ours = create_model("swinv2_tiny_window8_256", **shape, **more)
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always")
            load_checkpoint(ours, written(theirs.state_dict()))
        words = [str(record.message) for record in records]
        assert [assumed is not None and f"trained with: {assumed} is assumed" in text for text in words] == (
            [True] if assumed else []
        )


#: Names of registers in files: geti#4411, dinov3#290, and other codes.
@in_turn("published", ["register_tokens", "storage_tokens", "reg_token", "reg_tokens", "registers"])
def test_registers_are_known_by_all_published_names(published, written):
    model = tiny("learnable(prefix_rows='first')", reg_tokens=4)
    state = {name: torch.randn_like(value) for name, value in graticule.published_state_dict(model).items()}
    path = written({published if name == "reg_token" else name: value for name, value in state.items()})
    for load in (load_checkpoint, transfer):
        other = tiny("learnable(prefix_rows='first')", reg_tokens=4)
        with warnings.catch_warnings():
            load(other, path)
        assert torch.equal(other.reg_token, state["reg_token"])
