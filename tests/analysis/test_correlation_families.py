"""Position correlations of the other families: norms on the residual stream, stages, and merged tables."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import graticule
from commands import run_command
from graticule import Grid
from graticule.analysis.correlation import position_correlations
from graticule.analysis.similarity import cosine_similarity
from in_turn import in_turn
from tiny import draw, tiny

COMPACT = ("vit_lite_2_4_32", "cvt_2_4_32", "cct_2_3x2_32")
PYRAMIDS = ("swin", "pvt")
SWIN = {"img_size": 32, "embed_dim": 12, "depths": (2, 1), "num_heads": (3, 6), "window_size": 4, "num_classes": 5}
PVT = {"img_size": 32, "embed_dims": (8, 16), "depths": (2, 1), "num_heads": (1, 2), "num_classes": 5}
PVT |= {"mlp_ratios": (2, 2), "sr_ratios": (2, 1)}


def drawn(name, **kwargs):
    """Return a model in float64 with all parameters drawn, including tables and norms."""
    return draw(graticule.create_model(name, **kwargs)).double().eval()


def compact(name, **kwargs):
    return drawn(name, **{"embed_dim": 24, "num_heads": 3, "num_classes": 5, **kwargs})


def pyramid(name, **kwargs):
    """Return a model of two stages, with 8 x 8 and 4 x 4 patches, two layers and one."""
    if name == "swin":
        return drawn("swin_tiny_patch4_window7_224", **{"encoding": "learnable", **SWIN, **kwargs})
    return drawn("pvt_tiny", **{**PVT, **kwargs})


def layer_norm(x, norm):
    """Compute LayerNorm by its formula, over the last axis."""
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
    return (x - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias


def swin_merged(model, table, grid):
    """Pass a table (N, D) through the patch merging of the second stage: 2 x 2 neighbors, a norm, a projection."""
    merge = model.layers[1].downsample
    image = F.pad(table.T.unflatten(-1, grid.shape), (0, grid.width % 2, 0, grid.height % 2))
    four = [image[:, y::2, x::2] for x in (0, 1) for y in (0, 1)]
    return layer_norm(torch.cat(four).flatten(1).T, merge.norm) @ merge.reduction.weight.T


def pvt_merged(model, table, grid):
    """Pass a table (N, D) through the patch embedding of the second stage: a 2 x 2 convolution, and a norm."""
    embed = model.patch_embeds[1]
    image = F.conv2d(table.T.unflatten(-1, grid.shape)[None], embed.proj.weight, embed.proj.bias, stride=2)
    return layer_norm(image[0].flatten(1).T, embed.norm)


@torch.no_grad()
def assert_layers_see(result, *seen):
    """Check that the position of each layer, (N, D) with any prefix tokens first, has the measured cosines."""
    assert result.similarity.shape == (len(seen), result.grid.patches, result.grid.patches)
    for layer, table in enumerate(seen):
        by_hand = cosine_similarity(table[-result.grid.patches :].double().numpy())
        np.testing.assert_allclose(result.similarity[layer], by_hand, rtol=0, atol=1e-10)


def table_of(model, index=0):
    """Return the table of a learnable encoding, (N, D): the only one, or that of a layer or stage."""
    tables = [value[0] for name, value in model.named_parameters() if name.endswith("pos_embed")]
    return tables[index]


@torch.no_grad()
@in_turn("name", COMPACT)
@in_turn("joining", ["default", "shared", "unshared", "lape"])
def test_a_compact_transformer_has_a_norm_on_the_residual_stream_which_lape_does_not_pass(name, joining):
    model = compact(name, joining=joining)
    result, w, (first, second) = position_correlations(model), table_of(model), model.blocks
    patches = w[-result.grid.patches :].numpy()
    if joining == "lape":
        norm, next_norm = model.position.joining.norms
        assert_layers_see(result, layer_norm(w, norm), layer_norm(layer_norm(w, norm), next_norm))
        assert result.sources == ("after_norm", "after_norm")
    else:
        added = {"default": 0, "shared": w, "unshared": table_of(model, -1)}[joining]
        assert_layers_see(
            result, layer_norm(w, first.norm1), layer_norm(layer_norm(w, first.norm2) + added, second.norm1)
        )
        assert result.sources == ("stream", "stream")
    if joining == "unshared":
        assert result.initial is None
    else:
        np.testing.assert_allclose(result.initial, cosine_similarity(patches), rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("size", [32, (40, 24), (36, 28)])
def test_the_table_of_swin_passes_through_the_merging_of_patches(size):
    model = pyramid("swin", img_size=size)
    w = table_of(model)
    first, second = (position_correlations(model, stage=stage) for stage in (0, 1))
    assert first.grid == model.grid and second.grid == Grid(-(-model.grid.height // 2), -(-model.grid.width // 2))
    assert_layers_see(first, *[layer_norm(w, block.norm1) for block in model.layers[0].blocks])
    assert_layers_see(second, layer_norm(swin_merged(model, w, model.grid), model.layers[1].blocks[0].norm1))
    assert (first.sources, second.sources) == (("stream", "stream"), ("stream",))
    np.testing.assert_allclose(first.initial, cosine_similarity(w.numpy()), rtol=0, atol=1e-12)
    assert second.initial is None


@torch.no_grad()
@in_turn("name", PYRAMIDS)
@in_turn("joining", ["lape", "lape_sharing"])
def test_layers_of_a_pyramid_with_lape_see_its_tables(joining, name):
    model = pyramid(name, joining=joining)
    *seen, last = (position.after_norm for position in model.position(model.grid))
    first, second = (position_correlations(model, stage=stage) for stage in (0, 1))
    assert_layers_see(first, *seen)
    assert_layers_see(second, last)
    assert (first.sources, second.sources) == (("after_norm", "after_norm"), ("after_norm",))


@torch.no_grad()
@pytest.mark.parametrize("global_pool", ["token", "avg"])
def test_every_stage_of_pvt_adds_a_table_to_the_embedded_one(global_pool):
    model = pyramid("pvt", img_size=(32, 48), global_pool=global_pool)
    w, v = table_of(model, 0), table_of(model, 1)
    first, second = (position_correlations(model, stage=stage) for stage in (0, 1))
    assert second.grid == Grid(4, 6, prefix=int(global_pool == "token"))
    assert_layers_see(first, *[layer_norm(w, block.norm1) for block in model.blocks[0]])
    carried = pvt_merged(model, w, model.grid) + v[second.grid.prefix :]
    assert_layers_see(second, layer_norm(carried, model.blocks[1][0].norm1))
    assert first.initial is None and second.initial is None  # there are two tables


ALL = {
    "vit": lambda **kwargs: tiny(**kwargs).double(),
    **{name: lambda name=name, **kwargs: compact(name, **kwargs) for name in COMPACT},
    **{name: lambda name=name, **kwargs: pyramid(name, **kwargs) for name in PYRAMIDS},
    "ceit": lambda **kwargs: drawn("ceit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=3, **kwargs),
    "t2t": lambda **kwargs: drawn("t2t_vit_7", img_size=32, embed_dim=32, depth=2, num_heads=2, **kwargs),
}
families = in_turn("name", ALL)
joinings = in_turn("joining", ["default", "lape"])


def stages_of(model):
    return range(len(getattr(model, "depths", (1,))))


@families
@joinings
def test_a_folded_model_has_the_same_correlations(name, joining):
    model = ALL[name](joining=joining)
    before = [position_correlations(model, stage=stage) for stage in stages_of(model)]
    graticule.fold(model).train()
    for stage, expected in enumerate(before):
        after = position_correlations(model, stage=stage)
        np.testing.assert_array_equal(after.similarity, expected.similarity)
        np.testing.assert_array_equal(after.initial, expected.initial)
        assert after.sources == expected.sources
    assert model.position.training


SMALL = ("--limit-train", 20, "--limit-test", 20, "--batch-size", 10, "--epochs", 1, "--warmup-epochs", 0)
SIZE = ("--img-size", 32, 32, "--accelerator", "cpu")
SWIN_OPTIONS = ("--model-kwargs", "embed_dim=12", "depths=[2,1]", "num_heads=[3,6]", "window_size=4")


def test_the_command_writes_the_files_that_it_lists_one_sheet_per_stage(capsys, tmp_path):
    model = ("--model", "swin_tiny_patch4_window7_224", "--encoding", "learnable+relative_bias", "--joining", "lape")
    command = ("train", "digits_quick", *model, *SIZE, *SMALL, *SWIN_OPTIONS, "--output", tmp_path / "run")
    assert run_command(capsys, *command)[0] == 0
    code, out, _ = run_command(capsys, "analyze", "correlations", tmp_path / "run", "--output", tmp_path / "found")
    assert code == 0
    names = [f"{kind}-stage{stage}" for kind in ("correlations", "bias") for stage in (0, 1)]
    written = {tmp_path / "found" / f"{name}{end}" for name in names for end in (".png", ".npz")}
    assert set((tmp_path / "found").iterdir()) == written
    (line,) = [line for line in out.splitlines() if line.startswith("wrote ")]
    assert set(re.split(", | and ", line.removeprefix("wrote "))) == {str(path) for path in written}
    stages = ["stage 0, 8 x 8 tokens", "stage 1, 4 x 4 tokens"]
    assert [line for line in out.splitlines() if line.startswith("stage ")] == stages
    assert out.count("reach over the layers: a range of") + out.count("nothing to compare") == 2
    for name, side, layers in ((names[0], 8, 2), (names[1], 4, 1)):
        assert (tmp_path / "found" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        with np.load(tmp_path / "found" / f"{name}.npz") as result:
            assert tuple(result["grid"][:2]) == (side, side) and len(result["sources"]) == layers
            assert np.isfinite(result["similarity"]).all()
