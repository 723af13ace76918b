import unittest

import torch
from transformers import Dinov2Config, ViTConfig
from transformers.models.dinov2.modeling_dinov2 import Dinov2Embeddings
from transformers.models.vit.modeling_vit import ViTEmbeddings


class RectangularTableTest(unittest.TestCase):
    def test_interpolation_of_a_rectangular_table(self):
        for config_class, embeddings_class in ((ViTConfig, ViTEmbeddings), (Dinov2Config, Dinov2Embeddings)):
            embeddings = embeddings_class(config_class(hidden_size=8, patch_size=8, image_size=(32, 48)))
            rows = torch.arange(4.0).repeat_interleave(6)  # the row of each patch
            table = torch.cat([torch.zeros(1), rows])[None, :, None].expand(1, 25, 8)
            embeddings.position_embeddings.data.copy_(table)
            torch.testing.assert_close(embeddings.interpolate_pos_encoding(table, 32, 48), table)
            larger = embeddings.interpolate_pos_encoding(torch.zeros(1, 1 + 8 * 9, 8), 64, 72)[0, 1:, 0].view(8, 9)
            torch.testing.assert_close(larger, larger[:, :1].expand(8, 9))  # rows stay rows
