"""Situations that people reported in public threads, rebuilt in small; the first line of each says which."""

import re
from functools import partial

import timm
import torch
from timm.optim import param_groups_layer_decay
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2
from torchvision.models.vision_transformer import VisionTransformer

import graticule
from tiny import draw


def rates(model):
    """Return the learning rate scale and the weight decay of each parameter."""
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.75)
    of = {
        id(parameter): (group["lr_scale"], group["weight_decay"]) for group in groups for parameter in group["params"]
    }
    return {name: of[id(parameter)] for name, parameter in model.named_parameters()}


def test_layer_wise_decay_of_pyramids():
    """SihanXU/nepa #11: Swin has the rate of each of its blocks, not of its stages."""
    sizes = {"img_size": 64, "embed_dim": 12, "depths": (2, 4), "num_heads": (1, 2)}
    twins = {"img_size": 64, "embed_dims": (12, 24), "depths": (2, 4), "num_heads": (1, 2)}
    for name, arguments in [
        ("swin_tiny_patch4_window7_224", sizes),
        ("swinv2_tiny_window8_256", sizes),
        ("twins_svt_small", {**twins, "mlp_ratios": (2, 2), "sr_ratios": (2, 1), "wss": (2, 2)}),
        ("twins_pcpvt_small", {**twins, "mlp_ratios": (2, 2), "sr_ratios": (2, 1)}),
    ]:
        theirs = timm.create_model(name, **arguments)
        ours = graticule.convert(theirs, verify=False)
        expected, actual = rates(theirs), rates(ours)
        names = ours.converted_from.names
        assert {names[name][0]: rate for name, rate in expected.items()} == actual, name
        assert len(set(actual.values())) > 10


def test_other_channels_of_a_detector():
    """mmsegmentation #3567, SAMed #25: a detector takes images of other channels after `resize`, and is saved so."""
    sizes = {"img_size": 64, "embed_dim": 24, "num_heads": 3, "depth": 1, "neck": "simple_pyramid(channels=64)"}
    for head in ("fcos", "retinanet"):
        detector = graticule.create_detector("vit_tiny_patch16_224", num_classes=3, head=head, **sizes).eval()
        for channels in (4, 1):
            graticule.resize(detector, channels=channels)
            assert detector([torch.rand(channels, 64, 96)])[0]["boxes"].shape[1] == 4
            assert len(detector.hub_config({})["pretrained_cfg"]["std"]) == channels


def test_a_table_of_all_blocks_in_each_block(tmp_path):
    """unilm #431: BEiT is pretrained with one table of relative positions, fine-tuned with a copy in each block."""
    sizes = {"img_size": 80, "embed_dim": 24, "num_heads": 3, "depth": 2, "num_classes": 3}
    create = partial(timm.create_model, "beit_base_patch16_224", **sizes)
    each, one = create(), draw(create(use_shared_rel_pos_bias=True, use_rel_pos_bias=False))
    torch.save(one.state_dict(), path := tmp_path / "beit.pth")
    ours, table = graticule.convert(each), one.rel_pos_bias.relative_position_bias_table
    rows = [row for row in graticule.transfer(ours, path).rows if row.name.startswith("position.")]
    assert [row.status for row in rows] == ["copied", "copied"]
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    graticule.load_checkpoint(ours, path)
    assert all(torch.equal(value, table) for value in ours.position.parameters())
    torch.testing.assert_close(ours.eval()(images := torch.randn(1, 3, 80, 80)), one.eval()(images))
    torch.save(draw(each).state_dict(), path)  # and back: the table of the first block
    ours = graticule.convert(one)
    graticule.transfer(ours, path)
    assert torch.equal(next(ours.position.parameters()), each.blocks[0].attn.relative_position_bias_table)


def test_weights_of_torchvision(tmp_path):
    """mmpretrain and torchvision threads: files of other libraries' ViT and Swin are read, with equal outputs."""
    vit = {"embed_dim": 32, "depth": 2, "num_heads": 2}
    swin = {"embed_dim": 16, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4}
    stages = ([4, 4], 16, [2, 2], [1, 2], [4, 4])
    second = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
    for name, arguments, theirs in [
        (
            "vit_tiny_patch16_224",
            vit,
            VisionTransformer(32, 16, 2, 2, 32, 128),
        ),
        ("swin_tiny_patch4_window7_224", swin, SwinTransformer(*stages)),
        ("swinv2_tiny_window8_256", swin, SwinTransformer(*stages, **second)),
    ]:
        torch.save(draw(theirs).state_dict(), path := tmp_path / "file.pth")
        ours = graticule.load_checkpoint(graticule.create_model(name, img_size=32, **arguments), path).eval()
        torch.testing.assert_close(ours(images := torch.randn(2, 3, 32, 32)), theirs.eval()(images))


def test_weights_of_mmpretrain(tmp_path):
    """mmpretrain threads: files of its ViT and DeiT are read, with the outputs of timm's models of these weights."""
    for name in ("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"):
        small = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
        theirs = draw(timm.create_model(name, **small))
        state = {}
        for key, value in theirs.state_dict().items():
            for pattern, other in (
                (r"^head", "head.layers.head"),
                (r"^norm\.", "ln1."),
                (r"^blocks\.", "layers."),
                (r"\.norm", ".ln"),
                (r"mlp\.fc1", "ffn.layers.0.0"),
                (r"mlp\.fc2", "ffn.layers.1"),
                (r"^patch_embed\.proj", "patch_embed.projection"),
                (r"^(?!head)", "backbone."),
            ):
                key = re.sub(pattern, other, key)
            state[key] = value
        torch.save({"state_dict": state}, path := tmp_path / "mmpretrain.pth")
        ours = graticule.load_checkpoint(graticule.create_model(name, **small), path).eval()
        torch.testing.assert_close(ours(images := torch.randn(2, 3, 32, 32)), theirs.eval()(images))
