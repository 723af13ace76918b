"""Training with a budget of tokens: each step is one packed row of images of different sizes."""

import itertools

import numpy as np
import pytest
import torch

from graticule.lab.data.sampling import BatchOrder, EpochSampler
from graticule.lab.tasks.classification import Classification, Mixing, Recipe
from graticule.lab.training.task import build_data, build_model

SIZES, TOKENS = ("16", "24", "16x32"), np.array([17, 37, 33])  # patches of 4 px, and a class token


def packed(**options):
    given = {"img_size": (16, 16), "train_sizes": SIZES, "tokens_per_step": 200, "limit_train": 60, "limit_test": 20}
    return Recipe(**{**given, "batch_size": 8, "model_kwargs": ("depth=2",), "accelerator": "cpu", **options})


def order(seed=0, budget=200, most=8, **shares):
    return BatchOrder(EpochSampler(300, seed), most, tokens=TOKENS.tolist(), budget=budget, **shares)


def epoch(batches, number=0):
    batches.sampler.set_epoch(number)
    return list(batches)


def test_each_step_has_as_many_images_as_fit_into_the_budget():
    steps = epoch(order())
    counts = [TOKENS[[size for *_, size in step]] for step in steps]
    assert sorted(index for step in steps for _, index, _ in step) == list(range(300))
    for own, following in itertools.pairwise(counts):
        assert own.sum() <= 200 and len(own) <= 8
        assert len(own) == 8 or own.sum() + following[0] > 200
    assert {len(own) for own in counts} >= {5, 6, 7}


def test_epochs_have_the_same_steps_and_an_image_has_other_sizes():
    first, second = epoch(order(), 0), epoch(order(), 1)
    assert [[size for *_, size in step] for step in first] == [[size for *_, size in step] for step in second]
    sizes = [{index: size for step in each for _, index, size in step} for each in (first, second)]
    changed = sum(sizes[0][index] != sizes[1][index] for index in range(300))
    assert abs(changed - 200) < 5 * (300 * 2 / 9) ** 0.5  # two of three sizes are others; five standard deviations
    assert epoch(order(seed=1)) != first


def test_processes_and_micro_batches_share_the_steps_and_their_weighted_mean_is_that_of_a_step():
    whole = epoch(order())
    parts = [order(rank=rank, world_size=2, parts=2) for rank in range(2)]
    shares = [epoch(part) for part in parts]
    for step in range(parts[0].steps):
        numbers = range(2 * step, 2 * step + 2)
        assert sorted(key for share in shares for n in numbers for key in share[n]) == sorted(whole[step])
        weights = [part.weight(n) / len(share[n]) for part, share in zip(parts, shares, strict=True) for n in numbers]
        assert weights == pytest.approx([4 / len(whole[step])] * 4)


@pytest.mark.parametrize("encoding", ["learnable + rope", "relative_bias"])
def test_the_gradients_of_a_packed_step_are_those_of_its_images_alone(encoding):
    recipe = packed(encoding=encoding, joining="lape" if encoding != "relative_bias" else "default")
    task, data = Classification(recipe), build_data(recipe)
    model = build_model(recipe, num_classes=10).double()
    task.setup(model, data, torch.device("cpu"))
    images, labels = next(iter(data.train_dataloader()))
    images = [image.double() for image in images]
    assert len({image.shape for image in images}) == 3
    alone = [(image[None], label[None]) for image, label in zip(images, labels, strict=True)]
    found = []
    for batches in ([(images, labels)], alone):
        model.zero_grad()
        for batch in batches:
            (task.loss(model, batch, 0) / len(batches)).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for row, each in zip(*found, strict=True):
        torch.testing.assert_close(row, each, rtol=0, atol=1e-12)


def test_workers_load_the_same_packed_steps():
    here, there = (list(build_data(packed(workers=count)).train_dataloader()) for count in (0, 1))
    for (images, labels), (expected, classes) in zip(here, there, strict=True):
        assert torch.equal(labels, classes)
        assert all(torch.equal(one, other) for one, other in zip(images, expected, strict=True))


def test_a_step_that_cannot_be_packed_is_refused_before_training():
    for options, message in [
        ({"tokens_per_step": 36}, "`tokens_per_step` must be at least the 37 tokens of the largest image for each of"),
        ({"tokens_per_step": 73, "accumulate": 2}, "devices x nodes x accumulate, 1 x 2, got 73"),
        ({"encoding": "peg"}, "must be None in a row of several images: it needs the grid of each"),
        ({"drop_path_rate": 0.1}, "`drop_path_rate` and `patch_drop_rate` must be 0 to train on rows"),
        ({"model": "swin_tiny_patch4_window7_224", "model_kwargs": ()}, "must be passed to `forward` in SwinTransf"),
        ({"train_sizes": ("18", "24")}, "`img_size` must be a positive multiple of the patch size, got height 18"),
        ({"train_sizes": ("24",)}, "`train_sizes` must be two sizes or more with `tokens_per_step`, got 1"),
        ({"mixing": Mixing(mixup=0.5)}, "`mixing.mixup` must be left out with `tokens_per_step`"),
        ({"compile": True}, "`compile` must be left out with `tokens_per_step`"),
    ]:
        with pytest.raises(ValueError, match=message):
            recipe = packed(**options)
            build_data(recipe).train_order(accumulate=recipe.accumulate)


@pytest.mark.parametrize("encoding", ["learnable", "relative_bias", "rope", "liere", "gpsa", "irpe"])
def test_tokens_are_counted_without_values_of_the_model(encoding):
    data = build_data(packed(encoding=encoding))
    assert data.tokens == TOKENS.tolist()
