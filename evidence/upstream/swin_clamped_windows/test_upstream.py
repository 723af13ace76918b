import unittest

import torch
from transformers import ClapAudioConfig, DonutSwinConfig, SwinConfig
from transformers.models.clap.modeling_clap import ClapAudioLayer
from transformers.models.donut.modeling_donut_swin import DonutSwinLayer
from transformers.models.swin.modeling_swin import SwinLayer


class ClampedWindowsTest(unittest.TestCase):
    def test_windows_after_a_smaller_image(self):
        for config, layer in (
            (SwinConfig, SwinLayer),
            (DonutSwinConfig, DonutSwinLayer),
            (ClapAudioConfig, ClapAudioLayer),
        ):
            layer = layer(config(window_size=8), 8, (16, 16), 2, shift_size=4).eval()
            layer(torch.zeros(1, 64, 8), (8, 8))
            layer(torch.zeros(1, 256, 8), (16, 16))
            self.assertEqual((layer.window_size, layer.shift_size), (8, 4))
