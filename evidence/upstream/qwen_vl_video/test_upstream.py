import unittest
from functools import partial
from types import SimpleNamespace

import torch
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel


class Qwen2VLRopeIndexTest(unittest.TestCase):
    def test_text_after_a_long_video(self):
        model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
        model.get_vision_position_ids = partial(Qwen2VLModel.get_vision_position_ids, None)
        types = torch.tensor([[0, *[2] * 5, 0, 0]])
        positions, deltas = Qwen2VLModel.get_rope_index(model, types, types, video_grid_thw=torch.tensor([[5, 2, 2]]))
        self.assertEqual(positions[0, 0].tolist(), [0, 1, 2, 3, 4, 5, 6, 7])
        self.assertEqual(deltas.tolist(), [[0]])
