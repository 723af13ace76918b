"""Windows with other rows than columns, as a pair for all stages."""

import pytest
import timm
import torch

import graticule
from graticule.position.windows import Windows
from in_turn import in_turn
from tiny import draw

SWIN = {"img_size": (64, 96), "embed_dim": 12, "depths": (2, 2), "num_heads": (1, 2), "num_classes": 3}
TWINS = {"embed_dims": (8, 16), "depths": (2, 2), "num_heads": (1, 2), "mlp_ratios": (2, 2), "sr_ratios": (2, 1)}
MODELS = {
    "swin_tiny_patch4_window7_224": SWIN,
    "swinv2_tiny_window8_256": SWIN,
    "twins_svt_small": {"img_size": (64, 96), **TWINS},
    "samvit_base_patch16": {"img_size": (64, 96), "embed_dim": 24, "depth": 2, "num_heads": 3, "global_layers": (1,)},
}


@in_turn("name", MODELS)
def test_a_pair_is_rows_and_columns_and_is_saved(tmp_path, name):
    model = draw(graticule.create_model(name, window_size=(2, 4), **MODELS[name])).eval()
    images = torch.randn(1, 3, 64, 96)
    blocks = [part for parts in model.block_arguments(0, model.grid) for part in parts if isinstance(part, Windows)]
    assert blocks[0].window.shape == (2, 4)
    model.save_pretrained(tmp_path / name)
    assert torch.equal(graticule.load(tmp_path / name).eval()(images), model(images))


@in_turn("name", [name for name in MODELS if name.startswith("swin")])
def test_a_pair_of_swin_is_timms(name):
    reference = draw(timm.create_model(name, window_size=(4, 6), **SWIN)).eval()
    ours = graticule.create_model(name, window_size=(4, 6), **SWIN).eval()
    ours.load_state_dict(graticule.convert(reference).state_dict())
    images = torch.randn(2, 3, 64, 96)
    torch.testing.assert_close(ours(images), reference(images))
    for pairs in (1, 3):
        with pytest.raises(ValueError, match="for each of 2 stages, got"):
            graticule.create_model(name, **{**SWIN, "window_size": ((4, 2),) * pairs})
