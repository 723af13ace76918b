"""PVT and Twins-SVT: attention to a coarser grid, supported positions, and checkpoints of their public codes."""

from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from timm.models.twins import Twins
from torch import nn

import graticule
from graticule import Grid, LayerPosition, load_checkpoint, published_state_dict
from graticule.backbones.pvt import SpatialReductionAttention
from graticule.testing.methods import check_backbone
from in_turn import in_turn, refusals
from tiny import assert_same, draw, images

SIZE = {"img_size": 64, "embed_dims": [8, 16, 24, 32], "num_heads": [1, 2, 3, 4], "depths": [1, 2, 1, 1]}
SIZE |= {"mlp_ratios": [4, 4, 2, 2], "num_classes": 5}
NAMES = ["pvt_tiny", "pvt_tiny_peg", "pvt_tiny_gap", "pvt_tiny_peg_gap"]
names = in_turn("name", NAMES)


def pvt(name="pvt_tiny", **kwargs):
    return graticule.create_model(name, **{**SIZE, **kwargs})


def wide(*size, **kwargs):
    return images(*(size or (64, 64)), dtype=torch.float64, **kwargs)


GOT = "`encoding` must be one that PyramidVisionTransformer can use, .*; got one that gives"
test_an_encoding_that_acts_inside_attention_is_refused_by_name = refusals(
    *((encoding, f"{GOT} layer 0 `bias`") for encoding in ("relative_bias", "learnable+relative_bias", "shaw")),
    ("convolutional_projection", f"{GOT} layer 1 `inputs`"),
    ("convolutional_projection(places=-1)", f"{GOT} layer 0 `inputs`"),
    ("peg(acts_on='queries_keys')", f"{GOT} layer 1 `inputs`"),
    call=lambda encoding: pvt(depths=[2, 2, 2, 2], encoding=encoding),
)


test_invalid_arguments_are_refused_by_name = refusals(
    ({"embed_dims": [8, 16, 24]}, "`embed_dims` and `depths` must have .* every stage, got 3 and 4"),
    ({"num_heads": [1, 2, 3]}, "`num_heads` must have a value for each of the 4 stages, got 3"),
    ({"depths": [1, 1, 1]}, "for each of the 3 stages, got 4 and 4"),
    ({"mlp_ratios": [4, 4, 4]}, "`mlp_ratios` and `sr_ratios` must .* 4 stages, got 3 and 4"),
    ({"sr_ratios": [8, 4, 2, 1, 1]}, "`mlp_ratios` and `sr_ratios` must .* 4 stages, got 4 and 5"),
    ({"depths": [1, 0, 1, 1]}, "`depths` must be at least 1, got 0"),
    ({"depths": [], "embed_dims": [], "num_heads": [], "mlp_ratios": [], "sr_ratios": []}, "`depths` must"),
    ({"num_heads": [1, 2, 5, 4]}, "`embed_dim` must be a multiple of `num_heads`, got 24 with 5 heads"),
    ({"sr_ratios": [8, 4, 0, 1]}, "`sr_ratios` must be at least 1 .* got 0 for 4 x 4 patches"),
    ({"sr_ratios": [8, 4, 8, 1]}, "`sr_ratios` must be .* no more than the sides .* got 8 for 4 x 4 patches"),
    ({"img_size": (64, 32), "sr_ratios": [8, 4, 4, 1]}, "`sr_ratios` must .* got 4 for 4 x 2 patches"),
    ({"encoding": "peg(places=1)"}, "`places` must be from -1, .* 1 layers, to 0, got 1"),
    ({"img_size": (64, 100)}, "got width 100 with a patch of 32; the nearest sizes are 96 and 128"),
    ({"global_pool": "max"}, "`global_pool` must be one of '', 'token', 'avg', got 'max'"),
    ({"global_pool": "avg", "class_token": True}, "`class_token` must be False where .* got True"),
    ({"pretrained": True}, "`pretrained` must be False: timm's hub has no weights of pvt_tiny;"),
    call=lambda kwargs: pvt(**kwargs),
)


@names
def test_the_final_norm_is_for_the_last_stage_alone(name):
    model = draw(pvt(name)).double().eval()
    x = wide()
    plain = model.forward_intermediates(x, intermediates_only=True)
    normed = model.forward_intermediates(x, intermediates_only=True, norm=True)
    assert all(torch.equal(a, b) for a, b in zip(plain[:3], normed[:3], strict=True))
    assert_same(normed[3].flatten(2).mT, model.norm(plain[3].flatten(2).mT))
    assert_same(normed[3].flatten(2).mT, model.forward_features(x)[:, model.num_prefix_tokens :])


GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
#: Recorded case -> our model.
RECORDED = {"pvt": "pvt_tiny", "pvt_peg_gap": "pvt_tiny_peg_gap"}
recorded = pytest.mark.parametrize("case", RECORDED)


def reference(case):
    tensors = load_file(GOLDEN / f"{case}.safetensors")
    state = {name.removeprefix("weight."): value for name, value in tensors.items() if name.startswith("weight.")}
    return state, tensors["input"].double(), tensors["output"].double()


def write(state, folder):
    torch.save({"model": state}, folder / "model.pth")
    return folder / "model.pth"


@recorded
def test_a_file_of_the_public_code_loads_and_computes_the_recorded_output(case, tmp_path):
    state, x, output = reference(case)
    model = pvt(RECORDED[case]).double().eval()
    assert load_checkpoint(model, write(state, tmp_path)) is model
    assert_same(model(x), output, 1e-10)


TWINS = [("pvt_small_peg_gap", "twins_pcpvt_small"), ("pvt_medium_peg_gap", "twins_pcpvt_base")]
THIN = {"img_size": 64, "embed_dims": [4, 4, 6, 8], "num_heads": [1, 1, 2, 2], "mlp_ratios": [2, 2, 1, 1]}


@pytest.mark.parametrize(("name", "timms"), TWINS)
def test_pretrained_weights_are_those_that_timms_hub_has(name, timms, tmp_path):
    config, published = timm.get_pretrained_cfg(f"graticule_{name}"), timm.get_pretrained_cfg(timms)
    for field in ("hf_hub_id", "input_size", "mean", "std", "crop_pct", "interpolation", "first_conv", "classifier"):
        assert getattr(config, field) == getattr(published, field), field
    twins = draw(timm.create_model(timms, **THIN)).eval()
    save_file(twins.state_dict(), tmp_path / "model.safetensors")  # as on the hub
    file = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(tmp_path / "model.safetensors")}}
    model = graticule.create_model(name, **THIN, **file).double().eval()
    x = wide(64, 96)
    torch.testing.assert_close(model(x), twins.double()(x), rtol=1e-13, atol=1e-13)
    other = graticule.create_model(name, num_classes=3, in_chans=1, **THIN, **file)
    assert other.head.weight.shape == (3, 8)
    gray = twins.patch_embeds[0].proj.weight.float().sum(1, keepdim=True)
    torch.testing.assert_close(other.patch_embeds[0].proj.weight, gray)


def refusal(model, state, folder):
    """Load a checkpoint that must be refused without changing the model; returns the message."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"model\.pth does not fit PyramidVisionTransformer") as error:
        load_checkpoint(model, write(state, folder))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return str(error.value)


def test_a_checkpoint_of_the_other_code_is_refused_by_what_it_lacks(tmp_path):
    state, _, _ = reference("pvt")
    assert "lacks pos_block.0.proj.0.bias" in refusal(pvt("pvt_tiny_peg_gap"), state, tmp_path)
    state, _, _ = reference("pvt_peg_gap")
    message = refusal(pvt("pvt_tiny"), state, tmp_path)
    assert "lacks cls_token, pos_embed1" in message and "pos_block.0.proj.0.bias" in message


@pytest.mark.parametrize("size", [(64, 96), (32, 64)])
def test_tables_are_resampled_bilinearly_on_the_way_as_in_pvts_code(size):
    model = draw(pvt()).double().eval()
    wide = pvt(img_size=size).double().eval()
    state = model.state_dict()
    for stage, at in enumerate(wide.position.grids(wide.grid)):
        name = f"position.stages.{stage}.encodings.0.pos_embed"
        table = state[name]
        prefix, patches = table[:, : at.prefix], table[:, at.prefix :]
        square = patches.transpose(1, 2).unflatten(2, model.position.grids(model.grid)[stage].shape)
        resized = torch.nn.functional.interpolate(square, size=at.shape, mode="bilinear")
        state[name] = torch.cat([prefix, resized.flatten(2).transpose(1, 2)], 1)
    wide.load_state_dict(state)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    assert_same(model(x), wide(x), 1e-12)
    bicubic = pvt(encoding="learnable(resampler='bicubic')").double().eval()
    bicubic.load_state_dict(model.state_dict())
    assert (bicubic(x) - model(x)).abs().max() > 1e-6


SVT = {"embed_dims": (16, 24), "num_heads": (2, 3), "mlp_ratios": (2, 2), "depths": (3, 2), "sr_ratios": (2, 1)}


@pytest.mark.parametrize("size", [(64, 64), (96, 64), (40, 56)])
@torch.no_grad()
def test_twins_svt_is_timms_with_every_weight_drawn(size):
    timms = draw(Twins(img_size=size, num_classes=5, wss=(3, 3), **SVT)).double().eval()
    ours = graticule.create_model("twins_svt_small", img_size=size, num_classes=5, window_size=3, **SVT)
    ours.double().eval().load_state_dict(timms.state_dict())
    x = images(*size, dtype=torch.float64)
    assert_same(ours(x), timms(x), 1e-10)
    published = published_state_dict(ours)
    assert published.keys() == timms.state_dict().keys()
    assert all(torch.equal(published[name], value) for name, value in timms.state_dict().items())


def test_twins_svt_keeps_the_contract_with_windows_that_do_not_tile_and_has_no_class_token():
    check_backbone("twins_svt_small", img_size=(64, 96), window_size=3, **SVT, compiled=False)
    with pytest.raises(ValueError, match="`global_pool` must be one of '', 'avg'"):
        graticule.create_model("twins_svt_small", **SVT, global_pool="token")
    for window in (1, 2**16):
        with pytest.raises(ValueError, match=f"`window_size` must be from 2 to 4096 patches, got {window}"):
            graticule.create_model("twins_svt_small", **SVT, window_size=window)


B, DIM, HEADS = 2, 24, 3
HEAD = DIM // HEADS
NOWHERE = LayerPosition()
CASES = [
    (1, Grid(3, 5)),
    (1, Grid(4, 6, prefix=2)),
    (2, Grid(4, 6, prefix=2)),
    (2, Grid(4, 6)),
    (4, Grid(4, 12)),
    (4, Grid(8, 4)),
]
cases = pytest.mark.parametrize(("reduction", "grid"), CASES)


def attention(reduction, **kwargs):
    module = SpatialReductionAttention(DIM, HEADS, reduction=reduction, **kwargs).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def tokens(grid):
    return torch.randn(B, grid.tokens, DIM, dtype=torch.float64)


def keys_of(module, x, grid):
    """Compute the inputs of keys and values, (B, M, DIM): the strided convolution as a product, then the norm."""
    if module.reduction == 1:
        return x
    r = module.reduction
    image = x[:, grid.prefix :].transpose(1, 2).reshape(B, DIM, *grid.shape)
    cells = F.unfold(image, r, stride=r).transpose(1, 2)  # (B, M, DIM * r * r)
    y = cells @ module.sr.weight.flatten(1).T + module.sr.bias
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    return y * module.norm.weight + module.norm.bias


def naive(module, x, grid):
    """Compute softmax(q k^T / sqrt(d)) v head by head; also returns the weights, (B, h, N, M)."""
    q = x @ module.q.weight.T + module.q.bias
    k, v = (keys_of(module, x, grid) @ module.kv.weight.T + module.kv.bias).split(DIM, -1)
    mixed, weights = [], []
    for head in range(HEADS):
        at = slice(head * HEAD, (head + 1) * HEAD)
        logits = (q[..., at] @ k[..., at].transpose(1, 2)) / HEAD**0.5
        weights.append(logits.exp() / logits.exp().sum(-1, keepdim=True))
        mixed.append(weights[-1] @ v[..., at])
    return torch.cat(mixed, -1) @ module.proj.weight.T + module.proj.bias, torch.stack(weights, 1)


@cases
def test_attention_to_a_coarser_grid_is_its_formula(reduction, grid):
    module, x = attention(reduction), tokens(grid)
    y, weights = naive(module, x, grid)
    keys = grid.tokens if reduction == 1 else grid.patches // reduction**2  # prefix tokens are asked without reduction
    assert y.shape == (B, grid.tokens, DIM) and weights.shape == (B, HEADS, grid.tokens, keys)
    assert_same(module(x, NOWHERE, grid), y)
    assert_same(module.weights(x, NOWHERE, grid), weights)


@in_turn("grid", [Grid(3, 8), Grid(8, 3)])
@in_turn("method", ["forward", "weights"])
def test_a_grid_smaller_than_the_reduction_is_refused_with_its_sides(grid, method):
    message = f"`img_size` must give this stage at least 4 patches per side.* got {grid.height} x {grid.width}"
    with pytest.raises(ValueError, match=message):
        getattr(attention(4), method)(tokens(grid), NOWHERE, grid)
