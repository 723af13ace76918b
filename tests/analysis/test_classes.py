"""Probes of classes on frozen features."""

import pytest
import torch

import graticule
from graticule.analysis import pooled_features, probe_classes


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


def test_bad_input_is_refused():
    features, labels = blobs(1.0)
    for arguments, message in (
        ((features[:4], labels[:4]), "at least 10 images"),
        ((features, labels[:5]), "with n labels"),
        ((features, 0 * labels), "`labels` must be of two classes or more"),
        ((features, labels - 1), "from 0"),
        ((torch.ones(200, 6), labels), "`features` must be finite and must differ between images"),
        ((features * float("nan"), labels), "`features` must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            probe_classes(*arguments)
    with pytest.raises(ValueError, match="`probe` must be one of knn, ridge"):
        probe_classes(features, labels, "mean")
