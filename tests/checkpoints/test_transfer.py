"""Transfer from the checkpoint of another model: fitting tensors are loaded, and all reported, or nothing changes."""

import copy
import functools
import re

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from timm.models._manipulate import adapt_input_conv

import graticule
from graticule import Grid, fold, load_checkpoint, transfer
from in_turn import case, in_turn
from tiny import COVER, DEPTH, SIZE, SMALL, assert_same, draw, every_family, holds, images, images_for, tiny

DISTILLED = "deit_tiny_distilled_patch16_224"
TABLE = "position.encodings.0.pos_embed"


def small(family, **kwargs):
    """Return a small model of a family with every parameter drawn, in evaluation mode."""
    name, sizes = SMALL[family]
    return draw(graticule.create_model(name, **{"num_classes": 5, **sizes, **kwargs})).eval()


def vit(*args, **kwargs):
    return draw(tiny(*args, **kwargs)).eval()


def save(model, folder, published=False):
    """Save the weights of a model; returns the path."""
    path = folder / "model.safetensors"
    state = graticule.published_state_dict(model) if published else model.state_dict()
    save_file({name: value.contiguous() for name, value in state.items()}, path)
    return path


def with_status(report, *statuses):
    return {row.name for row in report.rows if row.status in statuses}


def report_of(model, source, **kwargs):
    """Transfer; each tensor is reported once, each key is used or unused once, and new tensors are unchanged."""
    before = copy.deepcopy(model.state_dict())
    report = transfer(model, source, **kwargs)
    keys = source if isinstance(source, dict) else graticule.checkpoints.read_checkpoint(source)
    after, rows = model.state_dict(), [row for row in report.rows if row.status != "unused"]
    assert [row.name for row in rows] == list(after) and all(row.values == after[row.name].numel() for row in rows)
    used, unused = {row.source for row in rows} - {""}, [row.name for row in report.rows if row.status == "unused"]
    assert len(unused) == len(set(unused)) and used | set(unused) == set(keys) and not used & set(unused)
    for row in rows:
        assert row.status in ("loaded", "resized", "adapted", "copied", "new")
        assert (row.status == "new") == (row.source == "") and (row.status == "loaded") == (row.detail == "")
    assert holds(model, {row.name: before[row.name] for row in rows if row.status == "new"})
    lines = report.table()
    assert report.totals == {
        status: sum(row.values for row in lines if row.status == status) for status in report.totals
    }
    return report


# The same model


@every_family
def test_from_its_own_checkpoint_a_model_has_everything_bit_for_bit(family, tmp_path):
    first, model = small(family), small(family)
    for published in (False, True):
        with case("published names" if published else "its own names"):
            report = report_of(draw(model), save(first, tmp_path, published))
            new = {row.name for row in report.rows if row.status != "loaded"}
            assert all(published and name.endswith(".reference") for name in new)  # Swin V2's, which are not published
            assert_same(model.state_dict(), first.state_dict(), atol=0)


SOURCES = [
    ("learnable", "unshared"),
    ("sinusoidal_1d", "shared"),
    ("relative_bias", "lape"),
    ("peg+learnable", "lape"),
]


@functools.cache
def weights_of(encoding, joining):
    return vit(encoding, joining).state_dict()


@in_turn(("encoding", "joining"), COVER)
def test_common_tensors_are_loaded_between_any_two_encodings_and_joinings(encoding, joining):
    first, model = vit(encoding, joining), vit(encoding, joining)
    start = copy.deepcopy(model.state_dict())
    assert set(report_of(model, first.state_dict()).totals) == {"loaded"}
    x = images(24, 40)
    assert torch.equal(model(x), first(x))
    outside = {name for name in start if not name.startswith("position.")}
    for other in SOURCES:
        model.load_state_dict(start)
        state = weights_of(*other)
        report = report_of(model, state)
        assert outside <= with_status(report, "loaded") and holds(model, {name: state[name] for name in outside})
        if "learnable" in encoding and "learnable" in other[0]:
            assert {name for name in start if name.endswith("pos_embed")} <= with_status(report, "loaded", "copied")
        # a shared bias has a table of the same name
        alone = "relative_bias" in encoding.split("+") and "shared_relative_bias" not in encoding
        if alone and "relative_bias" in other[0].split("+"):
            tables = {name for name in start if name.endswith("relative_position_bias_table")}
            assert tables <= with_status(report, "loaded")
    assert model(images()).isfinite().all()


def test_the_checkpoint_is_unchanged_and_the_model_keeps_dtype_and_requires_grad():
    state = vit().state_dict()
    before = copy.deepcopy(state)
    model = tiny("learnable", "unshared", img_size=48, in_chans=1).bfloat16()
    model.patch_embed.requires_grad_(False)
    transfer(model, state)
    assert_same(dict(state), dict(before), atol=0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.patch_embed.proj.weight.requires_grad and model.head.weight.requires_grad
    assert not any(parameter.grad_fn for parameter in model.parameters())


# Another size

RESIZED = {
    "PVT": ("PVT", {}, {"img_size": 32}),
    "PVT, lape": ("PVT", {"joining": "lape"}, {"img_size": 32}),
    "PVT, peg beside": ("PVT", {"encoding": "peg+learnable"}, {"img_size": 32}),
    "Swin, window": ("Swin", {}, {"window_size": 2}),
    "Swin, size": ("Swin", {}, {"img_size": 48}),
    "Swin, table beside": ("Swin", {"encoding": "learnable+relative_bias"}, {"img_size": 48, "window_size": 3}),
    "PosMLP, size": ("PosMLP", {}, {"img_size": 32}),
    "PosMLP, windows": ("PosMLP", {}, {"windows": (4, 2)}),
    "PosMLP, table of displacements": ("PosMLP", {"encoding": "lrpe"}, {"windows": (4, 2)}),
    "PosMLP, dense": ("PosMLP", {"encoding": "sgu"}, {"windows": (4, 2)}),
    "gMLP": ("gMLP", {}, {"img_size": 48}),
    "ViT-Lite": ("ViT-Lite", {}, {"img_size": 12}),
    "CCT": ("CCT", {"encoding": "learnable"}, {"img_size": 16}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is computed from")
@in_turn(("encoding", "joining"), COVER)
def test_a_transfer_to_another_image_size_equals_loading(encoding, joining, tmp_path):
    formula = "sinusoidal" in encoding  # which the loader ignores only under published names
    path = save(vit(encoding, joining), tmp_path, published=formula)
    for size in (48, (24, 40)):
        with case(size):
            model, expected = vit(encoding, joining, img_size=size), vit(encoding, joining, img_size=size)
            load_checkpoint(expected, path)
            report = report_of(model, path)
            assert all(formula and name.endswith("pos_embed") for name in with_status(report, "new"))
            assert_same(model.state_dict(), expected.state_dict(), atol=0)


@pytest.mark.slow
@in_turn("change", RESIZED)
def test_a_transfer_to_another_size_or_window_of_other_families_equals_loading(change, tmp_path):
    family, both, other = RESIZED[change]
    first, model, expected = small(family, **both), small(family, **both, **other), small(family, **both, **other)
    for published in (False, True):
        with case("published names" if published else "its own names"):
            path = save(first, tmp_path, published)
            load_checkpoint(draw(expected), path)
            assert not with_status(report_of(draw(model), path), "new")
            assert_same(model.state_dict(), expected.state_dict(), atol=0)


@pytest.mark.parametrize(("encoding", "name"), [("learnable", "encodings.0.pos_embed"), ("relative_bias", "table")])
def test_an_image_of_one_row_takes_a_square_table_as_a_square(encoding, name):
    square = vit(encoding, name="vit_nano_patch4_28", img_size=32)
    row = vit(encoding, name="vit_nano_patch4_28", img_size=(8, 32))
    transfer(row, square.state_dict())
    square.set_input_size((8, 32))
    expected = {key: value for key, value in square.state_dict().items() if name in key}
    assert expected and holds(row, expected)


# What is new, and what is unused

#: Case -> the model of the checkpoint, the model, and the names that are new and unused.
NORMS, PEG = r"position\..*\.norms\..*", r"position\..*\.pegs\..*"
CASES = {
    "no classifier": (vit, lambda: vit(num_classes=0), "", r"head\..*"),
    "distilled from plain": (vit, lambda: vit(name=DISTILLED), r"dist_token|head_dist\..*", ""),
    "plain from distilled": (lambda: vit(name=DISTILLED), vit, "", r"dist_token|head_dist\..*"),
    "lape from default": (vit, lambda: vit("learnable", "lape"), NORMS, ""),
    "default from lape": (lambda: vit("learnable", "lape"), vit, "", NORMS),
    "shared from lape": (lambda: vit("learnable", "lape"), lambda: vit("learnable", "shared"), "", NORMS),
    "other lape": (lambda: vit("learnable", "lape"), lambda: vit("learnable", "lape_sharing"), "", ""),
    "peg beside": (vit, lambda: vit("peg+learnable"), PEG, ""),
    "peg left": (lambda: vit("peg+learnable"), vit, "", PEG),
    "peg of another kernel": (lambda: vit("peg+learnable"), lambda: vit("peg(kernel=7)+learnable"), PEG, PEG),
    "norm of a bias": (
        *(lambda: vit("relative_bias"), lambda: vit("relative_bias", "lape")),
        *(r"position\..*\.norm\..*", ""),
    ),
    "formula from a table": (vit, lambda: vit("sinusoidal_2d"), TABLE, TABLE),
    "table from a formula": (lambda: vit("sinusoidal_1d"), vit, "", ""),
    "no class token": (vit, lambda: vit(global_pool="avg", class_token=False), r"fc_norm.*", r"cls_token|norm\..*"),
    "class token": (lambda: vit(global_pool="avg", class_token=False), vit, r"cls_token|norm\..*", r"fc_norm.*"),
    "no class token of a pyramid": (lambda: small("PVT"), lambda: small("PVT", global_pool="avg"), "", "cls_token"),
    "class token of a pyramid": (lambda: small("PVT", global_pool="avg"), lambda: small("PVT"), "cls_token", ""),
    "no registers": (lambda: vit(reg_tokens=3), vit, "", "reg_token"),
    "deeper": (lambda: vit("learnable", "lape"), lambda: vit("learnable", "lape", depth=5), r".*\.[34]\..*", ""),
    "more tables": (
        *(lambda depth=depth: vit("learnable", "unshared", depth=depth) for depth in (3, 5)),
        *(r".*\.[34]\..*", ""),
    ),
    "less deep": (lambda: vit("learnable", "lape"), lambda: vit("learnable", "lape", depth=2), "", r".*\.2\..*"),
    "module of which the weight does not fit": (vit, lambda: vit(mlp_ratio=2.0), r".*\.mlp\..*", r".*\.mlp\..*"),
    "no biases": (lambda: vit(qkv_bias=False), vit, r".*\.qkv\.bias", ""),
    "kernels that overlap": (lambda: small("CCT"), lambda: small("CCT", patch_size=5), *[r"patch_embed\..*"] * 2),
}  # fmt: skip


@in_turn("name", CASES)
def test_tensors_that_do_not_fit_are_new_and_unused(name):
    build, build_model, new, unused = CASES[name]
    state, model = build().state_dict(), build_model()
    report = report_of(model, state)
    assert with_status(report, "new") == {key for key in model.state_dict() if re.fullmatch(new, key)}
    assert with_status(report, "unused") == {key for key in state if re.fullmatch(unused, key)}


def test_details_state_sizes_and_reasons():
    cases = [
        (vit(img_size=48), vit(img_size=(24, 40)), TABLE, "6x6 -> 3x5"),
        (vit(), vit(name=DISTILLED), TABLE, "dist_token new"),
        (vit(), vit(patch_size=4, in_chans=1), "patch_embed.proj.weight", "3 -> 1 channels, 8x8 -> 4x4 pixels"),
        (vit(), vit("sinusoidal_2d"), TABLE, "given by its formula"),
        (vit(), vit("learnable", "unshared"), "position.encodings.1.pos_embed", f"from {TABLE}"),
        (vit(), vit(num_classes=7), "head.bias", "5 -> 7 classes"),
        (vit(), vit(mlp_ratio=2.0), "blocks.0.mlp.fc2.bias", "as the rest of its module"),
        (vit(), vit("learnable", "lape"), "position.joining.norms.0.weight", "not in the checkpoint"),
        (small("CCT"), small("CCT", patch_size=5), "patch_embed.layers.0.conv.weight", "shape"),
    ]
    for first, model, name, detail in cases:
        report = transfer(model, first.state_dict())
        rows = {row.name: row.detail for row in report.rows if row.status != "unused"}
        name = name if name in rows else next(key for key in rows if key.startswith("patch_embed"))
        assert detail in rows[name], (name, rows[name])


@every_family
def test_another_class_count_changes_nothing_but_the_classifier(family):
    first, model = small(family), small(family, num_classes=7)
    report = report_of(model, first.state_dict())
    heads = {name for name in model.state_dict() if name.startswith("head")}
    assert with_status(report, "new") == heads == with_status(report, "unused")
    x = images_for(model)
    assert torch.equal(model.forward_features(x), first.forward_features(x))


def test_a_classifier_of_as_many_classes_is_left_new_if_asked():
    first, model = vit(), vit()
    report = report_of(model, first.state_dict(), classifier=False)
    assert with_status(report, "new") == {"head.weight", "head.bias"} == with_status(report, "unused")
    assert not torch.equal(model.head.weight, first.head.weight)


# Tables of another joining, and their rows of prefix tokens


def test_lape_from_default_normalises_the_table_of_the_checkpoint():
    first, model = vit(), tiny("learnable", "lape").eval()
    report_of(model, first.state_dict())
    table = first.position.encodings[0].pos_embed[0]
    for position in model.position(model.grid):
        table = F.layer_norm(table, table.shape[-1:], eps=1e-6)  # gamma 1, beta 0
        torch.testing.assert_close(position.after_norm, table)


@in_turn("size", [32, (24, 40)])
@in_turn("published", [False, True])
def test_tables_per_layer_that_start_from_a_shared_one_compute_the_same(size, published, tmp_path):
    first = vit("learnable", "shared")
    model = vit("learnable", "unshared", img_size=size)
    report = report_of(model, save(first, tmp_path, published))
    assert len(with_status(report, "copied")) == DEPTH - 1
    assert len({encoding.pos_embed.data_ptr() for encoding in model.position.encodings}) == DEPTH
    x = images(*model.img_size)
    assert_same(model(x), first(x), atol=1e-5)


@in_turn("joining", ["default", "shared", "lape"])
@in_turn("published", [False, True])
def test_of_tables_of_their_own_the_first_is_taken(joining, published, tmp_path):
    first, model = vit("learnable", "unshared"), vit("learnable", joining)
    report = report_of(model, save(first, tmp_path, published))
    assert torch.equal(model.position.encodings[0].pos_embed, first.position.encodings[0].pos_embed)
    assert len(with_status(report, "unused")) == DEPTH - 1


def test_in_a_pyramid_every_stage_copies_its_own_table(tmp_path):
    first, model = (small("PVT", joining=joining) for joining in ("shared", "unshared"))
    x = images_for(model)
    for published in (False, True):
        report_of(draw(model), save(first, tmp_path, published))
        assert_same(model(x), first(x), atol=1e-5)


def test_a_table_of_a_formula_is_known_again_in_half_precision_and_can_be_learned():
    first, model = vit("sinusoidal_2d", "lape"), vit("sinusoidal_2d", "lape")
    state = {name: value.bfloat16() for name, value in first.state_dict().items()}
    assert set(report_of(model, state).totals) == {"loaded"}
    first, model, x = vit("sinusoidal_1d"), vit(), images()
    assert set(report_of(model, first.state_dict()).totals) == {"loaded"}
    assert torch.equal(model(x), first(x)) and model.position.encodings[0].pos_embed.requires_grad


#: Options of the model of the checkpoint and of the model, and its table from both tables.
POOLED = {"global_pool": "avg", "class_token": False}
ROWS = [
    ({}, POOLED, lambda old, new: old[1:]),
    ({}, {**POOLED, "img_size": 48}, lambda old, new: Grid(4, 4).resize(old[1:], Grid(6, 6))),
    (POOLED, {}, lambda old, new: torch.cat([new[:1], old])),
    ({}, {"name": DISTILLED}, lambda old, new: torch.cat([old[:1], new[1:2], old[1:]])),
    ({"name": DISTILLED}, {}, lambda old, new: torch.cat([old[:1], old[2:]])),
    ({"reg_tokens": 3}, {}, lambda old, new: torch.cat([old[:1], old[4:]])),
    (
        {"reg_tokens": 3},
        {"reg_tokens": 3, "img_size": 48},
        lambda old, new: Grid(4, 4, prefix=4).resize(old, Grid(6, 6, prefix=4)),
    ),
]


@in_turn(("there", "here", "expected"), ROWS)
def test_rows_of_prefix_tokens_are_those_of_the_same_tokens(there, here, expected):
    first, model = vit(**there), vit(**here)
    old, new = (other.position.encodings[0].pos_embed[0].clone() for other in (first, model))
    report_of(model, first.state_dict())
    assert torch.equal(model.position.encodings[0].pos_embed[0], expected(old, new))


def test_a_token_to_which_timm_gives_no_position_has_a_row_of_zeros():
    original = draw(timm.create_model("deit_tiny_patch16_224", no_embed_class=True, **SIZE)).eval()
    model, x = vit(), images()
    assert not with_status(report_of(model, original.state_dict()), "new")
    assert_same(model(x), original(x), atol=1e-5)


# Other channels and patches


@in_turn("family", ["ViT, DeiT", "ViT-Lite", "CCT", "CeiT", "PVT", "Swin", "PosMLP"])
def test_a_gray_image_looks_to_one_channel_as_it_looked_to_three(family):
    first, model = small(family, in_chans=3).double(), small(family, in_chans=1).double()
    report = report_of(model, first.state_dict())
    assert len(with_status(report, "adapted")) == 1 and not with_status(report, "new", "unused")
    x = images_for(model)
    assert_same(model(x), first(x.expand(-1, 3, -1, -1)), atol=1e-10)


@in_turn(("before", "channels"), [*((3, channels) for channels in (1, 2, 3, 4, 6, 7)), (1, 3)])
def test_any_number_of_channels_sees_the_same_in_a_gray_image_and_is_timms(before, channels):
    first, model = vit(in_chans=before).double(), vit(in_chans=channels).double()
    report_of(model, first.state_dict())
    x = images(dtype=torch.float64)[:, :1]
    if before == 3:
        expected = adapt_input_conv(channels, first.patch_embed.proj.weight.detach().clone())
        assert_same(model.patch_embed.proj.weight.detach(), expected, atol=1e-6)
    if channels in (1, 3, 6):
        assert_same(model(x.expand(-1, channels, -1, -1)), first(x.expand(-1, before, -1, -1)), atol=1e-10)


# Published checkpoints, and the printed table


def test_a_checkpoint_of_timm_is_transferred_to_another_size_class_count_and_joining(tmp_path):
    original = timm.create_model("deit_tiny_patch16_224")
    torch.save({"model": original.state_dict()}, tmp_path / "deit.pth")
    model = graticule.create_model("deit_tiny_patch16_224", img_size=288, num_classes=10, joining="lape")
    report = transfer(model, tmp_path / "deit.pth")
    expected = Grid(14, 14, prefix=1).resize(original.pos_embed.detach()[0], Grid(18, 18, prefix=1))
    assert torch.equal(model.position.encodings[0].pos_embed[0], expected)
    assert [" ".join(line.split()) for line in str(report).splitlines()] == [
        "cls_token loaded 192",
        "patch_embed loaded 147,648",
        "position.encodings resized 62,400 14x14 -> 18x18",
        "position.joining new 4,608 not in the checkpoint",
        "blocks.0-11 loaded 5,338,368",
        "norm loaded 384",
        "head new 1,930 1,000 -> 10 classes",
        "head unused 193,000",
        "values: 5,486,592 loaded, 62,400 resized, 6,538 new, 193,000 unused",
    ]


def test_a_checkpoint_of_timms_swin_is_transferred_to_another_window():
    name, sizes = SMALL["Swin"]
    original = draw(timm.create_model(name, **sizes, num_classes=7, patch_size=4, always_partition=True))
    report = report_of(small("Swin", patch_size=4, window_size=2), original.state_dict())
    assert with_status(report, "new") == {"head.weight", "head.bias"}
    assert len(with_status(report, "resized")) == 4
    assert with_status(report, "unused") == {"head.fc.weight", "head.fc.bias"}


def test_names_that_start_other_names_and_names_of_any_form_have_a_line():
    state = dict(vit().state_dict())
    odd = {name: torch.zeros(2) for name in ("head", "blocks", "blocks.0", "", ".", "a..b", "a.", "7", "9.1", "10.1")}
    report = report_of(vit(), {**state, **odd})
    assert report.totals["unused"] == sum(row.values for row in report.table() if row.status == "unused") == 20
    assert str(report).count("unused") > 5


# Refusals

REFUSED = [
    (vit, dict, "must map names to tensors"),
    (vit, lambda: {"model": {}}, "must map names to tensors"),
    (vit, lambda: {"epoch": 3}, "must map names to tensors"),
    (vit, lambda: 3, "`source` must be a string or Path or Mapping"),
    (vit, lambda: {"head.weight": torch.zeros(5, 24)}, "no weight of its blocks does; it has none of them"),
    (vit, vit(embed_dim=48).state_dict, r"attn.qkv.weight is \(144, 48\) where the model has \(72, 24\)"),
    (lambda: fold(vit()), vit().state_dict, r"`model` must not be folded.*graticule.unfold\(model\)"),
]


@in_turn(("build", "source", "message"), REFUSED)
def test_what_cannot_be_transferred_is_refused_and_the_model_is_unchanged(build, source, message):
    model = build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((ValueError, TypeError), match=message):
        transfer(model, source())
    assert_same(model.state_dict(), before, atol=0)
