"""Malicious and broken data have no effect, and no option is accepted and ignored."""

import pytest
import torch

from graticule.lab.data.augmentation import Augmentation
from graticule.lab.data.images import DatasetInfo
from graticule.lab.data.module import DataModule
from graticule.lab.data.registry import load_dataset
from graticule.lab.data.transforms import training_transform
from image_files import picture, write_folder

FOLDER = DatasetInfo("image_folder", ("a", "b"), 3, None, (0.5,) * 3, (0.25,) * 3)
NATIVE = DatasetInfo("cifar10", ("a", "b"), 3, (32, 32), (0.5,) * 3, (0.25,) * 3)


def test_only_the_accepted_image_formats_are_opened(tmp_path):
    root = write_folder(tmp_path)
    picture(0).save(root / "val" / "cat" / "0.JPEG", format="EPS")  # Pillow would call Ghostscript to read it
    images, _ = load_dataset("image_folder", "test", root)
    with pytest.raises(ValueError, match="cannot identify"):
        images[0]


def test_without_augmentation_training_images_are_transformed_as_in_evaluation(tmp_path):
    data = DataModule("image_folder", root=write_folder(tmp_path), size=(24, 24), batch_size=6)
    data.setup()
    train = data.train_dataloader().dataset
    assert all(torch.equal(train[0, i][0], train[1, i][0]) for i in range(6))


@pytest.mark.parametrize("info", [FOLDER, NATIVE], ids=lambda info: info.name)
def test_padding_for_a_random_crop_is_used_or_refused(info):
    def sizes(**options):
        return str(training_transform(info, (32, 32), Augmentation(scale=(0.5, 1.0), **options)))

    try:
        with_padding = sizes(random_crop_padding=4)
    except ValueError:
        return
    assert with_padding != sizes()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_images_skipped_by_a_worker_are_known_to_the_main_process(tmp_path):
    path = write_folder(tmp_path) / "train" / "dog" / "0.JPEG"
    path.write_bytes(b"")
    data = DataModule("image_folder", root=tmp_path, size=(16, 24), batch_size=2, workers=2)
    data.setup()
    list(data.train_dataloader())
    assert [str(skipped) for skipped in data.skipped] == [str(path)]
