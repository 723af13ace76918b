import pytest
import timm

NAMES = ["levit_128s", "tiny_vit_5m_224", "efficientformer_l1", "efficientformerv2_s0", "efficientvit_m0"]


@pytest.mark.parametrize("model_name", NAMES)
def test_eval_returns_the_module(model_name):
    for module in timm.create_model(model_name).modules():
        assert module.eval() is module
