"""Training whose parameters, gradients and optimizer state are sharded over the devices, by PyTorch's FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from lightning_fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed import broadcast
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from graticule.backbones.staged import StagedModel


def sharded_strategy(processes: int) -> ModelParallelStrategy:
    """Return the strategy that shards a model of `Loss` over all processes."""
    return ModelParallelStrategy(shard, data_parallel_size=processes, tensor_parallel_size=1)


def shard(loss: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard a `Loss` in place: each block of the backbone is a unit that is gathered when it is called."""
    for backbone in [part for part in loss.modules() if isinstance(part, StagedModel)]:
        for stage, depth in enumerate(backbone.depths):
            for index in range(depth):
                fully_shard(backbone.block(stage, index), mesh=mesh["data_parallel"])
    fully_shard(loss, mesh=mesh["data_parallel"])
    return loss


def is_sharded(loss: nn.Module) -> bool:
    """Return whether a `Loss` is sharded."""
    return isinstance(loss, FSDPModule)


@contextlib.contextmanager
def unsharded(loss: nn.Module) -> Iterator[None]:
    """Let every process have all parameters within the block, and the buffers of the first one."""
    units = [part for part in loss.modules() if isinstance(part, FSDPModule)]
    if units:
        for buffer in loss.buffers():  # such as running averages, which differ between the processes
            broadcast(buffer, 0)
    for unit in units:
        unit.unshard()
        unit.set_reshard_after_forward(False, recurse=False)
    yield
    for unit in units:
        unit.set_reshard_after_forward(unit is not loss, recurse=False)  # as by default
        unit.reshard()


def full_state(state: Any) -> Any:
    """Return a state dict, of a model or an optimizer, with all of each sharded tensor; every process calls this."""
    return tree_map_only(DTensor, lambda tensor: tensor.full_tensor().cpu(), state)


def like(values: Any, tensors: Any) -> Any:
    """Shard a value as the tensor of the same shape; another value is returned as it is."""
    if isinstance(tensors, DTensor) and isinstance(values, Tensor) and values.shape == tensors.shape:
        values = values.to(tensors.device)
        return distribute_tensor(values, tensors.device_mesh, tensors.placements, src_data_rank=None)
    return values


def sharded_state(state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Shard the state dict of a model as `module` is."""
    tensors = module.state_dict()
    return {name: like(value, tensors.get(name)) for name, value in state.items()}


def sharded_optimizer_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Shard the state dict of an optimizer as its parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {
        number: {name: like(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": states}
