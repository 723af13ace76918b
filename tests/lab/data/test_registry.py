import importlib
import sys
from functools import partial

import numpy as np
import pytest

import graticule
from graticule.lab.data import sets
from graticule.lab.data.images import ArrayImages, DatasetInfo
from graticule.lab.data.module import DataModule
from graticule.lab.data.registry import DATASETS, list_datasets, load_dataset

INFO = DatasetInfo("noise", ("dark", "light"), 1, (8, 8), (0.5,), (0.3,))


def noise(split, root):
    images = np.random.default_rng(len(split)).integers(0, 256, (12, 8, 8), dtype=np.uint8)
    return ArrayImages(images, np.arange(12) % 2), INFO


pytestmark = pytest.mark.usefixtures("registered_data")


def test_a_registered_data_set_is_listed_loaded_and_makes_batches():
    assert graticule.register_dataset("noise")(noise) is noise
    assert "noise" in list_datasets()
    assert load_dataset("noise", "train")[1] is INFO
    data = DataModule("noise", size=(8, 8), batch_size=4)
    assert [(images.shape, len(labels)) for images, labels in data.train_dataloader()] == [((4, 1, 8, 8), 4)] * 3


def test_invalid_registrations_and_data_sets_are_refused():
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


def test_a_plugin_that_takes_the_name_of_ours_is_refused_even_if_it_comes_first(monkeypatch):
    monkeypatch.setattr(sets, "published", importlib.import_module(f"{sets.__name__}.published"))
    monkeypatch.delitem(sys.modules, f"{sets.__name__}.published")  # as if nothing was imported yet
    DATASETS.clear()
    monkeypatch.setattr(DATASETS, "_complete", False)
    with pytest.raises(ValueError, match="`name` must be new, got 'digits', which"):
        DATASETS.register("digits")(noise)
