"""The choice and the order of images as functions of seed and epoch, so that runs are reproducible."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

#: (epoch, index), or (epoch, index, repeat) if an image comes several times per epoch.
Key = tuple[int, ...]


#: Separates the draws of sizes from those of images.
_SIZES = 0x512E


@dataclass(eq=False)
class EpochSampler(Sampler[Key]):
    """Yields the key of every image once, in an order that is a function of seed and epoch.

    The epoch is part of the key, so it reaches persistent workers.

    Args:
        length: number of images.
        seed: seed of the order.
        repeats: repeated augmentation (Hoffer et al., 2020; Berman et al., 2019): every image comes this many times in
            a row, each time with other randomness. The length of an epoch does not change, so it sees fewer different
            images, as in DeiT's code.
    """

    length: int
    seed: int
    _: KW_ONLY
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"`repeats` must be at least 1, got {self.repeats}.")
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def indices(self, epoch: int) -> np.ndarray:
        """Return the order of an epoch, before repeats: (length,)."""
        return np.random.default_rng([self.seed, epoch]).permutation(self.length)

    def keys(self, epoch: int, places: np.ndarray, indices: np.ndarray | None = None) -> list[Key]:
        """Return the keys at the positions `places` of an epoch; `indices` is its order, if known."""
        indices = self.indices(epoch) if indices is None else indices
        if self.repeats == 1:
            return [(epoch, index) for index in indices[places].tolist()]
        pairs = zip(indices[places // self.repeats].tolist(), (places % self.repeats).tolist(), strict=True)
        return [(epoch, index, repeat) for index, repeat in pairs]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.keys(self.epoch, np.arange(self.length)))


class GroupSampler(EpochSampler):
    """An order in which batches have images of one group, except the last ones, which have the rest, group by group.

    Args:
        groups: (n,), the group of every image, counted from 0, such as its shape.
        batch_size: images per step.
        seed: seed of the order.
    """

    def __init__(self, groups: np.ndarray, batch_size: int, seed: int) -> None:
        super().__init__(len(groups), seed)
        self.groups = groups
        self.batch_size = batch_size

    def indices(self, epoch: int) -> np.ndarray:
        """Return the order of an epoch: full batches of each group in a random order, then the rest: (length,)."""
        order = super().indices(epoch)
        members = [order[self.groups[order] == group] for group in range(int(self.groups.max()) + 1)]
        cuts = [len(group) // self.batch_size * self.batch_size for group in members]
        full = np.concatenate([group[:cut] for group, cut in zip(members, cuts, strict=True)])
        rest = np.concatenate([group[cut:] for group, cut in zip(members, cuts, strict=True)])
        batches = full.reshape(-1, self.batch_size)
        shuffled = batches[np.random.default_rng([self.seed, epoch, 1]).permutation(len(batches))]
        return np.concatenate([shuffled.reshape(-1), rest])


@dataclass(eq=False)
class BatchOrder(Sampler[list[Key]]):
    """The training batches of one process, cut from global batches that do not depend on the number of processes.

    Step s takes the s-th `batch_size` images of the epoch. They are split across the processes, and within each across
    the micro-batches, so that the repeats of an image go to different processes. A last batch that is not full is split
    unevenly (`weight` corrects its mean), or left out if it has fewer images than there are micro-batches in total.

    Args:
        sampler: order of the images.
        batch_size: images per step, over all processes and micro-batches.
        rank: index of the process.
        world_size: number of processes.
        parts: number of micro-batches per step in each process.
        drop_last: leave out a last batch that is not full.
        sizes: number of image sizes. Each step has one, a function of seed, epoch and step; its index is the last
            entry of the keys. None for a single size.
    """

    sampler: EpochSampler
    batch_size: int
    _: KW_ONLY
    rank: int = 0
    world_size: int = 1
    parts: int = 1
    drop_last: bool = False
    sizes: int | None = None

    def __post_init__(self) -> None:
        self._shares = self.world_size * self.parts
        if self.batch_size % self._shares:
            of = f"devices x nodes x accumulate, {self.world_size} x {self.parts}"
            raise ValueError(f"`batch_size` must be a multiple of {of}, got {self.batch_size}.")
        full, rest = divmod(len(self.sampler), self.batch_size)
        self.steps = full + (not self.drop_last and rest >= self._shares)
        if self.steps < 1:
            raise ValueError(
                f"`batch_size` must not exceed the number of training examples, {len(self.sampler)}, if batches must "
                f"be full or are split across processes, got {self.batch_size}."
            )
        self._first = 0

    def __len__(self) -> int:
        return self.steps * self.parts

    @property
    def examples(self) -> int:
        """Return the number of examples per epoch, over all processes."""
        return self._step(self.steps - 1)[1]

    def notes(self) -> list[str]:
        """Return a sentence on the examples of a last batch that is too small for all micro-batches."""
        left = len(self.sampler) - self.examples
        if not 0 < left < self._shares:
            return []
        return [f"the last {left} examples of each epoch are left out, fewer than its {self._shares} micro-batches"]

    def skip(self, batches: int) -> None:
        """Skip `batches` in the next pass, for a run that is resumed in the middle of an epoch."""
        self._first = batches

    def places(self, number: int) -> np.ndarray:
        """Return the positions in the epoch of this process's images of batch `number`."""
        step, part = divmod(number, self.parts)
        first, stop = self._step(step)
        return np.arange(first + self.rank + part * self.world_size, stop, self._shares)

    def _step(self, step: int) -> tuple[int, int]:
        """Return the first place of a step in the epoch, and the one after its last."""
        first = step * self.batch_size
        return first, min(first + self.batch_size, len(self.sampler))

    def weight(self, number: int) -> float:
        """Return the weight of the mean of batch `number`, such that the weighted mean of a step is its true mean."""
        first, stop = self._step(number // self.parts)
        return len(self.places(number)) * self._shares / (stop - first)

    def keys(self, epoch: int, number: int) -> list[Key]:
        """Return the keys of batch `number` of an epoch."""
        return self.sampler.keys(epoch, self.places(number))

    def size(self, epoch: int, number: int) -> int:
        """Return the index of the size of batch `number`; it is the same for all micro-batches of a step."""
        if self.sizes is None:
            return 0
        step = number // self.parts
        draw = np.random.SeedSequence([self.sampler.seed, epoch, step, _SIZES])
        return int(np.random.default_rng(draw).integers(self.sizes))

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, first, self._first = self.sampler.epoch, self._first, 0
        indices = self.sampler.indices(epoch)
        for number in range(first, len(self)):
            keys = self.sampler.keys(epoch, self.places(number), indices)
            yield keys if self.sizes is None else [(*key, self.size(epoch, number)) for key in keys]


#: The label of a padding image, which is not counted.
PADDING = -1


@dataclass(eq=False)
class EvaluationOrder(Sampler[int]):
    """The images of one process in evaluation: all processes get the same number, and every image is counted once.

    If the number is not divisible by that of processes, the last image is repeated as -1 - its index, for which
    `TransformedImages` and `TensorImages` return the label `PADDING`.
    """

    length: int
    rank: int = 0
    world_size: int = 1

    def __len__(self) -> int:
        return -(-self.length // self.world_size)

    def __iter__(self) -> Iterator[int]:
        for place in range(self.rank, len(self) * self.world_size, self.world_size):
            yield place if place < self.length else -self.length


def balanced_subset(labels: Sequence[int] | np.ndarray, count: int) -> list[int]:
    """Return at most `count` indices, balanced over the classes as far as possible, in increasing order.

    A class gives its first images; the choice depends on labels and count alone.
    """
    labels = np.asarray(labels)
    if count < 1:
        raise ValueError(f"`limit` must be at least 1, got {count}.")
    rank = np.empty(len(labels), dtype=np.int64)  # of an image within its class
    for of_class in indices_by_class(labels):
        rank[of_class] = np.arange(len(of_class))
    return sorted(np.lexsort((labels, rank))[:count].tolist())


def class_share(labels: Sequence[int] | np.ndarray, share: float, seed: int) -> list[int]:
    """Return the indices of `share` of every class's images, chosen by `seed`, at least one each, in increasing order.

    A class of n images gives n times `share`, rounded. The choice depends on labels, share and seed alone, with any
    version of NumPy, since its `RandomState` is frozen.
    """
    if not 0 < share <= 1:
        raise ValueError(f"`train_share` must be in (0, 1], such as 0.5 for a half, got {share}.")
    if seed < 0:
        raise ValueError(f"`share_seed` must be at least 0, got {seed}.")
    labels = np.asarray(labels)
    random = np.random.RandomState(seed)
    chosen: list[int] = []
    for of_class in indices_by_class(labels):
        count = max(int(len(of_class) * share + 0.5), 1)
        chosen += random.permutation(of_class)[:count].tolist()
    return sorted(chosen)


def indices_by_class(labels: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the indices of the images of each class."""
    return (np.flatnonzero(labels == label) for label in np.unique(labels))


class WholeBatches(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of tensors that are made batch by batch, by `__getitems__`."""

    in_batches = True

    def __getitem__(self, key: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([key])
        return inputs[0], targets[0]

    @abstractmethod
    def __getitems__(self, keys: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return a whole batch."""


class Loading:
    """The loaders of a data module, whose batches are functions of its seed alone."""

    seed: int
    workers: int = 0

    def load(
        self, examples: Dataset[Any], collate: Callable[[Any], Any] | None = None, **batches: Any
    ) -> DataLoader[Any]:
        """Return the loader of `examples`; whole batches need no collation and no workers.

        Args:
            examples: the examples by key.
            collate: makes a batch from a list of examples; PyTorch's by default.
            batches: the batches, as arguments of `DataLoader`.
        """
        in_batches = getattr(examples, "in_batches", False)
        workers = 0 if in_batches else self.workers
        return DataLoader(
            examples,
            num_workers=workers,
            collate_fn=_unchanged if in_batches else collate,
            persistent_workers=workers > 0,
            generator=torch.Generator().manual_seed(self.seed),  # leaves the global generator unchanged
            **batches,
        )

    def load_test(self, examples: Any, batch_size: int, rank: int, world_size: int, *collate: Any) -> DataLoader[Any]:
        """Return the loader of the test examples of one of `world_size` processes, each example once over all."""
        sampler = EvaluationOrder(len(examples), rank, world_size) if world_size > 1 else None
        return self.load(examples, *collate, batch_size=batch_size, sampler=sampler)


def _unchanged(batch: Any) -> Any:
    return batch
