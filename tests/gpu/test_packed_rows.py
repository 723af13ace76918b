"""Images of several sizes in one row, whose attention is one kernel on a GPU, are computed as each alone."""

import pytest
import torch
from device_models import PLAIN, assert_close_in_norm, model_of

#: More than 128 tokens in the row, below which a GPU takes another kernel.
SIZES = ((64, 64), (32, 96), (64, 64), (32, 32))
ENCODINGS = ["learnable+rope", "relative_bias", "alibi", "shaw"]
#: Heads of 32 channels, as the kernel takes no fewer than 16.
SIZE = {"embed_dim": 96, "num_heads": 3, "patch_size": 8, "depth": 2, "class_token": False, "global_pool": "avg"}


def images_of(seed, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, *size, generator=generator).to(device, dtype) for size in SIZES]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_packed_row_gives_the_outputs_of_separate_images(device, encoding):
    model = model_of((PLAIN, encoding, "default"), **SIZE).to(device)
    images = images_of(0, device)
    alone = torch.cat([model(image[None]) for image in images])
    assert_close_in_norm({"logits": model.forward_packed(images)}, {"logits": alone}, 1e-5)
    flex = model.forward_packed(images, flex=True)
    assert flex.device == device
    assert_close_in_norm({"logits": flex}, {"logits": alone}, 1e-4)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_packed_row_gives_the_gradients_of_separate_images(device, encoding):
    """With one kernel on a GPU; on the CPU, where it has no backward pass, with attention image by image."""
    model = model_of((PLAIN, encoding, "lape" if encoding == "learnable+rope" else "default"), **SIZE).to(device)
    images = images_of(0, device)
    gradients = []
    for compute in (
        lambda: torch.cat([model(image[None]) for image in images]),
        lambda: model.forward_packed(images, flex=device.type == "cuda"),
    ):
        model.zero_grad()
        compute().square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert_close_in_norm(gradients[1], gradients[0], 1e-4)


@torch.no_grad()
def test_a_list_of_images_gives_the_outputs_of_separate_images_on_the_device(device):
    model = model_of((PLAIN, "learnable+rope", "default"), **SIZE).to(device)
    images = images_of(0, device)
    alone = torch.cat([model(image[None]) for image in images])
    assert_close_in_norm({"logits": model(images)}, {"logits": alone}, 1e-5)
