"""The examples of each batch, as functions of seed and epoch, and the loaders of batches."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

#: Separates the draws of sizes from the draws of images.
_SIZES = 0x512E


@dataclass(frozen=True)
class BatchIndices:
    """The examples of a batch.

    indices: (n,), counted from 0.
    epoch: counted from 0; None in evaluation, where nothing is random.
    repeats: how many times the example came before in its group of repeats, of all or (n,) of each.
    size: the index of the image size of the batch.
    """

    indices: np.ndarray
    epoch: int | None = None
    repeats: np.ndarray | int = 0
    size: int = 0


@dataclass(eq=False)
class BatchOrder(Sampler[BatchIndices]):
    """The training batches of one process, in an order that is a function of seed and epoch.

    A step has the next `batch_size` examples of the epoch, which are shared evenly by the processes and by the
    micro-batches of each, so that the repeats of an image go to different processes. Of the last step, examples that
    cannot be shared evenly are left out.

    Args:
        length: number of examples.
        batch_size: examples per step, over all processes and micro-batches, which must divide it.
        seed: seed of the order.
        rank: index of the process.
        world_size: number of processes.
        parts: number of micro-batches per step in each process.
        drop_last: leave out a last step that is not full.
        repeats: repeated augmentation (Hoffer et al., 2020; Berman et al., 2019): every example comes this many times
            in a row, each time with other randomness. The length of an epoch does not change, so it sees fewer
            different examples, as in DeiT's code.
        sizes: number of image sizes, of which each step draws one.
        groups: (n,), the group of every example, from 0. All steps have examples of one group, in a random order,
            except the last ones, which have the rest of each group.
    """

    length: int
    batch_size: int
    seed: int
    _: KW_ONLY
    rank: int = 0
    world_size: int = 1
    parts: int = 1
    drop_last: bool = False
    repeats: int = 1
    sizes: int = 1
    groups: np.ndarray | None = None

    def __post_init__(self) -> None:
        self._shares = self.world_size * self.parts
        full, rest = divmod(self.length, self.batch_size)
        self.steps = full + (not self.drop_last and rest >= self._shares)
        if self.steps < 1:
            raise ValueError(
                f"`batch_size` must not exceed the number of training examples, {self.length}, if batches must "
                f"be full or are split across processes, got {self.batch_size}."
            )
        self.start(0)

    def start(self, epoch: int, batch: int = 0) -> None:
        """Let the next pass begin at a batch of an epoch."""
        self.epoch, self.first = epoch, batch

    def __len__(self) -> int:
        return self.steps * self.parts

    @property
    def examples(self) -> int:
        """Return the number of examples per epoch, over all processes."""
        return min(self.steps * self.batch_size, self.length // self._shares * self._shares)

    def notes(self) -> list[str]:
        """Return a sentence on the examples of a last step that cannot be shared evenly."""
        left = 0 if self.drop_last else self.length % self._shares
        return [f"the last {left} examples of each epoch are left out, to share the rest evenly"] if left else []

    def indices(self, epoch: int) -> np.ndarray:
        """Return the order of an epoch, before repeats: (length,)."""
        order = np.random.default_rng([self.seed, epoch]).permutation(self.length)
        if self.groups is None:
            return order
        members = [order[self.groups[order] == group] for group in range(int(self.groups.max()) + 1)]
        cuts = [len(group) // self.batch_size * self.batch_size for group in members]
        steps = np.concatenate([group[:cut] for group, cut in zip(members, cuts, strict=True)])
        steps = np.random.default_rng([self.seed, epoch, 1]).permutation(steps.reshape(-1, self.batch_size))
        return np.concatenate([steps.reshape(-1), *(group[cut:] for group, cut in zip(members, cuts, strict=True))])

    def __iter__(self) -> Iterator[BatchIndices]:
        epoch, order = self.epoch, self.indices(self.epoch)
        sizes = np.random.default_rng([self.seed, epoch, _SIZES]).integers(self.sizes, size=self.steps).tolist()
        for number in range(self.first, len(self)):
            step, part = divmod(number, self.parts)
            first = step * self.batch_size
            count = min(self.batch_size, self.length - first) // self._shares * self._shares
            places = np.arange(first + self.rank + part * self.world_size, first + count, self._shares)
            yield BatchIndices(order[places // self.repeats], epoch, places % self.repeats, sizes[step])


def evaluation_batches(length: int, batch_size: int, rank: int = 0, world_size: int = 1) -> list[BatchIndices]:
    """Return the evaluation batches of one process; all have as many, and each example is in one batch of one."""
    if length < world_size:
        raise ValueError(
            f"`devices` x `nodes` must be at most the number of test examples, {length}, got {world_size}."
        )
    indices = np.arange(rank, length, world_size)
    if world_size == 1:
        return [BatchIndices(indices[first : first + batch_size]) for first in range(0, length, batch_size)]
    steps = min(-(-length // (batch_size * world_size)), length // world_size)
    return [BatchIndices(part) for part in np.array_split(indices, steps)]


def draw(batch: BatchIndices, seed: int, count: int) -> np.ndarray:
    """Return a number below 2^62 for each of a batch's examples, out of `count`; these are the source of randomness.

    It is a function of seed, epoch, index and repeat alone, whichever batch an example is in.
    """
    repeats = np.broadcast_to(batch.repeats, batch.indices.shape)
    numbers = np.empty(len(batch.indices), dtype=np.int64)
    for repeat in np.unique(repeats).tolist():
        chosen = repeats == repeat
        numbers[chosen] = _numbers(seed, batch.epoch or 0, repeat, count)[batch.indices[chosen]]
    return numbers


@lru_cache(maxsize=4)
def _numbers(seed: int, epoch: int, repeat: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch, repeat, 1]).integers(2**62, size=count)


class Batches(Dataset[Any]):
    """Examples as whole batches, `batches[BatchIndices(...)]`."""

    #: Whether batches are made in so little time that no worker is needed.
    in_memory = True

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of examples."""

    @abstractmethod
    def __getitem__(self, batch: BatchIndices) -> Any:
        """Return the inputs and the targets of a batch."""


class Examples(Batches):
    """Examples that are made one by one.

    In training, the randomness of each is a function of seed, epoch, index and repeat alone, whichever batch it is in
    and whichever process makes it. The random states of the process are unchanged.

    Args:
        images: pairs of an image and its label or target, by index.
        rows: (n,), the indices of the images that are used.
        transform: whose draws are from torch, Python and NumPy.
        seed: seed of the draws.
    """

    in_memory = False

    def __init__(self, images: Any, rows: np.ndarray, transform: Callable[..., Any], seed: int = 0) -> None:
        self.images, self.rows, self.transform, self.seed = images, rows, transform, seed

    def __len__(self) -> int:
        return len(self.rows)

    @abstractmethod
    def example(self, index: int) -> Any:
        """Return an example."""

    @abstractmethod
    def collate(self, examples: Sequence[Any]) -> Any:
        """Return the batch of some examples."""

    def __getitem__(self, batch: BatchIndices) -> Any:
        if batch.epoch is None:
            return self.collate([self.example(index) for index in batch.indices.tolist()])
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        examples = []
        try:
            for index, number in zip(batch.indices.tolist(), draw(batch, self.seed, len(self)).tolist(), strict=True):
                random.seed(number)
                np.random.seed(number % 2**32)
                torch.default_generator.manual_seed(number)  # of the CPU only, not of a GPU
                examples.append(self.example(index))
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
        return self.collate(examples)


class TaskData(ABC):
    """The data of a task, as loaders of batches that are functions of its seed alone.

    size: of the examples in training, at which a run is validated.
    """

    size: Any
    batch_size: int
    eval_batch_size: int
    seed: int
    workers: int = 0

    @property
    def skipped(self) -> Sequence[Path]:
        """The broken files that training found and left out."""
        return ()

    @abstractmethod
    def train_batches(self) -> Batches:
        """Return the training examples."""

    @abstractmethod
    def eval_batches(self, size: Any) -> Batches:
        """Return the test examples at `size`."""

    @property
    def num_train(self) -> int:
        return len(self.train_batches())

    def order_options(self) -> dict[str, Any]:
        """Return further arguments of `BatchOrder`."""
        return {}

    def train_order(self, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> BatchOrder:
        """Return the order of the training examples in the batches of one of `world_size` processes."""
        shared: dict[str, Any] = {"rank": rank, "world_size": world_size, "parts": accumulate, **self.order_options()}
        return BatchOrder(self.num_train, self.batch_size, self.seed, **shared)

    def train_dataloader(self, order: BatchOrder | None = None) -> DataLoader[Any]:
        """Return the training batches, whose order differs from epoch to epoch."""
        return self.load(self.train_batches(), order or self.train_order())

    def eval_dataloader(self, size: Any, rank: int = 0, world_size: int = 1, **options: Any) -> DataLoader[Any]:
        """Return the batches of the test examples at `size`, each once over all processes.

        `options` are passed to `eval_batches`.
        """
        batches = self.eval_batches(size, **options)
        return self.load(batches, evaluation_batches(len(batches), self.eval_batch_size, rank, world_size))

    def load(self, batches: Batches, order: Sampler[BatchIndices] | Sequence[BatchIndices]) -> DataLoader[Any]:
        """Return the loader of batches in an order; batches in memory need no workers."""
        workers = 0 if batches.in_memory else self.workers
        return DataLoader(
            batches,
            batch_size=None,
            sampler=order,
            num_workers=workers,
            collate_fn=_unchanged,
            persistent_workers=workers > 0,
            generator=torch.Generator().manual_seed(self.seed),  # leaves the global generator unchanged
        )


def _unchanged(batch: Any) -> Any:
    return batch


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


def class_share(labels: Sequence[int] | np.ndarray, share: float) -> list[int]:
    """Return the indices of a random `share` of every class's images, at least one each, in increasing order.

    A class of n images gives n times `share`, rounded. The choice depends on labels and share alone, with any version
    of NumPy, since its `RandomState` is frozen.
    """
    if not 0 < share <= 1:
        raise ValueError(f"`train_share` must be in (0, 1], such as 0.5 for a half, got {share}.")
    generator = np.random.RandomState(0)
    chosen: list[int] = []
    for of_class in indices_by_class(np.asarray(labels)):
        count = max(int(len(of_class) * share + 0.5), 1)
        chosen += generator.permutation(of_class)[:count].tolist()
    return sorted(chosen)


def indices_by_class(labels: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the indices of the images of each class."""
    return (np.flatnonzero(labels == label) for label in np.unique(labels))
