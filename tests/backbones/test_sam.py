"""Segment Anything's image encoder, with layers of windows and layers of the whole grid."""

import math

import torch

import graticule

SIZE = {"img_size": 64, "embed_dim": 16, "depth": 3, "num_heads": 2, "window_size": 2, "global_layers": (1,)}


def small(encoding, **kwargs):
    return graticule.create_model("samvit_base_patch16_224", encoding=encoding, num_classes=0, **SIZE, **kwargs)


def test_log_n_counts_the_tokens_of_a_window_in_layers_of_windows():
    model = small("log_n(reference=8)")
    positions = model.position(model.grid)
    for layer, tokens in enumerate((4, 16, 4)):
        expected = torch.full((tokens,), math.log(tokens) / math.log(8))
        torch.testing.assert_close(positions[layer].query_scale, expected)


def test_each_layer_has_the_relative_encoding_of_its_window_or_of_the_whole_grid():
    position = small("relative_bias").position
    assert {name: tuple(p.shape) for name, p in position.named_parameters()} == {
        "whole.encodings.1.relative_position_bias_table": (49, 2),
        "windowed.encodings.0.relative_position_bias_table": (9, 2),
        "windowed.encodings.2.relative_position_bias_table": (9, 2),
    }
    assert position.table_shapes() == {
        "whole.encodings.1.relative_position_bias_table": (4, 4),
        "windowed.encodings.0.relative_position_bias_table": (2, 2),
        "windowed.encodings.2.relative_position_bias_table": (2, 2),
    }
    assert position.layer_lists() == ["whole.encodings", "windowed.encodings"]
