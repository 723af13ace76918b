"""Freezing all of a model but for some parts."""

import pytest
import torch
from torch import nn

import graticule
from graticule.surgery import freeze


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def vit(**options):
    return graticule.create_model("vit_nano_patch4_28", depth=3, **options)


def of(model, *starts):
    return {name for name, _ in model.named_parameters() if name.startswith(starts)}


def lape():
    return vit(joining="lape")


def swin():
    sizes = {"img_size": 64, "window_size": 2, "embed_dim": 12, "depths": (1, 1, 2, 1), "num_heads": (1, 1, 2, 2)}
    return graticule.create_model("swin_tiny_patch4_window7_224", **sizes)


@pytest.mark.parametrize(
    ("build", "parts", "starts"),
    [
        (lape, "all-but-head", ("head.",)),
        (lape, "all-but-position", ("position.",)),
        (lape, "all-but-position+head", ("position.", "head.")),
        (lape, "all-but-last-2", ("blocks.1.", "blocks.2.", "norm.")),
        (lape, "all-but-last-1+head", ("blocks.2.", "norm.", "head.")),
        (swin, "all-but-last-2", ("layers.2.blocks.1.", "layers.3.blocks.", "norm.")),  # counted from the end
        (lambda: freeze(vit()), "all-but-position", ("position.",)),  # changed later
    ],
)
def test_only_the_parts_that_are_named_are_trained(build, parts, starts):
    model = build()
    assert trained(freeze(model, parts)) == of(model, *starts)


def test_the_neck_and_the_decoder_of_a_dense_model_are_its_head():
    model = graticule.create_segmenter(vit(), 3, decoder="fpn")
    backbone = {*model.backbone.parameters()}
    inside = {name for name, parameter in model.named_parameters() if parameter in backbone}
    assert trained(freeze(model)) == of(model, "") - inside and inside


def test_frozen_modules_keep_their_statistics_and_draw_nothing():
    model = freeze(vit(drop_path_rate=0.9, proj_drop_rate=0.5).train())
    images = torch.randn(2, 1, 28, 28)
    assert torch.equal(model(images), model(images)) and model.head.training
    norms = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))
    model.patch_embed.norm = norms[1]
    assert not freeze(model.train()).patch_embed.norm.training


def test_a_table_of_a_formula_stays_fixed():
    model = vit(encoding="sinusoidal_2d + relative_bias")
    before = trained(model)
    assert trained(freeze(freeze(model), "all-but-position")) == before & of(model, "position.")
    assert before < of(model, "")


def test_what_cannot_be_frozen_is_refused():
    headless = vit(num_classes=0)
    for model, parts, message in (
        (vit(), "all", "must leave something to train, got 'all'; all-but-head"),
        (vit(), "head", "`freeze` must be all-but-PART"),
        (vit(), "all-but-head+head", "`freeze` must be all-but-PART"),
        (vit(), "all-but-last-0", "`freeze` must be all-but-PART"),
        (vit(), "all-but-last-4", "at most the 3 blocks"),
        (headless, "all-but-head", "of a model that has no such part"),
        (vit(encoding="sinusoidal_2d"), "all-but-position", "of a model that has no such part"),
        (graticule.fold(vit().eval()), "all-but-position", "must not be folded"),
        (nn.Linear(2, 2), "all-but-head", "graticule.convert makes a backbone"),
    ):
        with pytest.raises(ValueError, match=message):
            freeze(model, parts)
