"""Distillation: learning from a teacher in addition to the labels, in DeiT's soft and hard form."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.checkpoints.load import load_checkpoint, load_own
from graticule.lab.data.images import DatasetInfo, check_class_names, same_classes
from graticule.lab.tasks.options import Distillation
from graticule.lab.training.opening import create_named, is_ours, label_names
from graticule.lab.training.run import Run
from graticule.registry.checks import is_path


class Teacher(nn.Module):
    r"""A trained model that classifies the images of a student, and the loss with its outputs.

    It is in evaluation mode, without gradients, and no part of the student, whose modules are trained, averaged and
    saved.

    It gets the same augmented and mixed images as the student, as in DeiT's code, but in its own format: resized to its
    own size (bicubic, antialiased) if that differs, in its own normalization,

    .. math:: x_t = (x_s \sigma_s + \mu_s - \mu_t) / \sigma_t,

    a gray image repeated in three channels if it takes three.

    Reference: Training data-efficient image transformers & distillation through attention (Touvron et al., 2021).

    Args:
        model: images (B, C, height, width) to logits (B, num_classes).
        options: form and share of the loss.
        info: facts of the student's images.
        mean: mean of the teacher's normalization, one value per channel, in [0, 1].
        std: standard deviation of the teacher's normalization.
        size: channels, height and width of the teacher's images, in pixels.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        model: nn.Module,
        options: Distillation,
        info: DatasetInfo,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        size: tuple[int, int, int],
    ) -> None:
        super().__init__()
        channels = size[0]
        if channels != info.channels and (info.channels, channels) != (1, 3):
            raise ValueError(
                f"`distillation.teacher` must take images of {info.channels} channels, as in {info.name} (or 3 if they "
                f"are gray), got one of {channels}."
            )
        self.model, self.options, self.size = model, options, size[1:]
        mean_t, std_t, mean_s, std_s = (
            torch.tensor(values, dtype=torch.float64) for values in (mean, std, info.mean, info.std)
        )
        # a scalar of the student is broadcast to the channels of the teacher
        for name, values in (("scale", std_s / std_t), ("shift", (mean_s - mean_t) / std_t)):
            self.register_buffer(name, values.float().expand(channels)[:, None, None].clone(), persistent=False)
        self.requires_grad_(False)
        self.eval()

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, num_classes) of the student's images (B, C, height, width), in its normalization."""
        images = images.to(self.scale.dtype)
        if images.shape[-2:] != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        return self.model(images * self.scale + self.shift)

    def combine(self, loss: Tensor, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        r"""Return the student's loss combined with the teacher's, whose share is alpha.

        .. math::
            \text{hard:}\quad & (1 - \alpha)\, CE(\psi(Z_s), y) + \alpha\, CE(\psi(Z_s), y_t),
                \quad y_t = \arg\max_c Z_t(c) \\
            \text{soft:}\quad & (1 - \alpha)\, CE(\psi(Z_s), y)
                + \alpha \tau^2\, KL(\psi(Z_t / \tau) \,\|\, \psi(Z_s / \tau))

        Both are means over the images; softmax (psi) and logarithm are at least in float32. y_t is not smoothed.

        Reference: Touvron et al. (2021), Eq. 3 (alpha = 1/2) and Eq. 2 (lambda = alpha = 0.1, tau = 3).

        Paper and code disagree: Eq. 2 writes KL(student, teacher); the code computes the divergence of the student from
        the teacher's distribution, as in Hinton et al. (2015), and so does this. The code divides the sum over images
        also by the number of classes (issue 61 of DeiT's repository); here it is the mean over images, as in Eq. 2. Its
        defaults are alpha = 0.5 and tau = 1 for both forms; ours are the paper's.

        Args:
            loss: the student's loss from the labels, a mean over the batch, with the smoothing or mixing of the recipe.
            student_logits: (B, num_classes), from the head of the distillation token if the student has one
                (`set_distilled_training`); otherwise from its only classifier, which then learns from both (CPVT's
                models; "hard distillation" in DeiT's Table 3, marked there as without labels, while Eq. 3 has both).
            teacher_logits: (B, num_classes), of the same images.
        """
        share, tau = self.options.share, self.options.tau
        exact = torch.promote_types(student_logits.dtype, torch.float32)  # keeps float64
        student, teacher = student_logits.to(exact), teacher_logits.to(exact)
        if self.options.form == "hard":
            learned = F.cross_entropy(student, teacher.argmax(-1))
        else:
            of_student, of_teacher = (F.log_softmax(logits / tau, -1) for logits in (student, teacher))
            learned = tau**2 * F.kl_div(of_student, of_teacher, reduction="batchmean", log_target=True)
        return (1 - share) * loss + share * learned


def build_teacher(options: Distillation, info: DatasetInfo, size: tuple[int, int]) -> Teacher | None:
    """Build the teacher of a student that sees images of `info` at `size` = (height, width); None without a name.

    For a run, the teacher is its best checkpoint, at its training size and in the normalization of its data. A named
    model is built by timm, for the size and in the normalization of its configuration (a name can include that, such as
    regnety_160.deit_in1k); nothing is downloaded.
    """
    if options.teacher is None:
        return None
    with torch.random.fork_rng(devices=[]):  # the student's initialization does not depend on the teacher
        build = _run_teacher if is_path(options.teacher) else _named_teacher
        teacher = build(options.teacher, options, info)
    logits = teacher(torch.zeros(1, info.channels, *size))
    if not isinstance(logits, Tensor) or logits.shape != (1, info.num_classes):
        raise ValueError(
            f"`distillation.teacher` must give {info.num_classes} logits, one per class, got {options.teacher}."
        )
    return teacher


def _run_teacher(folder: str, options: Distillation, info: DatasetInfo) -> Teacher:
    if options.teacher_checkpoint is not None:
        raise ValueError(
            f"`distillation.teacher_checkpoint` must be left out for a run, got {str(options.teacher_checkpoint)!r}."
        )
    run = Run.open(folder)
    known = run.task().images(run.described())
    if known is None:
        raise ValueError(f"`distillation.teacher` must be a run of an image classifier, got {folder!r}.")
    if not same_classes(known.class_names, info.class_names):
        check_class_names(info.class_names, known.class_names, f"`distillation.teacher` {folder}")
    size = (known.channels, *run.recipe().img_size)
    return Teacher(run.model(), options, info, mean=known.mean, std=known.std, size=size)


def _named_teacher(name: str, options: Distillation, info: DatasetInfo) -> Teacher:
    model, path = create_named(name, "distillation.teacher", num_classes=info.num_classes), options.teacher_checkpoint
    if path is None:
        raise ValueError(f"`distillation.teacher` {name} has no weights: give `distillation.teacher_checkpoint`, too.")
    if not path.is_file():
        raise FileNotFoundError(f"`distillation.teacher_checkpoint` must be a file, got {str(path)!r}, no such file.")
    names = label_names(path)
    if names and not same_classes(names, info.class_names):
        check_class_names(info.class_names, names, f"`distillation.teacher_checkpoint` {path}")
    (load_checkpoint if is_ours(name) else load_own)(model, path)  # ours can have published names
    config: dict[str, Any] = model.pretrained_cfg
    return Teacher(model, options, info, mean=config["mean"], std=config["std"], size=tuple(config["input_size"]))
