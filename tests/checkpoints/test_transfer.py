"""Transfer from the checkpoint of another model: fitting tensors are loaded, and all reported, or nothing changes."""

import functools

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from timm.models._manipulate import adapt_input_conv

import graticule
from graticule import Grid, fold, load_checkpoint, transfer, unfold
from graticule.checkpoints.transfer import Transferred
from in_turn import case, in_turn
from tiny import COVER, DEPTH, SIZE, draw, holds, images, tiny

#: Small models of every family, by their arguments; images of 32 pixels, 64 for pyramids.
FAMILIES = {
    "vit": ("vit_tiny_patch16_224", SIZE),
    "distilled": ("deit_tiny_distilled_patch16_224", SIZE),
    "cpvt": ("cpvt_tiny_gap_patch16_224", SIZE),
    "vit_lite": ("vit_lite_2_4_32", {"embed_dim": 24, "num_heads": 3, "num_classes": 5}),
    "cvt": ("cvt_2_4_32", {"embed_dim": 24, "num_heads": 3, "num_classes": 5}),
    "cct": ("cct_2_3x2_32", {"embed_dim": 24, "num_heads": 3, "num_classes": 5}),
    "ceit": ("ceit_tiny_patch16_224", {**SIZE, "patch_size": 4, "img_size": 64}),
    "t2t": ("t2t_vit_7", {"img_size": 64, "embed_dim": 24, "num_heads": 3, "depth": 2, "num_classes": 5}),
    "pvt": (
        "pvt_tiny",
        {
            "img_size": 64,
            "embed_dims": (8, 16, 24, 32),
            "num_heads": (1, 2, 3, 4),
            "depths": (1, 2, 1, 1),
            "sr_ratios": (4, 2, 1, 1),
            "num_classes": 5,
        },
    ),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {
            "img_size": 64,
            "window_size": 4,
            "embed_dim": 8,
            "depths": (2, 2),
            "num_heads": (2, 4),
            "num_classes": 5,
        },
    ),
    "gmlp": ("gmlp_nano_patch4_28", {"num_blocks": 2, "num_classes": 5}),
    "posmlp": (
        "posmlp_tiny_224",
        {
            "img_size": 64,
            "embed_dim": 16,
            "depths": (2, 1, 2, 1),
            "windows": (4, 4, 4, 2),
            "groups": (2, 4, 4, 8),
            "num_classes": 5,
        },
    ),
}
families = pytest.mark.parametrize("family", FAMILIES)


def small(family, **kwargs):
    """Return a small model of a family with every parameter drawn, in evaluation mode."""
    name, sizes = FAMILIES[family]
    return draw(graticule.create_model(name, **{**sizes, **kwargs})).eval()


def drawn(*args, **kwargs):
    return draw(tiny(*args, **kwargs)).eval()


def saved(model, folder, published=False):
    """Save the weights of a model; returns the path."""
    path = folder / "model.safetensors"
    state = graticule.published_state_dict(model) if published else model.state_dict()
    save_file({name: value.contiguous() for name, value in state.items()}, path)
    return path


def copy_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_unchanged(model, before):
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def status_of(found):
    return {row.name: row.status for row in found.rows if row.status != "unused"}


def with_status(found, *statuses):
    return {row.name for row in found.rows if row.status in statuses}


def assert_complete(found, model, before, keys):
    """Check that each tensor is reported once, each key is used or unused once, and new tensors are unchanged."""
    own = model.state_dict()
    rows = [row for row in found.rows if row.status != "unused"]
    assert [row.name for row in rows] == list(own)
    assert all(row.values == own[row.name].numel() for row in rows)
    used, unused = {row.source for row in rows} - {""}, [row.name for row in found.rows if row.status == "unused"]
    assert len(unused) == len(set(unused))
    assert used | set(unused) == set(keys)
    assert not used & set(unused)
    for row in rows:
        assert (row.status == "new") == (row.source == "")
        assert (row.status == "loaded") == (row.detail == "")
        assert row.status in ("loaded", "resized", "adapted", "copied", "new")
        if row.status == "new":
            assert torch.equal(own[row.name], before[row.name])
    assert sum(row.values for row in found.table()) == sum(row.values for row in found.rows)
    assert found.totals == {
        status: sum(row.values for row in found.table() if row.status == status) for status in found.totals
    }
    assert sum(n for status, n in found.totals.items() if status != "unused") == sum(v.numel() for v in own.values())


def reported(model, source, **kwargs):
    """Transfer, and check that the report is complete."""
    before = copy_of(model)
    found = transfer(model, source, **kwargs)
    state = source if isinstance(source, dict) else load(source)
    assert_complete(found, model, before, state)
    return found


def load(path):
    return graticule.checkpoints.read_checkpoint(path)


# The same model


@families
def test_from_its_own_checkpoint_a_model_has_everything_bit_for_bit(family, tmp_path):
    first, model = small(family), small(family)
    for published in (False, True):
        with case("published names" if published else "its own names"):
            found = reported(draw(model), saved(first, tmp_path, published))
            assert with_status(found, "loaded") == set(model.state_dict())
            assert set(found.totals) == {"loaded"}
            assert_unchanged(model, first.state_dict())


SOURCES = [
    *[("learnable", joining) for joining in ("default", "unshared", "lape")],
    ("sinusoidal_1d", "shared"),
    ("relative_bias", "lape"),
    ("learnable+relative_bias", "default"),
    ("peg+learnable", "lape"),
]


@functools.cache
def trained(encoding, joining):
    return drawn(encoding, joining).state_dict()


@in_turn(("encoding", "joining"), COVER)
def test_common_tensors_are_loaded_between_any_two_encodings_and_joinings(encoding, joining):
    first, model = drawn(encoding, joining), drawn(encoding, joining)
    start = copy_of(model)
    assert set(reported(model, first.state_dict()).totals) == {"loaded"}
    x = images(24, 40)
    assert torch.equal(model(x), first(x))
    outside = {name for name in start if not name.startswith("position.")}
    for other in SOURCES:
        model.load_state_dict(start)
        state = trained(*other)
        found = reported(model, state)
        assert outside <= with_status(found, "loaded")
        assert holds(model, {name: state[name] for name in outside})
        if "learnable" in encoding and "learnable" in other[0]:
            tables = {name for name in start if name.endswith("pos_embed")}
            assert tables <= with_status(found, "loaded", "copied")
        # a shared bias has a table of the same name
        alone = "relative_bias" in encoding.split("+") and "shared_relative_bias" not in encoding
        if alone and "relative_bias" in other[0].split("+"):
            tables = {name for name in start if name.endswith("relative_position_bias_table")}
            assert tables <= with_status(found, "loaded")
    assert model(images()).isfinite().all()


def test_the_checkpoint_is_unchanged():
    first = drawn()
    state = dict(first.state_dict())
    before = copy_of(first)
    transfer(drawn("learnable", "unshared", img_size=48, in_chans=1), state)
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], value) for name, value in before.items())


def test_a_transfer_keeps_dtype_and_requires_grad():
    model = tiny().bfloat16()
    model.patch_embed.requires_grad_(False)
    transfer(model, drawn(img_size=48, in_chans=1).state_dict())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.patch_embed.proj.weight.requires_grad
    assert model.head.weight.requires_grad
    assert not any(parameter.grad_fn for parameter in model.parameters())


def test_an_own_encoding_without_a_table_is_transferred(my_methods):
    first, model = (graticule.create_model("convolutional_vit", encoding="random_fourier") for _ in range(2))
    assert set(reported(model, first.state_dict()).totals) == {"loaded"}
    assert_unchanged(model, first.state_dict())


# Another size


@in_turn(("encoding", "joining"), COVER)
def test_a_transfer_to_another_image_size_equals_loading(encoding, joining, tmp_path):
    formula = "sinusoidal" in encoding  # which the loader ignores only under published names
    path = saved(drawn(encoding, joining), tmp_path, published=formula)
    for size in (48, (24, 40)):
        with case(size):
            model, expected = drawn(encoding, joining, img_size=size), drawn(encoding, joining, img_size=size)
            load_checkpoint(expected, path)
            found = reported(model, path)
            assert all(formula and name.endswith("pos_embed") for name in with_status(found, "new"))
            assert_unchanged(model, expected.state_dict())


PYRAMIDS = {
    "pvt": ("pvt", {}, {"img_size": 96}),
    "pvt, lape": ("pvt", {"joining": "lape"}, {"img_size": 96}),
    "pvt, peg beside": ("pvt", {"encoding": "peg+learnable"}, {"img_size": 96}),
    "swin, window": ("swin", {}, {"window_size": 8}),
    "swin, size": ("swin", {}, {"img_size": 96}),
    "swin, table beside": ("swin", {"encoding": "learnable+relative_bias"}, {"img_size": 96, "window_size": 3}),
    "posmlp, size": ("posmlp", {}, {"img_size": 96}),
    "posmlp, windows": ("posmlp", {}, {"windows": (8, 8, 4, 2)}),
    "posmlp, table of displacements": ("posmlp", {"encoding": "lrpe"}, {"windows": (8, 8, 4, 2)}),
    "posmlp, dense": ("posmlp", {"encoding": "sgu"}, {"windows": (8, 8, 4, 2)}),
    "gmlp": ("gmlp", {}, {"img_size": 40}),
    "vit_lite": ("vit_lite", {}, {"img_size": 48}),
    "cct": ("cct", {"encoding": "learnable"}, {"img_size": 64}),
}


@in_turn("change", PYRAMIDS)
def test_a_transfer_to_another_size_or_window_of_other_families_equals_loading(change, tmp_path):
    family, both, other = PYRAMIDS[change]
    first, model, expected = small(family, **both), small(family, **both, **other), small(family, **both, **other)
    for published in (False, True):
        with case("published names" if published else "its own names"):
            path = saved(first, tmp_path, published)
            load_checkpoint(draw(expected), path)
            assert not with_status(reported(draw(model), path), "new")
            assert_unchanged(model, expected.state_dict())


def test_resized_tensors_state_both_sizes():
    found = transfer(drawn(img_size=(24, 40)), drawn(img_size=48).state_dict())
    (row,) = [row for row in found.rows if row.status == "resized"]
    assert (row.name, row.detail) == ("position.encodings.0.pos_embed", "6x6 -> 3x5")
    found = transfer(small("swin", window_size=8), small("swin").state_dict())
    details = {row.detail for row in found.rows if row.status == "resized"}
    assert details == {"(49, 2) -> (225, 2)", "(49, 4) -> (225, 4)"}


# Another classifier


@families
def test_another_class_count_changes_nothing_but_the_classifier(family):
    first, model = small(family), small(family, num_classes=7)
    found = reported(model, first.state_dict())
    heads = {name for name in model.state_dict() if name.startswith("head")}
    assert with_status(found, "new") == heads == with_status(found, "unused")
    assert {row.detail for row in found.rows if row.status == "new"} == {"5 -> 7 classes"}
    side = 28 if family == "gmlp" else 64 if max(FAMILIES[family][1].get("img_size", 32), 32) == 64 else 32
    x = images(side, side)[:, : model.in_chans]
    assert torch.equal(model.forward_features(x), first.forward_features(x))


def test_a_classifier_of_as_many_classes_is_left_new_if_asked():
    first, model = drawn(), drawn()
    found = reported(model, first.state_dict(), classifier=False)
    assert with_status(found, "new") == {"head.weight", "head.bias"} == with_status(found, "unused")
    assert not torch.equal(model.head.weight, first.head.weight)


def test_a_model_without_a_classifier_leaves_that_of_the_checkpoint_unused():
    found = reported(drawn(num_classes=0), drawn().state_dict())
    assert with_status(found, "unused") == {"head.weight", "head.bias"}
    assert not with_status(found, "new")


def test_a_distilled_model_from_a_plain_one_has_its_second_token_and_head_new():
    first, model = drawn(), drawn(name="deit_tiny_distilled_patch16_224")
    own = copy_of(model)
    found = reported(model, first.state_dict())
    assert with_status(found, "new") == {"dist_token", "head_dist.weight", "head_dist.bias"}
    table = model.position.encodings[0].pos_embed[0]
    before = first.position.encodings[0].pos_embed[0]
    assert torch.equal(table[:1], before[:1])
    assert torch.equal(table[2:], before[1:])
    assert torch.equal(table[1], own["position.encodings.0.pos_embed"][0, 1])
    assert "dist_token new" in str(found)


def test_a_plain_model_from_a_distilled_one_leaves_the_second_token_and_head_out():
    first, model = drawn(name="deit_tiny_distilled_patch16_224"), drawn()
    found = reported(model, first.state_dict())
    assert not with_status(found, "new")
    assert with_status(found, "unused") == {"dist_token", "head_dist.weight", "head_dist.bias"}
    before = first.position.encodings[0].pos_embed[0]
    assert torch.equal(model.position.encodings[0].pos_embed[0], torch.cat([before[:1], before[2:]]))


# Another joining or encoding


def test_lape_from_default_normalises_the_table_of_the_checkpoint():
    first, model = drawn(), tiny("learnable", "lape").eval()
    found = reported(model, first.state_dict())
    assert {row.detail for row in found.rows if row.status == "new"} == {"not in the checkpoint"}
    assert with_status(found, "new") == {name for name in model.state_dict() if ".norms." in name}
    w = first.position.encodings[0].pos_embed[0]
    for given in model.position(model.grid):
        w = F.layer_norm(w, w.shape[-1:], eps=1e-6)  # gamma 1, beta 0
        torch.testing.assert_close(given.inner, w)


@pytest.mark.parametrize("joining", ["default", "shared", "lape_sharing"])
def test_from_lape_the_table_is_loaded_and_only_norms_are_unused(joining):
    first, model = drawn("learnable", "lape"), drawn("learnable", joining)
    found = reported(model, first.state_dict())
    assert torch.equal(model.position.encodings[0].pos_embed, first.position.encodings[0].pos_embed)
    assert not with_status(found, "new")
    assert all(".norms." in name for name in with_status(found, "unused"))
    assert bool(with_status(found, "unused")) == (joining != "lape_sharing")


@pytest.mark.parametrize("size", [32, (24, 40)])
@pytest.mark.parametrize("published", [False, True])
def test_tables_per_layer_that_start_from_a_shared_one_compute_the_same(size, published, tmp_path):
    first = drawn("learnable", "shared")
    model = drawn("learnable", "unshared", img_size=size)
    found = reported(model, saved(first, tmp_path, published))
    assert len(with_status(found, "copied")) == DEPTH - 1
    x = images(*model.img_size)
    torch.testing.assert_close(model(x), first(x), rtol=0, atol=1e-5)


def test_every_table_starts_as_a_copy_of_the_one_of_the_default_joining():
    first, model = drawn(), drawn("learnable", "unshared")
    reported(model, first.state_dict())
    for encoding in model.position.encodings:
        assert torch.equal(encoding.pos_embed, first.position.encodings[0].pos_embed)
    tables = [encoding.pos_embed for encoding in model.position.encodings]
    assert len({table.data_ptr() for table in tables}) == DEPTH


@in_turn("joining", ["default", "shared", "lape"])
@in_turn("published", [False, True])
def test_of_tables_of_their_own_the_first_is_taken(joining, published, tmp_path):
    first, model = drawn("learnable", "unshared"), drawn("learnable", joining)
    found = reported(model, saved(first, tmp_path, published))
    assert torch.equal(model.position.encodings[0].pos_embed, first.position.encodings[0].pos_embed)
    assert len(with_status(found, "unused")) == DEPTH - 1


def test_in_a_pyramid_every_stage_copies_its_own_table(tmp_path):
    first = small("pvt", depths=(2, 2, 2, 2), joining="shared")
    model = small("pvt", depths=(2, 2, 2, 2), joining="unshared")
    x = images(64, 64)
    for published in (False, True):
        draw(model)
        reported(model, saved(first, tmp_path, published))
        torch.testing.assert_close(model(x), first(x), rtol=0, atol=1e-5)


def test_a_peg_beside_the_table_is_new():
    first, model = drawn(), drawn("peg+learnable")
    found = reported(model, first.state_dict())
    new = with_status(found, "new")
    assert new == {name for name in model.state_dict() if "pegs" in name} != set()
    assert torch.equal(model.position.parts[1].encodings[0].pos_embed, first.position.encodings[0].pos_embed)
    again = drawn()
    assert with_status(reported(again, model.state_dict()), "unused") == new
    assert torch.equal(again.position.encodings[0].pos_embed, first.position.encodings[0].pos_embed)


def test_a_relative_bias_keeps_its_tables_where_a_norm_follows():
    first, model = drawn("relative_bias"), drawn("relative_bias", "lape")
    found = reported(model, first.state_dict())
    assert with_status(found, "new") == {name for name in model.state_dict() if ".norm." in name and "position" in name}
    table = model.position.encodings[1].bias.relative_position_bias_table
    assert torch.equal(table, first.position.encodings[1].relative_position_bias_table)
    assert not with_status(reported(first, model.state_dict()), "new")


@pytest.mark.parametrize("joining", ["default", "lape"])
def test_a_formula_stays_where_the_checkpoint_learned_its_table(joining):
    first, model = drawn("learnable", joining), drawn("sinusoidal_2d", joining)
    before = model.position.encodings[0].pos_embed.clone()
    found = reported(model, first.state_dict())
    assert torch.equal(model.position.encodings[0].pos_embed, before)
    (row,) = [row for row in found.rows if row.status == "new"]
    assert row.detail == "given by its formula"
    assert with_status(found, "unused") == {"position.encodings.0.pos_embed"}


def test_a_learnable_table_starts_from_the_values_of_a_formula():
    first, model = drawn("sinusoidal_1d"), drawn()
    assert set(reported(model, first.state_dict()).totals) == {"loaded"}
    x = images()
    assert torch.equal(model(x), first(x))
    assert model.position.encodings[0].pos_embed.requires_grad


def test_a_table_of_a_formula_that_was_saved_in_half_precision_is_known_again():
    first, model = drawn("sinusoidal_2d", "lape"), drawn("sinusoidal_2d", "lape")
    state = {name: value.bfloat16() for name, value in first.state_dict().items()}
    assert set(reported(model, state).totals) == {"loaded"}


@pytest.mark.parametrize("size", [32, 48])
def test_without_a_class_token_its_row_is_left_out(size):
    first, model = drawn(), drawn(global_pool="avg", class_token=False, img_size=size)
    found = reported(model, first.state_dict())
    patches = first.position.encodings[0].pos_embed[0, 1:]
    side = size // 8
    assert torch.equal(model.position.encodings[0].pos_embed[0], Grid(4, 4).resize(patches, Grid(side, side)))
    assert with_status(found, "new") == {"fc_norm.weight", "fc_norm.bias"}
    assert with_status(found, "unused") == {"cls_token", "norm.weight", "norm.bias"}


def test_with_a_class_token_more_its_row_is_new():
    first, model = drawn(global_pool="avg", class_token=False), drawn()
    own = model.position.encodings[0].pos_embed[0, 0].clone()
    found = reported(model, first.state_dict())
    table = model.position.encodings[0].pos_embed[0]
    assert torch.equal(table[1:], first.position.encodings[0].pos_embed[0])
    assert torch.equal(table[0], own)
    assert with_status(found, "new") == {"cls_token", "norm.weight", "norm.bias"}


def test_the_class_token_of_a_pyramid_has_a_row_in_the_last_stage_alone():
    first, model = small("pvt"), small("pvt", global_pool="avg")
    found = reported(model, first.state_dict())
    assert with_status(found, "resized") == {"position.stages.3.encodings.0.pos_embed"}
    assert with_status(found, "unused") == {"cls_token"}
    assert with_status(reported(small("pvt"), model.state_dict()), "new") == {"cls_token"}


def test_registers_are_matched_with_their_rows():
    first, model = drawn(reg_tokens=3), drawn(reg_tokens=3, img_size=48)
    reported(model, first.state_dict())
    before, table = first.position.encodings[0].pos_embed[0], model.position.encodings[0].pos_embed[0]
    assert torch.equal(table, Grid(4, 4, prefix=4).resize(before, Grid(6, 6, prefix=4)))
    found = reported(plain := drawn(), first.state_dict())
    assert torch.equal(plain.position.encodings[0].pos_embed[0], torch.cat([before[:1], before[4:]]))
    assert with_status(found, "unused") == {"reg_token"}


def test_a_token_to_which_timm_gives_no_position_has_a_row_of_zeros():
    theirs = draw(timm.create_model("deit_tiny_patch16_224", no_embed_class=True, **SIZE)).eval()
    model = drawn()
    assert not with_status(reported(model, theirs.state_dict()), "new")
    x = images()
    torch.testing.assert_close(model(x), theirs(x), rtol=0, atol=1e-5)


# Another image, patch or depth


@in_turn("family", ["vit", "vit_lite", "cct", "ceit", "pvt", "swin", "posmlp"])
def test_a_gray_image_looks_to_one_channel_as_it_looked_to_three(family):
    first = small(family, in_chans=3).double()
    model = small(family, in_chans=1).double()
    found = reported(model, first.state_dict())
    assert len(with_status(found, "adapted")) == 1
    assert not with_status(found, "new", "unused")
    side = 32 if family in ("vit", "vit_lite", "cct") else 64
    x = images(side, side, dtype=torch.float64)[:, :1]
    torch.testing.assert_close(model(x), first(x.expand(-1, 3, -1, -1)), rtol=0, atol=1e-10)


@in_turn("channels", [1, 2, 3, 4, 6, 7])
def test_any_number_of_channels_sees_the_same_in_a_gray_image_and_is_timms(channels):
    first, model = drawn().double(), drawn(in_chans=channels).double()
    reported(model, first.state_dict())
    x = images(dtype=torch.float64)[:, :1]
    weight = first.patch_embed.proj.weight
    expected = adapt_input_conv(channels, weight.detach().clone())
    torch.testing.assert_close(model.patch_embed.proj.weight.detach(), expected, rtol=0, atol=1e-6)
    if channels in (1, 3, 6):
        a, b = model(x.expand(-1, channels, -1, -1)), first(x.expand(-1, 3, -1, -1))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_three_channels_from_one_are_a_third_each():
    first, model = drawn(in_chans=1).double(), drawn().double()
    reported(model, first.state_dict())
    x = images(dtype=torch.float64)[:, :1]
    torch.testing.assert_close(model(x.expand(-1, 3, -1, -1)), first(x), rtol=0, atol=1e-10)


def test_a_resampled_patch_embedding_computes_the_same_for_an_enlarged_patch():
    first, model = drawn().double(), drawn(patch_size=16, img_size=64).double()
    found = reported(model, first.state_dict())
    (row,) = [row for row in found.rows if row.status == "resized"]
    assert (row.name, row.detail) == ("patch_embed.proj.weight", "8x8 -> 16x16 pixels")
    x = images(dtype=torch.float64)
    patches = F.unfold(x, 8, stride=8).transpose(1, 2).reshape(-1, 3, 8, 8)
    larger = F.interpolate(patches, size=(16, 16), mode="bicubic", antialias=True)
    y = F.fold(larger.reshape(2, 16, -1).transpose(1, 2), (64, 64), 16, stride=16)
    torch.testing.assert_close(model(y), first(x), rtol=0, atol=1e-4)


def test_patch_and_channels_at_once():
    found = reported(drawn(patch_size=4, in_chans=1), drawn().state_dict())
    (row,) = [row for row in found.rows if row.status == "adapted"]
    assert row.detail == "3 -> 1 channels, 8x8 -> 4x4 pixels"
    (row,) = [row for row in found.rows if row.status == "resized"]
    assert row.detail == "4x4 -> 8x8"


@pytest.mark.parametrize("padding", [0, 1])
def test_kernels_that_overlap_are_not_taken_for_patches(padding):
    first, model = small("cct", conv_padding=padding), small("cct", conv_padding=padding, patch_size=5)
    found = reported(model, first.state_dict())
    kernels = {name for name in model.state_dict() if name.startswith("patch_embed")}
    assert with_status(found, "new") == kernels
    assert all("shape" in row.detail for row in found.rows if row.status == "new")


@pytest.mark.parametrize("joining", ["lape", "unshared"])
def test_of_a_deeper_checkpoint_the_first_layers_are_taken(joining):
    first, model = drawn("learnable", joining), drawn("learnable", joining, depth=2)
    found = reported(model, first.state_dict())
    assert not with_status(found, "new", "copied")
    assert all(".2." in name for name in with_status(found, "unused"))


@pytest.mark.parametrize("joining", ["lape", "unshared"])
def test_layers_beyond_those_of_the_checkpoint_are_new(joining):
    first, model = drawn("learnable", joining), drawn("learnable", joining, depth=5)
    new = with_status(reported(model, first.state_dict()), "new")
    assert new == {name for name in model.state_dict() if ".3." in name or ".4." in name}


def test_a_module_of_which_the_weight_does_not_fit_is_new_as_a_whole():
    found = reported(drawn(mlp_ratio=2.0), drawn().state_dict())
    new = with_status(found, "new")
    assert new == {f"blocks.{i}.mlp.fc{n}.{what}" for i in range(3) for n in (1, 2) for what in ("weight", "bias")}
    assert any("as the rest of its module" in row.detail for row in found.rows if row.name.endswith("fc2.bias"))


def test_a_peg_of_another_kernel_is_new_as_a_whole():
    found = reported(drawn("peg(kernel=7)+learnable"), drawn("peg+learnable").state_dict())
    assert with_status(found, "new") == {f"position.parts.0.pegs.0.proj.0.{what}" for what in ("weight", "bias")}


def test_without_its_biases_the_weights_of_a_checkpoint_are_taken():
    found = reported(drawn(), drawn(qkv_bias=False).state_dict())
    assert with_status(found, "new") == {f"blocks.{i}.attn.qkv.bias" for i in range(3)}


# Published checkpoints


def test_a_checkpoint_of_timm_is_transferred_to_another_size_class_count_and_joining(tmp_path):
    theirs = timm.create_model("deit_tiny_patch16_224")
    torch.save({"model": theirs.state_dict()}, tmp_path / "deit.pth")
    model = graticule.create_model("deit_tiny_patch16_224", img_size=288, num_classes=10, joining="lape")
    before = copy_of(model)
    found = transfer(model, tmp_path / "deit.pth")
    assert_complete(found, model, before, theirs.state_dict())
    expected = Grid(14, 14, prefix=1).resize(theirs.pos_embed.detach()[0], Grid(18, 18, prefix=1))
    assert torch.equal(model.position.encodings[0].pos_embed[0], expected)
    lines = [" ".join(line.split()) for line in str(found).splitlines()]
    assert lines == [
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
    theirs = draw(
        timm.create_model(
            "swin_tiny_patch4_window7_224", **{**FAMILIES["swin"][1], "num_classes": 7}, always_partition=True
        )
    )
    model = small("swin", window_size=8)
    found = reported(model, theirs.state_dict())
    assert with_status(found, "new") == {"head.weight", "head.bias"}
    assert len(with_status(found, "resized")) == 4
    assert with_status(found, "unused") == {"head.fc.weight", "head.fc.bias"}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"model": state, "epoch": 3},
        lambda state: {"state_dict": {f"module.{name}": value for name, value in state.items()}},
    ],
)
def test_a_checkpoint_is_unwrapped(wrap, tmp_path):
    first, model = drawn(), drawn()
    torch.save(wrap(dict(first.state_dict())), tmp_path / "model.pth")
    assert set(transfer(model, str(tmp_path / "model.pth")).totals) == {"loaded"}
    assert_unchanged(model, first.state_dict())


# The table


def test_the_table_groups_rows_of_the_same_status():
    found = transfer(drawn("learnable", "unshared", mlp_ratio=2.0, depth=4), drawn().state_dict())
    assert [(row.name, row.status) for row in found.table()] == [
        ("cls_token", "loaded"),
        ("patch_embed", "loaded"),
        ("position.encodings.0", "loaded"),
        ("position.encodings.1-3", "copied"),
        ("blocks.0-2.norm1", "loaded"),
        ("blocks.0-2.attn", "loaded"),
        ("blocks.0-2.norm2", "loaded"),
        ("blocks.0-2.mlp.fc1.weight", "new"),
        ("blocks.0-2.mlp.fc1.bias", "new"),
        ("blocks.0-2.mlp.fc2.weight", "new"),
        ("blocks.0-2.mlp.fc2.bias", "new"),
        ("blocks.3", "new"),
        ("norm", "loaded"),
        ("head", "loaded"),
        ("blocks.0-2.mlp", "unused"),
    ]


def test_a_line_has_the_values_of_all_that_it_puts_together():
    model = drawn()
    found = transfer(model, drawn().state_dict())
    (blocks,) = [row for row in found.table() if row.name.startswith("blocks")]
    count = sum(parameter.numel() for parameter in model.blocks.parameters())
    assert blocks == Transferred("blocks.0-2", "loaded", "", count)
    assert f"{count:,}" in str(found)


def test_names_that_start_other_names_and_names_of_any_form_have_a_line():
    state = dict(drawn().state_dict())
    odd = {name: torch.zeros(2) for name in ("head", "blocks", "blocks.0", "", ".", "a..b", "a.", "7", "9.1", "10.1")}
    found = reported(drawn(), {**state, **odd})
    assert found.totals["unused"] == sum(row.values for row in found.table() if row.status == "unused") == 20
    assert str(found).count("unused") > 5


# Refusals


def assert_refused(model, source, match, kind=(ValueError, TypeError)):
    before = copy_of(model)
    with pytest.raises(kind, match=match):
        transfer(model, source)
    assert_unchanged(model, before)


def test_a_folded_model_is_refused_and_an_unfolded_one_is_not():
    state = drawn("learnable", "lape").state_dict()
    model = fold(drawn("learnable", "lape"))
    assert_refused(model, state, r"`model` must not be folded.*graticule.unfold\(model\)")
    assert set(transfer(unfold(model), state).totals) == {"loaded"}


def test_another_width_is_refused_with_both_shapes():
    state = drawn(embed_dim=48).state_dict()
    assert_refused(drawn(), state, r"blocks.0.attn.qkv.weight is \(144, 48\) where the model has \(72, 24\)")


@families
def test_the_checkpoint_of_another_family_is_refused(family, tmp_path):
    near = {"vit", "distilled", "cpvt", "vit_lite", "cvt", "cct", "ceit", "t2t"}  # blocks of the same parts
    for other in FAMILIES:
        if other == family or {family, other} <= near:
            continue
        path = saved(small(other), tmp_path)
        assert_refused(small(family), path, "model.safetensors does not fit .* no weight of its blocks does")


@in_turn(
    ("source", "match"),
    [
        ({}, "must map names to tensors"),
        ({"model": {}}, "must map names to tensors"),
        ({"epoch": 3}, "must map names to tensors"),
        (3, "`source` must be a string or Path or Mapping"),
        (None, "`source` must be a string or Path or Mapping"),
        ({"head.weight": torch.zeros(5, 24)}, "no weight of its blocks does; it has none of them"),
    ],
)
def test_a_source_that_is_not_a_checkpoint_is_refused(source, match):
    assert_refused(drawn(), source, match)


STRANGE = [
    torch.tensor(1.0),
    torch.zeros(0),
    torch.zeros(1, 0, 24),
    torch.zeros(17, 0),
    torch.zeros(17, 23),
    torch.zeros(2, 17, 24),
    torch.zeros(1, 6, 24),
    torch.zeros(1, 17, 24, dtype=torch.int8),
    torch.zeros(1, 17, 24, dtype=torch.complex64),
    torch.zeros(17, 24).to_sparse(),
    torch.zeros(1, 17, 24, device="meta"),
]


@pytest.mark.parametrize("encoding", ["learnable", "sinusoidal_2d", "relative_bias"])
def test_a_tensor_of_a_strange_kind_is_left_and_the_rest_is_taken(encoding):
    """No shape, layout or dtype of any tensor breaks the transfer."""
    model = drawn(encoding)
    state = dict(drawn(encoding).state_dict())
    table = next(name for name in state if name.startswith("position."))
    for name in (table, "patch_embed.proj.weight", "cls_token", "head.weight", "blocks.0.norm1.weight"):
        for value in STRANGE:
            with case(f"{name}: {tuple(value.shape)}, {value.dtype}, {value.layout}, {value.device}"):
                found = reported(model, {**state, name: value})
                status = status_of(found)
                assert status[name] == "new"
                assert status["blocks.1.attn.qkv.weight"] == "loaded"


@pytest.mark.parametrize(("encoding", "name"), [("learnable", "encodings.0.pos_embed"), ("relative_bias", "table")])
def test_an_image_of_one_row_takes_a_square_table_as_a_square(encoding, name):
    square = graticule.create_model("vit_nano_patch4_28", encoding=encoding, img_size=28)
    row = graticule.create_model("vit_nano_patch4_28", encoding=encoding, img_size=(4, 28))
    for parameter in square.position.parameters():
        torch.nn.init.normal_(parameter)
    transfer(row, square.state_dict())
    square.set_input_size((4, 28))
    expected = {key: value for key, value in square.state_dict().items() if name in key}
    assert expected and holds(row, expected)
