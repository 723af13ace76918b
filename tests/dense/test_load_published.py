"""Published weights of dense models: loaded completely, or refused."""

import pytest
import torch

import graticule
from graticule.checkpoints.released_dense import load_published


@pytest.fixture(autouse=True)
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def test_a_checkpoint_that_does_not_fit_is_refused_and_the_model_is_unchanged():
    model = graticule.create_segmenter(
        "deit_tiny_patch16_224", 3, "segmenter_linear", depth=1, img_size=32, embed_dim=24, num_heads=2
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    published = {name.replace("features.backbone", "encoder"): value for name, value in before.items()}
    published = {name.replace("position.encodings.0.", ""): value + 1 for name, value in published.items()}
    wrong = {**published, "decoder.head.weight": torch.zeros(4, 24)}
    with pytest.raises(ValueError, match="does not fit SegmentationModel"):
        load_published(model, wrong)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    load_published(model, published)
    assert all(torch.equal(value, before[name] + 1) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match=r"it has, unlike the model, .*norm_list\.0\.weight"):
        load_published(model, {**published, "backbone.norm_list.0.weight": torch.ones(24)})  # of Twins-SVT
    with pytest.raises(ValueError, match="must be of create_detector or create_segmenter"):
        load_published(model.backbone, published)


@pytest.mark.parametrize("scale", [None, 1.0])
def test_a_layer_scale_is_loaded_or_multiplied_into_the_layer_before_it(scale):
    def build(init_values):
        return graticule.create_segmenter(
            "deit_tiny_patch16_224", 2, "segmenter_linear", depth=2, img_size=32, embed_dim=8, num_heads=1,
            init_values=init_values,
        ).eval()  # fmt: skip

    scaled = build(1.0)
    for parameter in scaled.parameters():
        torch.nn.init.normal_(parameter)
    published = {
        name.replace("features.backbone", "encoder").replace("position.encodings.0.", ""): value
        for name, value in scaled.state_dict().items()
    }
    published = {name.replace("ls1.gamma", "gamma1").replace("ls2.gamma", "gamma2"): v for name, v in published.items()}
    assert "encoder.blocks.1.gamma2" in published
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(load_published(build(scale), published)(image), scaled(image), rtol=1e-9, atol=1e-9)
