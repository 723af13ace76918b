import unittest

import torch
from transformers import Sam3ViTConfig
from transformers.models.sam3.modeling_sam3 import Sam3ViTLayer


class Sam3PositionsTest(unittest.TestCase):
    def test_positions_of_a_rectangle(self):
        config = Sam3ViTConfig(image_size=[42, 70], patch_size=14, window_size=3)
        positions = Sam3ViTLayer.precompute_positions(config, 0)
        rows, columns = torch.meshgrid(torch.arange(3.0), torch.arange(5.0), indexing="ij")
        torch.testing.assert_close(positions, torch.stack([columns, rows], -1).flatten(0, 1))
