"""Several devices and machines: strategies, sharded checkpoints, and their consolidation into one file."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from graticule.checkpoints.load import load_checkpoint, load_own
from graticule.checkpoints.read import read_checkpoint
from graticule.lab.training.recipe import TrainingRecipe
from graticule.system.files import replace

#: A block of a backbone, by its name: blocks.3, layers.1.blocks.0, block2.1
_BLOCK = re.compile(r"(?:^|\.)blocks?\d*\.\d+$")
#: The precisions in which Lightning shards.
_SHARDED_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
#: The file of a sharded checkpoint with everything except weights and optimizer; Lightning's name.
REST = "meta.pt"


def build_strategy(recipe: TrainingRecipe) -> Strategy | str:
    """Build Lightning's strategy of a recipe."""
    processes = recipe.devices * recipe.nodes
    if recipe.strategy == "fsdp":
        if recipe.precision not in _SHARDED_PRECISIONS:
            known = ", ".join(_SHARDED_PRECISIONS)
            raise ValueError(f"`precision` must be one of {known} with strategy fsdp, got {recipe.precision!r}.")
        return ShardedStrategy(processes)
    if processes > 1:
        return DDPStrategy(gradient_as_bucket_view=True)
    return "auto"


def shard(model: nn.Module, mesh: Any) -> None:
    """Shard the parameters of a backbone, one group per block and one for the rest (PyTorch's `fully_shard`)."""
    for name, module in model.named_modules():
        if _BLOCK.search(name):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


class ShardedStrategy(ModelParallelStrategy):
    """Strategy in which each process stores and saves a shard of weights, gradients and optimizer; also on CPUs.

    A checkpoint is a folder, complete or absent. It is read without running code from it.
    """

    def __init__(self, processes: int) -> None:
        super().__init__(data_parallel_size=processes, tensor_parallel_size=1)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write all shards to a temporary folder beside `filepath`, then rename it.

        Raises:
            OSError: in all processes, if one of them cannot write, for example to a full disk.
        """
        path = Path(self.broadcast(filepath))
        temporary = path.with_name(f".{path.name}.tmp")
        if self.global_rank == 0 and temporary.exists():
            shutil.rmtree(temporary)
        self.barrier()
        failure: BaseException | None = None
        try:
            super().save_checkpoint(checkpoint, temporary, storage_options)
            if self.global_rank == 0:
                with (temporary / REST).open("rb") as file:
                    os.fsync(file.fileno())
        except (OSError, RuntimeError, CheckpointException) as error:
            failure = error
        failed = self.reduce(torch.tensor(float(failure is not None), device=self.root_device), reduce_op="max")
        if failed:  # if one process fails, all raise, so that none waits for another
            if self.global_rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            reason = "by another process" if failure is None else f"({reason_of(failure)})"
            raise OSError(
                f"{path} could not be written {reason}; is the disk full? The last one is intact."
            ) from failure
        if self.global_rank == 0:
            if path.exists():  # the same step again: the existing one is equivalent
                shutil.rmtree(temporary)
            else:
                replace(temporary, path)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read weights and optimizer into their tensors, and return the rest."""
        path = Path(self.broadcast(checkpoint_path))
        check_shards(path)
        model, (optimizer,) = self.model, self.optimizers
        assert model is not None
        state = {"state_dict": get_model_state_dict(model)}
        moments = {"optimizer_0": get_optimizer_state_dict(model, optimizer)}
        try:
            dcp.load(state, checkpoint_id=path, planner=_PlainValues())
            dcp.load(moments, checkpoint_id=path, planner=_PlainValues())
        except CheckpointException as error:  # raised in all processes
            raise ValueError(f"{path} cannot be read ({reason_of(error)}).") from None
        model.load_state_dict(state["state_dict"])
        options = StateDictOptions(cpu_offload=True)
        set_optimizer_state_dict(model, optimizer, optim_state_dict=moments["optimizer_0"], options=options)
        return read_checkpoint(path / REST)


class _PlainValues(DefaultLoadPlanner):
    """Reads values that are not tensors as plain values only."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        torch.load(value, weights_only=True)  # raises for anything else; the value is then read again
        value.seek(0)
        super().load_bytes(read_item, value)


class _Metadata(pickle.Unpickler):
    """Reads the plain classes of PyTorch's metadata of a sharded checkpoint, and imports nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.distributed.checkpoint.metadata" and isinstance(getattr(dcp.metadata, name, None), type):
            return super().find_class(module, name)
        if (module, name) in {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
            ("pathlib", "WindowsPath"),
            ("pathlib._local", "PosixPath"),
        }:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.memory_format)):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def check_shards(path: Path) -> None:
    """Check that a sharded checkpoint is complete and that its metadata are plain data."""
    described, rest = path / ".metadata", path / REST
    if not described.is_file() or not rest.is_file():
        raise ValueError(
            f"{path} is not a checkpoint of strategy fsdp, or it is incomplete: it lacks .metadata or {REST}."
        )
    try:
        with described.open("rb") as file:
            _Metadata(file).load()
    except pickle.UnpicklingError as error:
        raise ValueError(f"{described} would import {error} when read, so it was not read.") from None
    except Exception as error:  # a damaged pickle can raise almost anything
        raise ValueError(f"{described} is damaged ({type(error).__name__}: {error}).") from None


def read_shards(path: Path) -> dict[str, Tensor]:
    """Read the weights of a sharded checkpoint into one process, under the backbone's names."""
    check_shards(path)
    reader = dcp.FileSystemReader(path)
    prefix = "state_dict.model."
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, dcp.metadata.TensorStorageMetadata)
    }
    try:
        with warnings.catch_warnings():  # about the single process
            warnings.simplefilter("ignore")
            dcp.load(found, storage_reader=reader, planner=_PlainValues(), no_dist=True)
    except (Exception, CheckpointException) as error:  # the latter is not an Exception
        raise ValueError(f"{path} cannot be read ({reason_of(error)}).") from None
    return {name.removeprefix(prefix): value for name, value in found.items()}


def load_weights(model: nn.Module, path: Path) -> nn.Module:
    """Load the weights of a checkpoint, one file or sharded, into `model`; returns the model.

    Raises:
        FileNotFoundError: if it does not exist (any more).
        ValueError: if it is damaged or does not fit.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; if the run is being trained, a newer one may have replaced it."
        )
    if path.is_file():
        return load_checkpoint(model, path) if hasattr(model, "position") else load_own(model, path)
    model.load_state_dict(read_shards(path))
    return model


def reason_of(error: BaseException) -> str:
    """Return one line about an error of any process."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
