"""Files of other programs are read through timm's filters, used whole or said; each case names a public report."""

import re
import warnings

import pytest
import timm
import torch

import graticule
from graticule import load_checkpoint, transfer
from in_turn import in_turn
from tiny import SIZE, draw

WINDOWS = {"img_size": 32, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (1, 2), "num_classes": 0}


def prefixed(prefix, state):
    return {prefix + name: value for name, value in state.items()}


def renamed(state, **pairs):
    """Rename by patterns; a double underscore stands for a point."""
    for pattern, name in pairs.items():
        state = {re.sub(pattern.replace("__", r"\."), name.replace("__", "."), key): v for key, v in state.items()}
    return state


def noise(state):
    return {name: torch.randn_like(value) for name, value in state.items()}


def clip(state):
    names = {"patch_embed__proj": "conv1", "^cls_token": "class_embedding", "pos_embed": "positional_embedding"}
    names |= {"norm_pre": "ln_pre", "^norm__": "ln_post.", "^blocks": "transformer.resblocks", "norm": "ln_"}
    names |= {"qkv__": "in_proj_", "attn__proj": "attn.out_proj", "fc1": "c_fc", "fc2": "c_proj"}
    state = renamed(state, **names)
    embeddings = {name: state[name].flatten(0, -2).squeeze(0) for name in ("class_embedding", "positional_embedding")}
    return {**prefixed("visual.", state | embeddings), "token_embedding.weight": torch.zeros(3, 2)}


def microsoft(state):
    masks = {"layers.0.blocks.1.attn_mask": torch.zeros(4, 16, 16)}
    return renamed(state, layers__1__downsample="layers.0.downsample") | masks


def registers(state):
    """Return a file of DINOv2 with registers, whose class token has a row in the table."""
    row = torch.randn(1, 1, 24)
    table = torch.cat([row, state["pos_embed"]], 1)
    return renamed({**state, "cls_token": state["cls_token"] - row, "pos_embed": table}, reg_token="register_tokens")


def dinov3(state):
    """Return a file of DINOv3, whose biases are for q, k and v, with a mask."""
    state = renamed(state, reg_token="storage_tokens", gamma_1="ls1.gamma", gamma_2="ls2.gamma")
    for name in [name for name in state if name.endswith("q_bias")]:
        query, value, attention = state.pop(name), state.pop(name.replace("q_b", "v_b")), name.removesuffix("q_bias")
        state[f"{attention}qkv.bias"] = torch.cat([query, torch.zeros_like(query), value])
        state[f"{attention}qkv.bias_mask"] = torch.ones(3 * len(query))
    return {**state, "rope_embed.periods": ZEROS, "mask_token": ZEROS, "local_cls_norm.weight": ZEROS}


def beit3(state):
    """Return a file of BEiT-3, with a branch for texts."""
    state = renamed(state, **{"patch_embed__": "vision_embed.", "^cls_token": "vision_embed.cls_token"})
    state = renamed(state, **{"attn__norm__": "self_attn.inner_attn_ln.A.", "attn__proj__": "self_attn.out_proj.A."})
    state = renamed(state, mlp__norm__="ffn.A.ffn_layernorm.", mlp__="ffn.A.", norm1__="self_attn_layer_norm.A.")
    state = renamed(state, norm2__="final_layer_norm.A.", blocks="encoder.layers")
    for name in [name for name in state if "attn.qkv" in name]:
        for letter, part in zip("qkv", state.pop(name).chunk(3), strict=True):
            state[name.replace("attn.qkv.", f"self_attn.{letter}_proj.A.")] = part.clone()
    table = state.pop("pos_embed")[0]
    state["encoder.embed_positions.A.weight"] = torch.cat([torch.zeros_like(table[:2]), table])
    texts = {name.replace(".A.", ".B."): torch.randn_like(value) for name, value in state.items() if ".A." in name}
    return prefixed("beit3.", state | texts)


ZEROS, REGISTERS = torch.zeros(2, 2), {"reg_tokens": 4, "no_embed_class": True}
VIT, SWIN, EVA = "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "eva02_tiny_patch14_224"
SAM = {"window_size": 2, "global_attn_indexes": (1,)}
#: Report -> name and arguments in timm, the file from timm's state dict, and a name that is said to be unused.
FILES = {
    "facebookresearch/dino#217": (
        *(VIT, {}, lambda s: {"student": prefixed("module.backbone.", noise(s)), "teacher": prefixed("backbone.", s)}),
        "student.module.backbone.cls_token",
    ),
    "open-edge-platform/geti#4411": (VIT, REGISTERS, lambda s: {**registers(s), "mask_token": ZEROS}, "mask_token"),
    "facebookresearch/moco-v3": (
        *(VIT, {}, lambda s: prefixed("module.base_encoder.", s) | prefixed("module.momentum_encoder.", noise(s))),
        "momentum_encoder.cls_token",
    ),
    "mlfoundations/open_clip#985": (
        *(VIT, {}, lambda s: prefixed("visual.trunk.", s) | {"logit_scale": torch.ones(())}),
        "logit_scale",
    ),
    "OML-Team/open-metric-learning#354": ("vit_base_patch16_clip_224", {}, clip, "token_embedding.weight"),
    "facebookresearch/segment-anything#648": (
        *(
            "samvit_base_patch16",
            SAM,
            lambda s: prefixed("image_encoder.", renamed(s, fc="lin")) | {"mask_decoder": ZEROS},
        ),
        "mask_decoder",
    ),
    "huggingface/pytorch-image-models#1738": (
        EVA,
        {},
        lambda s: renamed(s, fc1_g="w1", fc1_x="w2", fc2="w3", mlp__norm="mlp.ffn_ln", q_proj__bias="q_bias"),
        None,
    ),
    "facebookresearch/ijepa#50": (
        VIT,
        {},
        lambda s: {
            "encoder": prefixed("module.", noise(s)),
            "target_encoder": prefixed("module.", s),
            "predictor": {"module.predictor_embed.weight": ZEROS},
        },
        "encoder.module.cls_token",
    ),
    "facebookresearch/dinov3#195": ("vit_small_patch16_dinov3", {}, dinov3, "local_cls_norm.weight"),
    "facebookresearch/dinov3#244": ("vit_small_patch16_dinov3_qkvb", {}, dinov3, "local_cls_norm.weight"),
    "microsoft/unilm#1361": (
        "beit3_base_patch16_224",
        {},
        beit3,
        "beit3.encoder.layers.0.self_attn_layer_norm.B.weight",
    ),
    "microsoft/unilm": ("beit_base_patch16_224", {}, lambda s: {"model": {**s, "mask_token": ZEROS}}, "mask_token"),
    "microsoft/Swin-Transformer#271": (
        *(SWIN, WINDOWS, lambda s: prefixed("encoder.", microsoft(s)) | {"decoder.0.weight": ZEROS}),
        "decoder.0.weight",
    ),
}


FAST = ("facebookresearch/dino#217", "open-edge-platform/geti#4411", "microsoft/Swin-Transformer#271")


def theirs_of(name, arguments):
    size = arguments if arguments is WINDOWS else {**SIZE, "depth": 2, "num_classes": 0, **arguments}
    return draw(timm.create_model(name, **size).double()).eval()


@pytest.mark.parametrize("report", [key if key in FAST else pytest.param(key, marks=pytest.mark.slow) for key in FILES])
def test_files_of_authors_give_the_outputs_of_timm_and_the_rest_is_said(report, tmp_path):
    name, arguments, written, unused = FILES[report]
    theirs, x = theirs_of(name, arguments), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    torch.save(written(theirs.state_dict()), path := tmp_path / "file.pth")
    ours, other = (draw(graticule.convert(theirs)).eval() for _ in range(2))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        load_checkpoint(ours, path)
        report = transfer(other, path)
    for model in (ours, other):
        torch.testing.assert_close(model(x), theirs(x), rtol=0, atol=1e-8)
    assert unused is None or any(
        "file.pth has" in str(record.message) and unused in str(record.message) for record in said
    )
    assert unused is None or unused in {row.name for row in report.rows if row.status == "unused"}
    assert not any(row.status == "new" for row in report.rows)


def test_a_model_of_timm_takes_the_path_of_a_part_of_a_file(tmp_path):
    """mmpretrain#18."""
    theirs, other = theirs_of(VIT, {}), torch.zeros(2)
    torch.save(prefixed("backbone.", theirs.state_dict()) | {"head.fc.bias": other}, path := tmp_path / "file.pth")
    with pytest.warns(UserWarning, match=r"has 1 tensor outside of the model, not used: head\.fc\.bias"):
        ours = timm.create_model(
            f"graticule_{VIT}", checkpoint_path=str(path), **{**SIZE, "depth": 2, "num_classes": 0}
        )
    assert torch.equal(ours.norm.weight.double(), theirs.norm.weight.float().double())


#: Report -> the file of timm's state dict, and parts of the refusal.
REFUSED = {
    "microsoft/Swin-Transformer#24": (
        *(SWIN, WINDOWS, lambda s: renamed(microsoft(s), **{"^layers": "backbone.stages", "attn__": "attn.w_msa."})),
        ("lacks layers.0.blocks.0.attn.proj.bias", "backbone.stages.0"),
    ),
    "pytorch/vision#6246": (
        *(SWIN, WINDOWS, lambda s: renamed(s, **{"^layers__0__blocks": "features.1", "mlp__fc1": "mlp.0"})),
        ("has, unlike the model, features.1.0",),
    ),
    "facebookresearch/dinov3#140": (
        *(VIT, {}, lambda s: prefixed("a.", s) | prefixed("b.", s)),
        ("2 networks", "a., b."),
    ),
    "lightly-ai/lightly#1003": (
        VIT,
        {},
        lambda s: {"decoder.weight": ZEROS},
        ("lacks blocks.0", "has, unlike the model, decoder"),
    ),
}


@in_turn("report", REFUSED)
def test_files_that_no_filter_knows_are_refused_with_what_was_found(report, tmp_path):
    name, arguments, written, words = REFUSED[report]
    theirs = theirs_of(name, arguments)
    torch.save(written(theirs.state_dict()), path := tmp_path / "file.pth")
    model = graticule.convert(theirs)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError) as refusal:
        load_checkpoint(model, path)
    assert "file.pth" in str(refusal.value) and all(word in str(refusal.value) for word in words)
    with pytest.raises(ValueError, match=r"file.pth"):
        transfer(model, path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_mask_token_and_a_decoder_that_a_model_has_are_loaded():
    model = graticule.create_model(VIT, encoding="none", **{**SIZE, "depth": 2, "num_classes": 0})
    model.mask_token, model.decoder_embed = torch.nn.Parameter(torch.zeros(1, 1, 24)), torch.nn.Linear(24, 2)
    state = noise(model.state_dict())
    model.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_unused_tensors_are_not_named_before_a_refusal(tmp_path):
    state = {**theirs_of(VIT, {}).state_dict(), "decoder_pred.bias": ZEROS}
    del state["norm.bias"]
    torch.save(state, path := tmp_path / "file.pth")
    with pytest.raises(ValueError, match=r"lacks norm\.bias"):  # a warning would be an error
        load_checkpoint(graticule.create_model(VIT, **{**SIZE, "depth": 2, "num_classes": 0}).double(), path)


@pytest.mark.parametrize("names", [{"mlp__fc": "mlp.lin"}, {"mlp__fc1": "ffn.w12"}, {"attn__proj": "attn.out"}])
def test_a_block_of_which_some_names_are_unknown_is_not_half_transferred(names):
    theirs = theirs_of(VIT, {})
    model = graticule.convert(theirs)
    with pytest.raises(ValueError, match=r"some weights have other names; it has blocks.0.*, and lacks blocks.0"):
        transfer(model, renamed(noise(theirs.state_dict()), **names))
    assert all(
        torch.equal(value, theirs.state_dict()[name]) for name, value in model.state_dict().items() if "attn" in name
    )
