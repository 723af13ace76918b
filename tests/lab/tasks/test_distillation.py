"""Distillation: the teacher's part of the loss, its inputs, and its unchanged state."""

import copy
import math

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from graticule.checkpoints.read import read_checkpoint
from graticule.lab.data.images import DatasetInfo
from graticule.lab.data.sets.published import DIGITS
from graticule.lab.tasks.classification import Classification
from graticule.lab.tasks.distillation import Teacher, build_teacher
from graticule.lab.tasks.options import Distillation, ImageMixing, Recipe
from graticule.lab.training.loop import train
from graticule.lab.training.task import build_model

COLOURS = DatasetInfo("colours", ("a", "b"), 3, None, (0.5, 0.4, 0.3), (0.2, 0.3, 0.25))
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LN2, LN3 = math.log(2), math.log(3)
#: A student of every kind, by the input of its classifier.
STUDENTS = {
    "distillation token": {
        "model": "deit_tiny_distilled_patch16_224",
        "patch_size": 7,
        "model_kwargs": ("embed_dim=24", "depth=2"),
    },
    "class token": {"model": "vit_nano_patch4_28", "model_kwargs": ("depth=2",)},
    "average": {"model": "vit_nano_patch4_28", "model_kwargs": ("depth=2",), "global_pool": "avg"},
    "mixer": {"model": "gmlp_nano_patch4_28", "model_kwargs": ("num_blocks=2",)},
}


class Probe(nn.Module):
    """Records its inputs."""

    def forward(self, images):
        self.seen = images
        return images.mean((2, 3))[:, :2]


def teacher_of(info=COLOURS, size=(3, 12, 20), mean=MEAN, std=STD, **options) -> Teacher:
    return Teacher(Probe(), Distillation(**options), info, mean=mean, std=std, size=size)


def normalized(raw: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    return (raw - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def small(**kwargs) -> Recipe:
    options = {"limit_train": 24, "limit_test": 10, "batch_size": 8, "epochs": 1, "accelerator": "cpu"}
    return Recipe(**options | kwargs)


@pytest.fixture(scope="module")
def convnet(tmp_path_factory):
    """Return the weights of a small convnet for ten classes, with statistics of some images."""
    torch.manual_seed(1)
    model = timm.create_model("test_resnet", num_classes=10)
    with torch.no_grad():
        model.train()(torch.randn(8, 3, 64, 64))
    path = tmp_path_factory.mktemp("teacher") / "convnet.pth"
    torch.save({"model": model.state_dict()}, path)
    return path


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory):
    """Train a run at 32 x 32."""
    recipe = small(model="posmlp_nano_32", img_size=(32, 32))
    return train(recipe, tmp_path_factory.mktemp("teacher") / "run", progress=False)


@pytest.mark.parametrize("form", ["hard", "soft"])
def test_the_ends_of_alpha_are_the_plain_loss_and_the_teacher_alone(form):
    student, teacher, loss = torch.randn(6, 5), torch.randn(6, 5), torch.tensor(1.7)
    assert torch.equal(teacher_of(form=form, alpha=0.0).combine(loss, student, teacher), loss)
    alone = [teacher_of(form=form, alpha=1.0).combine(other, student, teacher) for other in (loss, loss * 9)]
    assert torch.equal(*alone)
    half = teacher_of(form=form, alpha=0.5).combine(loss, student, teacher)
    torch.testing.assert_close(half, (loss + alone[0]) / 2)
    soft = Distillation(form="soft")
    assert (Distillation().share, soft.share, soft.tau) == (0.5, 0.1, 3.0)  # of DeiT


def test_a_teacher_of_the_same_normalisation_and_size_sees_the_students_images_bit_for_bit():
    teacher, images = teacher_of(mean=COLOURS.mean, std=COLOURS.std), torch.randn(2, 3, 12, 20)
    teacher(images)
    assert torch.equal(teacher.model.seen, images)


@pytest.mark.parametrize("size", [(12, 20), (6, 10), (25, 31), (12, 40)])
@pytest.mark.parametrize("info", [COLOURS, DIGITS], ids=["colors", "gray"])
def test_the_teacher_receives_the_raw_image_in_its_own_normalization_size_and_channels(info, size):
    teacher, raw = teacher_of(info), torch.rand(2, info.channels, *size)
    teacher(normalized(raw, info.mean, info.std))
    resized = raw if size == (12, 20) else F.interpolate(raw, (12, 20), mode="bicubic", antialias=True)
    expected = normalized(resized.expand(-1, 3, -1, -1), MEAN, STD)
    torch.testing.assert_close(teacher.model.seen, expected, atol=1e-4, rtol=1e-4)


def test_a_teacher_is_never_trained_nor_copied(convnet):
    teacher = build_teacher(Distillation(teacher="test_resnet", teacher_checkpoint=convnet), DIGITS, (28, 28))
    assert not any(module.training for module in teacher.modules())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert not teacher(torch.randn(2, 1, 28, 28, requires_grad=True)).requires_grad
    task = Classification(small())
    task.teacher = teacher
    assert copy.deepcopy(task) is task


@pytest.mark.parametrize(
    "options",
    [
        {"model_kwargs": ("depth=2",), "ema_decay": 0.9},
        {**STUDENTS["distillation token"], "precision": "bf16-true"},
        {"model_kwargs": ("depth=2",), "precision": "bf16-mixed", "mixing": ImageMixing(mixup=0.8, cutmix=1.0)},
    ],
    ids=["averaged", "distillation token, bfloat16", "mixed"],
)
def test_training_does_not_change_or_save_the_teacher(tmp_path, monkeypatch, convnet, options):
    distillation = Distillation(teacher="test_resnet", teacher_checkpoint=convnet)
    teacher = build_teacher(distillation, DIGITS, (28, 28))
    monkeypatch.setattr("graticule.lab.tasks.classification.build_teacher", lambda *_: teacher)
    run = train(small(distillation=distillation, **options), tmp_path / "run", progress=False)
    before, after = read_checkpoint(convnet)["model"], teacher.model.state_dict()
    assert run.finished and before.keys() == after.keys()
    assert any(name.endswith("running_mean") for name in before)
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert not any("teacher" in name for name in read_checkpoint(run.last)["state_dict"])
    assert run.recipe().distillation == distillation
    assert run.model()(torch.randn(2, 1, 28, 28)).shape == (2, 10)


def gradients(student: str, options: Distillation, labels: torch.Tensor) -> dict:
    """Return the gradients of one step of a student; the brighter the image, the higher the teacher's class of ten."""
    recipe = small(**STUDENTS[student], distillation=options)
    torch.manual_seed(0)
    model = build_model(recipe, num_classes=10, channels=1)

    class Bright(nn.Module):
        def forward(self, images):
            return images.mean((1, 2, 3))[:, None] * torch.arange(10.0)

    task = Classification(recipe)
    task.teacher = Teacher(Bright(), options, DIGITS, mean=(0.5,), std=(0.5,), size=(1, 28, 28))
    if hasattr(model, "set_distilled_training"):
        model.set_distilled_training(True)
    torch.manual_seed(1)
    task.loss(model.train(), (torch.randn(8, 1, 28, 28), labels), 0).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("form", ["hard", "soft"])
@pytest.mark.parametrize("student", STUDENTS)
def test_labels_reach_one_head_and_the_teacher_the_other_or_both_the_only_one(student, form):
    first, second = torch.arange(8), torch.arange(8).flip(0)
    labelled = [gradients(student, Distillation(form=form, alpha=0.0), labels) for labels in (first, second)]
    taught = [gradients(student, Distillation(form=form, alpha=1.0), labels) for labels in (first, second)]
    both = gradients(student, Distillation(form=form, alpha=0.5), first)
    assert not torch.equal(labelled[0]["head.weight"], labelled[1]["head.weight"])
    for name, gradient in both.items():  # the step is the mean of the two
        torch.testing.assert_close(gradient, (labelled[0][name] + taught[0][name]) / 2, atol=1e-6, rtol=1e-4)
        assert torch.equal(taught[0][name], taught[1][name])  # it does not depend on labels
    if student == "distillation token":
        assert not labelled[0]["head_dist.weight"].any() and not taught[0]["head.weight"].any()
        assert labelled[0]["head.weight"].any() and taught[0]["head_dist.weight"].any()
    else:
        assert labelled[0]["head.weight"].any() and taught[0]["head.weight"].any()


def test_a_run_as_teacher_receives_its_own_size_and_normalization(teacher_run):
    teacher = build_teacher(Distillation(teacher=str(teacher_run.folder)), DIGITS, (28, 28))
    images, _ = teacher_run.data().test_images((32, 32), range(4))
    with torch.no_grad():
        assert torch.equal(teacher(images), teacher_run.model()(images))


def test_teachers_that_do_not_fit_the_student_are_refused(convnet, teacher_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("test_resnet", "mine"):
        (tmp_path / name).mkdir()  # a folder does not shadow the name of a teacher
    torch.save({**read_checkpoint(convnet)["model"], "conv1.0.weight": torch.zeros(1)}, "shape.pth")
    (tmp_path / "text.pth").write_text("no weights")
    gray = DatasetInfo("gray", ("a", "b"), 1, None, (0.5,), (0.5,))
    run = str(teacher_run.folder)
    refused = [
        ("test_resnt", None, DIGITS, "got 'test_resnt': there is no such model; did you mean 'test_resnet'"),
        ("regnety_160.deit", None, DIGITS, "did you mean .*'regnety_160.deit_in1k'"),
        ("mine", None, DIGITS, r"did you mean '\./mine'"),
        ("test_resnet", None, DIGITS, "test_resnet has no weights: give `distillation.teacher_checkpoint`"),
        ("test_resnet", convnet, COLOURS, "where the model has"),
        (run, None, gray, "must have the classes of"),
        ("test_convnext", convnet, DIGITS, "it lacks"),
        ("test_resnet", "shape.pth", DIGITS, r"conv1.0.weight is \(1,\) where the model has"),
        ("test_resnet", "text.pth", DIGITS, "not a checkpoint"),
        (run, convnet, DIGITS, "`distillation.teacher_checkpoint` must be left out"),
    ]
    for teacher, checkpoint, info, message in refused:
        with pytest.raises(ValueError, match=message):
            build_teacher(Distillation(teacher=teacher, teacher_checkpoint=checkpoint), info, (28, 28))
    with pytest.raises(ValueError, match=r"`distillation.teacher` must take images of 3 channels.*got one of 1"):
        teacher_of(COLOURS, (1, 12, 20), (0.5,), (0.5,))
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError, match="`run` must be the folder of a run"):
            build_teacher(Distillation(teacher=str(folder)), DIGITS, (28, 28))
    with pytest.raises(FileNotFoundError, match=r"`distillation.teacher_checkpoint` must be a file"):
        build_teacher(Distillation(teacher="test_resnet", teacher_checkpoint="none.pth"), DIGITS, (28, 28))
