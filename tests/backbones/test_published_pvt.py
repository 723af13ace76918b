"""Checkpoints of PVT's and Twins' code are loaded and saved under their published names."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import graticule
from graticule import load_checkpoint
from in_turn import in_turn
from tiny import draw, full_size, images, without_memory

GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
SIZE = {
    "img_size": 64,
    "embed_dims": [8, 16, 24, 32],
    "num_heads": [1, 2, 3, 4],
    "depths": [1, 2, 1, 1],
    "mlp_ratios": [4, 4, 2, 2],
    "num_classes": 5,
}
NAMES = ["pvt_tiny", "pvt_tiny_peg", "pvt_tiny_gap", "pvt_tiny_peg_gap"]
#: Recorded case -> our model.
RECORDED = {"pvt": "pvt_tiny", "pvt_peg_gap": "pvt_tiny_peg_gap"}
recorded = pytest.mark.parametrize("case", RECORDED)
names = pytest.mark.parametrize("name", NAMES)


def pvt(name="pvt_tiny", **kwargs):
    return graticule.create_model(name, **{**SIZE, **kwargs})


def reference(case):
    """Return the recorded state dict, input and output of the public code."""
    tensors = load_file(GOLDEN / f"{case}.safetensors")
    state = {name.removeprefix("weight."): value for name, value in tensors.items() if name.startswith("weight.")}
    return state, tensors["input"].double(), tensors["output"].double()


def wide(*size):
    return images(*size, dtype=torch.float64)


def write(state, folder, kind):
    """Write a checkpoint in one of the usual formats."""
    if kind == "safetensors":
        save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors")
        return folder / "model.safetensors"
    torch.save({"model": state} if kind == "model" else state, folder / "model.pth")
    return folder / "model.pth"


# Names of parameters in the public codes


@recorded
@in_turn("kind", ["plain", "model", "safetensors"])
def test_a_file_of_the_public_code_loads_and_computes_the_recorded_output(case, kind, tmp_path):
    state, x, output = reference(case)
    model = pvt(RECORDED[case]).double().eval()
    assert load_checkpoint(model, write(state, tmp_path, kind)) is model
    torch.testing.assert_close(model(x), output, rtol=0, atol=1e-10)


# Twins' published weights, on timm's hub

TWINS = [("pvt_small_peg_gap", "twins_pcpvt_small"), ("pvt_medium_peg_gap", "twins_pcpvt_base")]
THIN = {"img_size": 64, "embed_dims": [4, 4, 6, 8], "num_heads": [1, 1, 2, 2], "mlp_ratios": [2, 2, 1, 1]}


@pytest.mark.parametrize(("name", "theirs"), TWINS)
def test_pvt_with_peg_and_gap_is_timms_twins_parameter_by_parameter(name, theirs):
    with without_memory():
        twins = timm.create_model(theirs)
    published = {key: value.shape for key, value in graticule.published_state_dict(full_size(name)).items()}
    assert published == {key: value.shape for key, value in twins.state_dict().items()}


@pytest.mark.parametrize(("name", "theirs"), TWINS)
def test_pretrained_weights_are_those_that_timms_hub_has(name, theirs, tmp_path):
    config, published = timm.get_pretrained_cfg(f"graticule_{name}"), timm.get_pretrained_cfg(theirs)
    for field in ("hf_hub_id", "input_size", "mean", "std", "crop_pct", "interpolation", "first_conv", "classifier"):
        assert getattr(config, field) == getattr(published, field), field
    twins = draw(timm.create_model(theirs, **THIN)).eval()
    save_file(twins.state_dict(), tmp_path / "model.safetensors")  # as on the hub
    file = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(tmp_path / "model.safetensors")}}
    model = graticule.create_model(name, **THIN, **file).double().eval()
    x = wide(64, 96)
    torch.testing.assert_close(model(x), twins.double()(x), rtol=1e-13, atol=1e-13)
    other = graticule.create_model(name, num_classes=3, in_chans=1, **THIN, **file)
    assert other.head.weight.shape == (3, 8)
    gray = twins.patch_embeds[0].proj.weight.float().sum(1, keepdim=True)
    torch.testing.assert_close(other.patch_embeds[0].proj.weight, gray)


# Save and load


# Tables of another size


# Checkpoints that do not fit


def refusal(model, state, folder):
    """Load a checkpoint that must be refused without changing the model; returns the message."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"model\.pth does not fit PyramidVisionTransformer") as error:
        load_checkpoint(model, write(state, folder, "model"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return str(error.value)


def test_a_checkpoint_of_the_other_code_is_refused_by_what_it_lacks(tmp_path):
    state, _, _ = reference("pvt")
    assert "lacks position.stages.0.pegs.0.proj.0.bias" in refusal(pvt("pvt_tiny_peg_gap"), state, tmp_path)
    state, _, _ = reference("pvt_peg_gap")
    message = refusal(pvt("pvt_tiny"), state, tmp_path)
    assert "lacks cls_token, position.stages.0.encodings.0.pos_embed" in message
    assert "pos_block.0.proj.0.bias" in message


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
    torch.testing.assert_close(model(x), wide(x), rtol=0, atol=1e-12)
    bicubic = pvt(encoding="learnable(resampler='bicubic')").double().eval()
    bicubic.load_state_dict(model.state_dict())
    assert (bicubic(x) - model(x)).abs().max() > 1e-6


@recorded
def test_published_names_are_exactly_those_of_the_public_code(case):
    state, _, _ = reference(case)
    published = graticule.published_state_dict(pvt(RECORDED[case]))
    assert {name: value.shape for name, value in published.items()} == {name: v.shape for name, v in state.items()}
