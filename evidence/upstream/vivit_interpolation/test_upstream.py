import unittest

import torch
from transformers import VivitConfig
from transformers.models.vivit.modeling_vivit import VivitEmbeddings


class VivitInterpolatePosEncodingTest(unittest.TestCase):
    def test_each_frame_is_interpolated(self):
        config = VivitConfig(hidden_size=8, image_size=(32, 48), num_frames=4, tubelet_size=[2, 8, 8])
        embeddings = VivitEmbeddings(config)
        table = torch.tensor([0.0] + [1.0] * 24 + [2.0] * 24)[None, :, None].expand(1, 49, 8)
        embeddings.position_embeddings.data.copy_(table)
        native = embeddings.interpolate_pos_encoding(torch.zeros(1, 49, 8), 32, 48)
        torch.testing.assert_close(native, table)
        larger = embeddings.interpolate_pos_encoding(torch.zeros(1, 1 + 2 * 8 * 5, 8), 64, 40)
        expected = torch.tensor([0.0] + [1.0] * 40 + [2.0] * 40)[None, :, None].expand(1, 81, 8)
        torch.testing.assert_close(larger, expected)
