"""The numbers of every encoding and family on a device equal the CPU's, in every dtype, memory format and graph."""

import pytest
import torch
from device_models import CASES, FEW, PLAIN, assert_close_in_norm, images_for, logits_and_gradients, model_of, name_of

import graticule
from tiny import GATED, shallow

every_case = pytest.mark.parametrize("case", CASES, ids=name_of)
few_cases = pytest.mark.parametrize("case", FEW, ids=name_of)


@every_case
def test_outputs_and_gradients_in_float32_equal_those_of_the_cpu(device, case):
    """On the CPU, where both would be the same pass, the expected ones are in float64."""
    model = model_of(case)
    images = images_for(model)
    if device.type == "cpu":
        expected = logits_and_gradients(model_of(case).double(), images.double())
    else:
        expected = logits_and_gradients(model_of(case), images)
    tensors = logits_and_gradients(model.to(device), images.to(device))
    assert {value.device for value in tensors.values()} == {device}
    assert {value.dtype for value in tensors.values()} == {torch.float32}
    assert_close_in_norm(tensors, expected, 1e-4)


#: The bounds in units of a dtype's eps: errors of some ten roundings, each at most half of it, add up; gradients have
#: the errors of both passes.
FACTORS = {"logits": 4, "gradients": 8}


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_differs_from_float32_by_rounding_alone(device, case, dtype):
    model = model_of(case).to(device)
    images = images_for(model).to(device)
    expected = logits_and_gradients(model, images)
    with torch.autocast(device.type, dtype):
        rounded = logits_and_gradients(model, images)
    assert rounded.keys() == expected.keys()
    parts = {"logits": [], "gradients": []}
    for name, value in rounded.items():
        assert value.isfinite().all(), f"{name} must be finite in {dtype}"
        parts["logits" if name == "logits" else "gradients"].append((value.float(), expected[name]))
    for part, pairs in parts.items():
        ours, reference = (torch.cat([value.flatten() for value in values]) for values in zip(*pairs, strict=True))
        error, bound = float((ours - reference).norm() / reference.norm()), FACTORS[part] * torch.finfo(dtype).eps
        assert error <= bound, f"{part} must differ by at most {bound:.1e} of their norm in {dtype}, got {error:.1e}"


@few_cases
def test_channels_last_images_and_weights_give_the_same_outputs_and_gradients(device, case):
    model = model_of(case).to(device)
    images = images_for(model).to(device)
    expected = {name: value.clone() for name, value in logits_and_gradients(model, images).items()}
    images = images.to(memory_format=torch.channels_last)
    assert_close_in_norm(logits_and_gradients(model, images), expected, 1e-5)
    model.to(memory_format=torch.channels_last)
    assert_close_in_norm(logits_and_gradients(model, images), expected, 1e-5)


# Compiled models and recorded graphs

#: One block per stage; T2T's first layers are attention, too.
COMPILED = [
    (PLAIN, "learnable", "lape"),
    ("Swin", None, "default"),
    ("CPVT, GAP", None, "default"),
    ("PosMLP", None, "default"),
    ("T2T-ViT", "learnable", "lape"),
]


@pytest.mark.parametrize("case", COMPILED, ids=name_of)
def test_a_compiled_model_is_one_graph_with_the_same_outputs_and_gradients(device, case):
    """On the CPU without the kernels that a compiler makes there, which take a minute."""
    model = model_of(case, **shallow(case[0])).to(device)
    images = images_for(model).to(device)
    expected = {name: value.clone() for name, value in logits_and_gradients(model, images).items()}
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    model.zero_grad()
    logits = compiled(images)
    logits.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_close_in_norm({"logits": logits, **gradients}, expected, 1e-4)


FOLDED = [*FEW, ("T2T-ViT", "learnable", "lape"), *((family, None, "default") for family in GATED)]


@torch.no_grad()
@pytest.mark.parametrize("case", list(dict.fromkeys(FOLDED)), ids=name_of)
def test_a_recorded_graph_of_a_folded_model_gives_the_outputs_of_new_images(device, case):
    """A CUDA graph; on the CPU the calls of PyTorch that one forward pass makes, called again."""
    model = graticule.fold(model_of(case).to(device))
    images, others = (images_for(model, seed=seed).to(device) for seed in (0, 1))
    static = images.clone()
    if device.type == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # libraries allocate their memory in the first calls, which a graph cannot record
                model(static)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(static)

        def replay(x):
            static.copy_(x)
            graph.replay()
            torch.cuda.synchronize()
            return output.clone()

    else:
        from torch.fx.experimental.proxy_tensor import make_fx

        replay = make_fx(model)(static)
    first, second = replay(images), replay(others)
    assert not torch.equal(first, second)
    assert_close_in_norm({"logits": first}, {"logits": model(images)}, 1e-5)
    assert_close_in_norm({"logits": second}, {"logits": model(others)}, 1e-5)
