"""The linear probe of row and column with the removal of its directions, and probes of classes."""

import numpy as np
import pytest
import torch

import graticule
from graticule.analysis import pooled_features, probe_classes
from graticule.analysis.probe import PositionSums, labels_of
from graticule.position.grid import Grid
from in_turn import refusals
from tiny import assert_same

GRID = Grid(5, 7)


def sums(features, folds=5):
    """Add features (images, H * W, D) in batches of four images."""
    total = PositionSums(GRID, features.shape[-1], folds)
    for start in range(0, len(features), 4):
        total.add(features[start : start + 4])
    return total


def noise(images=30, channels=8):
    return torch.randn(images, GRID.patches, channels, dtype=torch.float64)


def carrying(direction, images=30, channels=8):
    """Return noise whose first channels contain row and column, mixed by `direction`, (2, 2)."""
    features = noise(images, channels)
    features[..., :2] = labels_of(GRID) @ direction
    return features


def test_row_and_column_go_from_minus_one_to_one_in_flattened_order():
    labels = labels_of(Grid(2, 3))
    assert labels.tolist() == [[-1, -1], [-1, 0], [-1, 1], [1, -1], [1, 0], [1, 1]]
    assert labels_of(Grid(1, 2)).tolist() == [[0, -1], [0, 1]]


def test_features_that_carry_row_and_column_have_r2_of_one_and_shuffled_labels_none():
    probe = sums(carrying(torch.tensor([[1.0, 2.0], [0.5, -1.0]], dtype=torch.float64))).probe()
    np.testing.assert_allclose(probe.mean, 1, atol=1e-6)
    assert (np.abs(probe.control_mean) < 0.02).all() and probe.r2.shape == probe.control.shape == (5, 2)
    assert (probe.examples, probe.channels) == (30 * 35, 8)


def test_the_score_of_a_fold_is_that_of_a_ridge_regression_of_the_other_folds():
    features = carrying(torch.eye(2, dtype=torch.float64)) + noise()
    total = sums(features)
    fold, others = features[0::5], torch.cat([features[k::5] for k in range(1, 5)])
    labels = labels_of(GRID)
    x, y = others.flatten(0, 1), labels.repeat(len(others), 1)
    mean, scale = x.mean(0), x.std(0, correction=0)
    scaled = (x - mean) / scale
    gram = scaled.T @ scaled / len(x) + 1e-2 * torch.eye(x.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(gram, scaled.T @ y / len(x))
    predicted = (fold - mean) / scale @ weights + y.mean(0)
    error = (predicted - labels).square().mean((0, 1))
    expected = 1 - error / labels.var(0, correction=0)
    scores = total._score([1, 2, 3, 4], 0, (1e-2,) * 4)
    torch.testing.assert_close(scores[:2], expected, rtol=1e-9, atol=1e-9)


def test_after_the_removal_no_feature_is_correlated_with_row_or_column():
    features = carrying(torch.tensor([[1.0, 2.0], [0.5, -1.0]], dtype=torch.float64)) + 0.3 * noise()
    erased = sums(features).eraser()(features)
    labels = labels_of(GRID).expand(len(features), -1, -1).flatten(0, 1)
    flat = erased.flatten(0, 1)
    assert float(((flat - flat.mean(0)).T @ labels).abs().max() / len(flat)) < 1e-12
    assert (sums(erased).probe().mean < 0.01).all()


def test_the_removal_in_two_channels_is_the_one_by_hand():
    """With independent channels of variance 1, of which the first two are row and column, these become their mean."""
    features = noise(200, 4)
    spread = labels_of(GRID).std(0, correction=0)
    features[..., :2] = labels_of(GRID) / spread
    flat = features[..., 2:].flatten(0, 1)
    known = torch.cat([labels_of(GRID).repeat(200, 1), torch.ones(len(flat), 1, dtype=torch.float64)], 1)
    features[..., 2:] = (flat - known @ torch.linalg.lstsq(known, flat).solution).unflatten(0, (200, -1))
    erased = sums(features).eraser()(features)
    assert_same(erased[..., :2], torch.zeros_like(erased[..., :2]), 1e-9)
    assert_same(erased[..., 2:], features[..., 2:], 1e-9)


def test_an_axis_of_one_patch_has_no_score():
    probe = PositionSums(Grid(1, 6), 3, folds=2).add(torch.randn(4, 6, 3)).probe()
    assert np.isnan(probe.mean[0]) and np.isfinite(probe.mean[1])


test_too_few_images_and_folds_are_refused = refusals(
    (lambda: sums(noise(4)).probe(), "`images` must be at least as many as folds, 5, got 4"),
    (lambda: PositionSums(GRID, 3, folds=1), "`folds` must be at least 2, got 1"),
)


def blobs(distance, seed=0):
    """Return features of two classes, Gaussian with this distance of the means, and labels."""
    labels = torch.arange(200) % 2
    noise = torch.randn(200, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    noise[:, 0] += distance * labels
    return noise, labels


@pytest.mark.parametrize("probe", ["knn", "ridge"])
def test_separate_classes_are_read_and_equal_ones_are_not(probe):
    assert probe_classes(*blobs(20.0), probe).double().mean() == 1
    assert 0.35 < probe_classes(*blobs(0.0), probe).double().mean() < 0.65


def test_ridge_reads_a_linear_direction_that_neighbors_miss_among_large_noise():
    features, labels = blobs(6.0)
    features[:, 1:] *= 100
    ridge, knn = (probe_classes(features, labels, probe).double().mean() for probe in ("ridge", "knn"))
    assert ridge > 0.97 and knn < 0.75


def test_no_image_is_predicted_from_itself():
    """With labels at random, more channels than images fit everything, but predict nothing."""
    features = torch.randn(60, 200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = torch.randint(2, (60,), generator=torch.Generator().manual_seed(2))
    for probe in ("knn", "ridge"):
        assert probe_classes(features, labels, probe).double().mean() < 0.75


def test_features_are_the_input_of_the_classifier():
    model = graticule.create_model("vit_nano_patch4_28", depth=1).eval()
    images, labels = torch.randn(3, 1, 28, 28), torch.tensor([0, 1, 1])
    features, classes = pooled_features(model, [(images[:2], labels[:2]), (images[2:], labels[2:])])
    with torch.no_grad():
        torch.testing.assert_close(model.head(features.float()), model(images))
    assert torch.equal(classes, labels)


FEATURES, LABELS = blobs(1.0)
test_bad_input_is_refused = refusals(
    ((FEATURES[:4], LABELS[:4]), "at least 10 images"),
    ((FEATURES, LABELS[:5]), "with n labels"),
    ((FEATURES, 0 * LABELS), "`labels` must be of two classes or more"),
    ((FEATURES, LABELS - 1), "from 0"),
    ((torch.ones(200, 6), LABELS), "`features` must be finite and must differ between images"),
    ((FEATURES * float("nan"), LABELS), "`features` must be finite"),
    ((FEATURES, LABELS, "mean"), "`probe` must be one of knn, ridge"),
    call=lambda arguments: probe_classes(*arguments),
)
