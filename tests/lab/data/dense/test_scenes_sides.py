"""Scenes whose classes are positions, which a model without position cannot learn."""

import pytest
import torch

import graticule
from graticule.lab.data.sets.scenes import scenes_sides
from graticule.lab.tasks.segmentation import confusion, mean_iou


@pytest.fixture(scope="module")
def held_out():
    """Return three pairs of held-out scenes, (6, 3, 96, 96) in float64, and their classes."""
    images, _ = scenes_sides("test")
    pairs = [images.example(index) for index in range(6)]
    return torch.stack([image.double() / 255 - 0.3 for image, _ in pairs]), [
        torch.as_tensor(target["classes"]) for _, target in pairs
    ]


def segmenter(encoding, **options):
    """Return the model of the recipe with two blocks, in float64."""
    torch.manual_seed(0)
    options = {"decoder": "segmenter_linear", "depth": 2, "embed_dim": 24, "num_heads": 3} | options
    model = graticule.create_segmenter(
        "vit_nano_patch4_28", 3, encoding=encoding, in_chans=3, patch_size=8, img_size=96, **options
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # tables and biases start at or near zero
    return model.double().eval()


def exchanged(maps, axis=-1):
    """Exchange the left and the right half."""
    left, right = maps.chunk(2, axis)
    return torch.cat([right, left], axis)


def test_scenes_come_in_pairs_of_exchanged_halves_whose_classes_are_the_sides():
    images, info = scenes_sides("train")
    assert info.pixel_names == ("background", "left", "right") and len(images) == 2000
    for index in (0, 6):
        (image, target), (other, counterpart) = images.example(index), images.example(index + 1)
        assert torch.equal(torch.as_tensor(other), exchanged(torch.as_tensor(image)))
        classes, other_classes = (torch.as_tensor(entries["classes"]) for entries in (target, counterpart))
        assert set(classes[:, :48].unique().tolist()) == {0, 1} and set(classes[:, 48:].unique().tolist()) == {0, 2}
        assert torch.equal(exchanged(other_classes) > 0, classes > 0)
        assert not classes[:, [*range(4), *range(44, 52), *range(92, 96)]].any()  # the margins of the halves
        for box, label in zip(target["boxes"], target["labels"], strict=True):
            assert (box[2] <= 48) if label == 0 else (box[0] >= 48)
    assert not torch.equal(torch.as_tensor(images.example(2)[0]), torch.as_tensor(images.example(0)[0]))
    again, test = scenes_sides("train")[0], scenes_sides("test")[0]
    assert torch.equal(torch.as_tensor(again.example(3)[0]), torch.as_tensor(images.example(3)[0]))
    assert not torch.equal(torch.as_tensor(test.example(3)[0]), torch.as_tensor(images.example(3)[0]))


def test_without_position_predictions_for_permuted_patches_are_permuted_predictions(held_out):
    images, model = held_out[0][:1], segmenter("none")
    order = torch.randperm(144, generator=torch.Generator().manual_seed(1))
    patches = torch.nn.functional.unfold(images, 8, stride=8)
    permuted = torch.nn.functional.fold(patches[..., order], 96, 8, stride=8)
    logits, permuted_logits = (
        model.decoder(list(model.features(batch).values())).flatten(2) for batch in (images, permuted)
    )
    torch.testing.assert_close(permuted_logits, logits[..., order], rtol=0, atol=1e-11)


def test_the_ceiling_without_position_is_half_of_the_pixels_and_five_ninths(held_out):
    images, classes = held_out
    truth = torch.stack(classes)
    models = [segmenter("none") for _ in range(2)]
    torch.nn.init.normal_(models[1].decoder.head.bias, std=3.0)
    guesses = [model(images).argmax(1) for model in models]
    upper = truth.clamp(max=1)  # finds all digits, and calls the upper half of the image left, the lower one right
    upper[:, 48:] *= 2
    for guess in [*guesses, truth.clamp(max=1), upper]:
        matrix = sum(confusion(predicted, right, 3) for predicted, right in zip(guess, truth, strict=True))
        digits = matrix[1:]
        assert 2 * int(digits[:, 1:].diagonal().sum()) <= int(digits.sum())
        counts = torch.stack([matrix.diagonal(), matrix.sum(1), matrix.sum(0)])
        assert mean_iou(counts) <= 500 / 9 + 1e-9
    both, there, _ = counts[:, 1:].sum(1)  # of the last guess, which reaches the bound
    assert 2 * both == there and mean_iou(counts) > 55.5
