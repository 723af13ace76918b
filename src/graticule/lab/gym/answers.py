"""Answers of the gym: what a model returns for a picture, with its loss and its score."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor


class Answer(ABC):
    """A kind of answer that a model returns for an image, with its loss and score.

    outputs: the number of values that a model returns, for an image or for each token.
    per_token: whether a model returns them for each token.
    chance: the highest expected score of a model that cannot distinguish arrangements of the same patches.
    measure: name of the score, of which 1 is the best.
    """

    outputs: int
    per_token: bool = False
    chance: float
    measure: str

    @abstractmethod
    def loss(self, given: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of the answers `given` by a model."""

    @abstractmethod
    def score(self, given: Tensor, target: Tensor) -> float:
        """Return the score of the answers `given` by a model; 1 is the best."""

    def normalized(self, score: float) -> float:
        """Return a score on a scale where chance is 0 and a perfect answer is 1."""
        return (score - self.chance) / (1 - self.chance)


class Classes(Answer):
    """One of several classes: logits (count, classes), target (count,)."""

    measure = "accuracy"

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.outputs = len(names)
        self.chance = 1 / len(names)

    def loss(self, given: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy."""
        return F.cross_entropy(given, target)

    def score(self, given: Tensor, target: Tensor) -> float:
        """Return the accuracy."""
        return float((given.argmax(1) == target).double().mean())


class Cell(Answer):
    """One of the cells: one logit per token, (count, N); the target (count,) is the index of a cell.

    If several cells have the highest logit, each counts as chosen equally often. Chance is 1 / (N - 1): a model that
    cannot distinguish cells with the same patch returns the same logit for them.
    """

    measure = "accuracy"
    outputs = 1
    per_token = True

    def __init__(self, cells: int) -> None:
        self.chance = 1 / (cells - 1)

    def loss(self, given: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy over the cells."""
        return F.cross_entropy(given, target)

    def score(self, given: Tensor, target: Tensor) -> float:
        """Return the share of images whose cell is found."""
        highest = given == given.amax(1, keepdim=True)
        found = highest.gather(1, target[:, None])[:, 0] / highest.sum(1)
        return float(found.double().mean())


class Mask(Answer):
    r"""A region, cell by cell: one logit per token, target (count, N) in {0, 1}, or -1 for cells that do not count.

    The score is the share of variance that the probabilities p explain, :math:`1 - E(p - t)^2 / (q (1 - q))`, where q
    is the share of cells of the region. A model that cannot distinguish cells returns the same p for all, and its score
    is at most 0, for p = q.

    Args:
        share: q.
    """

    measure = "variance explained"
    outputs = 1
    per_token = True
    chance = 0.0

    def __init__(self, share: float) -> None:
        self.variance = share * (1 - share)

    def loss(self, given: Tensor, target: Tensor) -> Tensor:
        """Return the binary cross-entropy over the cells that are asked for."""
        asked = target >= 0
        return F.binary_cross_entropy_with_logits(given[asked], target[asked].to(given.dtype))

    def score(self, given: Tensor, target: Tensor) -> float:
        """Return the share of variance that is explained."""
        asked = target >= 0
        error = given[asked].double().sigmoid() - target[asked]
        return float(1 - error.square().mean() / self.variance)


class Values(Answer):
    r"""Several numbers, (count, values): the score is the mean share of their variances that is explained.

    .. math:: R^2 = 1 - \operatorname{mean}_k E(v_k - t_k)^2 / \operatorname{Var}(t_k)

    The variances are exact, over all arrangements. A model that knows nothing of t returns its mean, and scores 0.

    Args:
        names: of the values.
        variance: Var(t), (values,).
    """

    measure = "variance explained"
    chance = 0.0

    def __init__(self, names: tuple[str, ...], variance: Tensor) -> None:
        self.names = names
        self.outputs = len(names)
        self.variance = variance

    def loss(self, given: Tensor, target: Tensor) -> Tensor:
        """Return the mean squared error, as a share of the variances."""
        return ((given - target).square() / self.variance).mean()

    def score(self, given: Tensor, target: Tensor) -> float:
        """Return the share of the variances that is explained."""
        with torch.no_grad():
            return 1 - float(self.loss(given.double(), target))
