import unittest

from transformers.models.phi4_multimodal.modeling_phi4_multimodal import Phi4MultimodalVisionEmbeddings


class Phi4MultimodalVisionEmbeddingsTest(unittest.TestCase):
    def test_the_method_of_siglip_is_not_inherited(self):
        self.assertFalse(hasattr(Phi4MultimodalVisionEmbeddings, "interpolate_pos_encoding"))
