import unittest

import torch
from transformers.vision_utils import get_vision_nearest_position_ids


class NearestPositionIdsTest(unittest.TestCase):
    def test_ids_of_the_own_grid(self):
        for side in (14, 27, 32, 70):
            ids = get_vision_nearest_position_ids(torch.tensor([[side, side]]), side)
            torch.testing.assert_close(ids, torch.arange(side * side))
