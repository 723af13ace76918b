"""A step waits for nothing from the host: positions are made on the device of the weights."""

from contextlib import contextmanager

import pytest
import torch
from device_models import CASES, PLAIN, images_for, model_of, name_of
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tiny import build, without_memory

every_case = pytest.mark.parametrize("case", CASES, ids=name_of)

#: What copies a number to the host, which waits for the device.
TO_THE_HOST = {"aten::item", "aten::_local_scalar_dense"}
#: What waits for the device, and copies from the host, in the trace of a GPU.
WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Memcpy HtoD", "Memcpy DtoH")


class HostData(TorchFunctionMode):
    """Records the calls that make a tensor from numbers of Python or NumPy, which are copied to the device."""

    NAMES = frozenset({"tensor", "as_tensor", "asarray", "from_numpy", "new_tensor"})

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in self.NAMES or (name == "__getitem__" and any(isinstance(part, list) for part in _parts(args[1]))):
            self.calls.append(name)
        return function(*args, **(kwargs or {}))


def _parts(index):
    return index if isinstance(index, tuple) else (index,)


class OtherDevices(TorchDispatchMode):
    """Records the calls that take or return a tensor on another device than `device`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.calls = device, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, torch.Tensor)]
        self.calls += [f"{function} on {leaf.device}" for leaf in leaves if leaf.device != self.device]
        return output


@pytest.mark.long
@every_case
def test_every_tensor_of_a_step_is_made_on_the_device_of_the_weights(case):
    """On the meta device, to which nothing is copied from the CPU without being recorded."""
    family, encoding, joining = case
    with without_memory():
        model = build(family, encoding, joining)
    images = torch.empty(2, model.in_chans, *model.img_size, device="meta")
    with OtherDevices(torch.device("meta")) as others, HostData() as copies:
        model(images).sum().backward()
    assert others.calls == copies.calls == []


@contextmanager
def refusing_to_wait(device):
    """Raise an error where an operation waits for the GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def assert_only_launches(step, device):
    """Check that a step, which ran before, neither copies from the host nor waits for the device."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profile = torch.profiler.profile(activities=activities)
    with profile, refusing_to_wait(device), torch.profiler.record_function("step"):
        step()
    events = profile.events()
    on_cpu = torch.autograd.DeviceType.CPU  # a GPU has a second range, which ends later
    (within,) = [event.time_range for event in events if event.name == "step" and event.device_type == on_cpu]
    names = {event.name for event in events if within.start <= event.time_range.start <= within.end}
    waited = {name for name in names if name in TO_THE_HOST or name.startswith(WAITING)}
    assert not waited, f"a step must not wait for the device, it calls {', '.join(sorted(waited))}"


def assert_training_only_launches(model, device):
    images = images_for(model.to(device)).to(device)
    labels = torch.zeros(len(images), dtype=torch.long, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step():
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    step()
    step()  # the second is the first with a momentum
    assert_only_launches(step, device)


#: The encodings whose formula PyTorch computes with a look at its values from the host.
LOOKING = {"liere": "the exponential of a matrix chooses its series by the norm"}
on_the_device_alone = pytest.mark.parametrize("case", [case for case in CASES if case[1] not in LOOKING], ids=name_of)


@on_the_device_alone
def test_a_forward_pass_copies_nothing_from_the_host_and_waits_for_nothing(device, case):
    model = model_of(case).to(device)
    images = images_for(model).to(device)
    with torch.no_grad():
        model(images)  # the first call may choose kernels
        assert_only_launches(lambda: model(images), device)


@on_the_device_alone
def test_a_training_step_copies_nothing_from_the_host_and_waits_for_nothing(device, case):
    assert_training_only_launches(model_of(case).train(), device)


def test_patches_that_training_leaves_out_are_drawn_without_waiting(device):
    assert_training_only_launches(model_of((PLAIN, "learnable+rope", "lape"), patch_drop_rate=0.5).train(), device)
