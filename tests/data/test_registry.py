import subprocess
import sys
from functools import partial

import numpy as np
import pytest

import graticule
from graticule.data import ArrayImages, DataModule, DatasetInfo, list_datasets, load_dataset
from graticule.data.registry import DATASETS

INFO = DatasetInfo("noise", ("dark", "light"), 1, (8, 8), (0.5,), (0.3,))


def noise(split, root):
    images = np.random.default_rng(len(split)).integers(0, 256, (12, 8, 8), dtype=np.uint8)
    return ArrayImages(images, np.arange(12) % 2), INFO


@pytest.fixture(autouse=True)
def nothing_stays_registered():
    before = dict(DATASETS)
    yield
    DATASETS.clear()
    DATASETS.update(before)


def test_a_registered_data_set_is_listed_loaded_and_makes_batches():
    assert graticule.register_dataset("noise")(noise) is noise
    assert "noise" in list_datasets()
    assert load_dataset("noise", "train")[1] is INFO
    data = DataModule("noise", size=(8, 8), batch_size=4)
    data.setup()
    assert [(images.shape, len(labels)) for images, labels in data.train_dataloader()] == [((4, 1, 8, 8), 4)] * 3


def test_what_cannot_be_registered_or_is_no_data_set_is_refused():
    register = graticule.register_dataset
    register("noise")(noise)
    cases = [
        (lambda: register("digits")(noise), ValueError, "`name` must be new, got 'digits'"),
        (lambda: register("noise")(lambda split, root: None), ValueError, "`name` must be new, got 'noise'"),
        (lambda: register("my noise")(noise), ValueError, "identifier"),
        (lambda: register("other")(partial(noise, "train")), TypeError, "must be a function"),
        (lambda: register("other")(lambda split: None), TypeError, "function of split and folder"),
    ]
    for wrong, match in ((None, "images and a DatasetInfo"), (([1], INFO), "`labels`"), ((1, 2), "DatasetInfo")):
        name = f"wrong{len(cases)}"
        register(name)(lambda split, root, wrong=wrong: wrong)
        cases.append((partial(load_dataset, name, "train"), TypeError, match))
    for act, kind, match in cases:
        with pytest.raises(kind, match=match):
            act()


def test_a_plugin_that_takes_the_name_of_ours_is_refused_even_if_it_comes_first():
    script = (
        "import graticule\n"
        "@graticule.register_dataset('digits')\n"
        "def mine(split, root): ...\n"
        "import graticule.data.module\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "`name` must be new, got 'digits'" in found.stderr
