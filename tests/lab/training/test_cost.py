"""The cost of a forward pass: memory equals a count by hand, speed is positive."""

import torch
from torch import nn

import graticule
from graticule.lab.training.cost import inference_cost


class Steps(nn.Module):
    """Makes two tensors of its input's size, keeps both, then a small one."""

    def forward(self, x):
        a = x + 1
        b = a * 2
        return (a + b).sum()  # at its peak: a, b, their sum and the result


def test_memory_is_the_peak_of_living_tensors():
    x = torch.zeros(10, 100)
    cost = inference_cost(Steps(), x)
    assert cost.batch == 10
    assert cost.memory * 10 == 3 * x.numel() * 4 + 4  # and the result
    assert cost.images_per_second > 0


class Views(nn.Module):
    """Makes views and writes in place: no memory."""

    def forward(self, x):
        return x.view(-1).reshape(x.shape).transpose(0, 1).mul_(1)


def test_views_and_writing_in_place_take_none():
    assert inference_cost(Views(), torch.zeros(4, 5)).memory == 0


def test_a_larger_image_takes_more():
    model = graticule.create_model("vit_nano_patch4_28").eval()
    small, large = (inference_cost(model, torch.zeros(2, 1, side, side)) for side in (28, 56))
    assert large.memory > 3 * small.memory
