import importlib
import sys
from functools import partial

import numpy as np
import pytest

import graticule
from graticule.lab.data import sets
from graticule.lab.data.images import ArrayImages, DatasetInfo
from graticule.lab.data.module import DataModule
from graticule.lab.data.registry import DATASETS, TEXTS, Document, list_datasets, list_texts, load_dataset, load_text
from graticule.lab.data.text_module import TextModule

INFO = DatasetInfo("noise", ("dark", "light"), 1, (8, 8), (0.5,), (0.3,))


def noise(split, root):
    images = np.random.default_rng(len(split)).integers(0, 256, (12, 8, 8), dtype=np.uint8)
    return ArrayImages(images, np.arange(12) % 2), INFO


def counting(root):
    documents = [Document(f"from {n}", " ".join(str(n + i) for i in range(20))) for n in range(10)]
    return {"train": documents[:8], "test": documents[8:]}


pytestmark = pytest.mark.usefixtures("registered_data")


def test_a_registered_data_set_is_listed_loaded_and_makes_batches():
    assert graticule.register_dataset("noise")(noise) is noise
    assert "noise" in list_datasets()
    assert load_dataset("noise", "train")[1] is INFO
    data = DataModule("noise", size=(8, 8), batch_size=4)
    data.setup()
    assert [(images.shape, len(labels)) for images, labels in data.train_dataloader()] == [((4, 1, 8, 8), 4)] * 3


def test_a_registered_text_is_listed_loaded_and_makes_windows():
    assert graticule.register_text("counting")(counting) is counting
    assert "counting" in list_texts() and "counting" not in list_datasets()
    assert load_text("counting") == counting(None)
    data = TextModule("counting", context=8, batch_size=4)
    data.setup()
    inputs, targets = next(iter(data.train_dataloader()))
    assert inputs.shape == targets.shape == (4, 8)
    assert data.num_bytes("test") == sum(len(document.text) + 1 for document in counting(None)["test"])


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
    text = graticule.register_text
    text("counting")(counting)
    cases += [
        (lambda: text("pydoc")(counting), ValueError, "`name` must be new, got 'pydoc', which is the text pydoc"),
        (lambda: text("counting")(lambda root: None), ValueError, "`name` must be new, got 'counting'"),
        (lambda: text("my text")(counting), ValueError, "a text must be an identifier"),
        (lambda: text("other")(partial(counting)), TypeError, "the text 'other' must be a function"),
        (lambda: text("other")(noise), TypeError, "function of folder: missing a required argument"),
    ]
    wrong_texts = (
        (None, TypeError, "a dictionary with 'train' and 'test', got None"),
        ({"train": [], "tests": []}, TypeError, "a dictionary with 'train' and 'test'"),
        ({"train": ["a text"], "test": []}, TypeError, "a list of Documents for 'train'"),
        ({**counting(None), "test": []}, ValueError, "documents with text for 'test', got 0"),
    )
    for wrong, kind, match in wrong_texts:
        name = f"wrong{len(cases)}"
        text(name)(lambda root, wrong=wrong: wrong)
        cases.append((partial(load_text, name), kind, match))
    for wrong, match in ((None, "images and a DatasetInfo"), (([1], INFO), "`labels`"), ((1, 2), "DatasetInfo")):
        name = f"wrong{len(cases)}"
        register(name)(lambda split, root, wrong=wrong: wrong)
        cases.append((partial(load_dataset, name, "train"), TypeError, match))
    for act, kind, match in cases:
        with pytest.raises(kind, match=match):
            act()


def test_a_plugin_that_takes_the_name_of_ours_is_refused_even_if_it_comes_first(monkeypatch):
    for table, file in ((DATASETS, "published"), (TEXTS, "texts")):  # as if nothing was imported yet
        monkeypatch.setattr(sets, file, importlib.import_module(f"{sets.__name__}.{file}"))
        monkeypatch.delitem(sys.modules, f"{sets.__name__}.{file}")
        table.clear()
        monkeypatch.setattr(table, "_complete", False)
    for table, name in ((DATASETS, "digits"), (TEXTS, "pydoc")):
        with pytest.raises(ValueError, match=f"`name` must be new, got '{name}', which"):
            table.register(name)(noise)
