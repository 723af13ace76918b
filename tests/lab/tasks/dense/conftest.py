"""One run of each dense task with everything that draws random numbers, which tests must not change."""

import pytest
from dense_runs import RICH, detector, segmenter

from graticule.lab.training.loop import train


@pytest.fixture(scope="session")
def segmentation_run(tmp_path_factory):
    return train(segmenter(**RICH), tmp_path_factory.mktemp("dense") / "segmentation", progress=False)


@pytest.fixture(scope="session")
def detection_run(tmp_path_factory):
    return train(detector(**RICH), tmp_path_factory.mktemp("dense") / "detection", progress=False)
