"""The options of distillation: learning from a teacher in addition to the labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from graticule.registry.fields import Positive, Share, check_fields


@dataclass(frozen=True)
class Distillation:
    """The teacher of a student, and the combination of its loss with that of the labels (`Teacher.combine`)."""

    teacher: str | None = None
    """path of a run folder, such as ./NAME or runs/NAME, or the name of a model of timm or of this library
    (default: none)"""
    teacher_checkpoint: Path | None = None
    """weights of the named model, .safetensors or .pth; a run folder has its own"""
    form: Literal["hard", "soft"] = "hard"
    """learn the teacher's decision (hard) or its probabilities (soft)"""
    alpha: Share | None = None
    """share of the teacher's loss (default: 0.5 if hard, 0.1 if soft)"""
    temperature: Positive | None = None
    """divisor of the logits in the soft form (default: 3)"""

    def __post_init__(self) -> None:
        check_fields(self, "distillation.")
        if self.temperature is not None and self.form != "soft":
            raise ValueError(
                f"`distillation.temperature` must be left out unless `distillation.form` is soft: hard has "
                f"no temperature, got {self.temperature}."
            )
        if self.teacher_checkpoint is not None and self.teacher is None:
            raise ValueError(
                f"`distillation.teacher_checkpoint` must be given with `distillation.teacher`, the name of its "
                f"model, got {str(self.teacher_checkpoint)!r} alone."
            )

    @property
    def share(self) -> float:
        """Return the share of the teacher's loss: alpha, or the default of the paper."""
        return {"hard": 0.5, "soft": 0.1}[self.form] if self.alpha is None else self.alpha

    @property
    def tau(self) -> float:
        """Return the temperature of the soft form: the given one, or the default of the paper."""
        return 3.0 if self.temperature is None else self.temperature
