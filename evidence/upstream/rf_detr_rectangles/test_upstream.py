import unittest

import torch
from transformers import RfDetrDinov2Config
from transformers.models.rf_detr.modeling_rf_detr import RfDetrDinov2Embeddings


class RfDetrRectanglesTest(unittest.TestCase):
    def test_windows_and_table_of_a_rectangle(self):
        embeddings = RfDetrDinov2Embeddings(
            RfDetrDinov2Config(hidden_size=8, patch_size=8, image_size=(32, 64), num_windows=2)
        )
        tokens = torch.arange(-1.0, 32)[None, :, None].expand(1, 33, 8)  # the class token, then 4 x 8 patches
        windows = embeddings.window_partition(tokens, 32, 64)[:, 1:, 0]
        torch.testing.assert_close(windows, torch.arange(32.0).view(2, 2, 2, 4).transpose(1, 2).reshape(4, 8))
        table = embeddings.position_embeddings
        torch.testing.assert_close(embeddings.interpolate_pos_encoding(table, 32, 64), table)
