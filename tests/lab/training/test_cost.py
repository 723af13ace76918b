import torch

import graticule
from graticule.lab.training.cost import inference_cost


def test_a_pass_has_a_speed_and_its_memory_is_counted_on_gpus_alone():
    model = graticule.create_model("vit_nano_patch4_28", depth=1).eval()
    cost = inference_cost(model, torch.zeros(2, 1, 28, 28))
    assert cost.batch == 2 and 0 < cost.images_per_second < float("inf") and cost.memory is None
