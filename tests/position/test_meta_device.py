"""A model from the meta device is the same model once its state dict is loaded: no position is left uninitialized."""

import copy
import re
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import distributed, nn

import graticule
from tiny import SIZE, draw, tiny


def difference(make, real, images, how):
    """Return the difference of the outputs of a model, and of one from the meta device with its state dict."""
    other = make(real).eval()
    if how == "to_empty":
        other.to_empty(device="cpu")
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.detach().fill_(3)  # what memory may hold
    other.load_state_dict(real.state_dict(), assign=how == "assign")
    with torch.no_grad():
        return float((other(images) - real(images)).abs().max())


def on_meta(make, *arguments):
    with torch.device("meta"):
        return make(*arguments)


def attached(encoding, joining="default"):
    torch.manual_seed(0)
    host = timm.create_model("vit_tiny_patch16_224", **SIZE)
    return graticule.attach(host, encoding, joining, start="new", remove="pos_embed").eval()


def folded(encoding, joining="default", **options):
    torch.manual_seed(0)
    return graticule.fold(tiny(encoding, joining), **options)


def converted(name):
    torch.manual_seed(0)
    return graticule.convert(timm.create_model(name, **SIZE)).eval()


def debiased():
    torch.manual_seed(0)
    return graticule.debias(tiny("rope").eval(), torch.randn(16, 3, 32, 32))


CHANGED = {
    "attached LaPE": lambda: attached("learnable", "lape"),
    "attached ALiBi": lambda: attached("alibi"),
    "folded LaPE": lambda: folded("learnable", "lape"),
    "folded ALiBi": lambda: folded("alibi"),
    "folded for sizes": lambda: folded("rope", sizes=2),
    "unfolded": lambda: graticule.unfold(folded("relative_bias")),
    "converted ViT": lambda: converted("vit_tiny_patch16_224"),
    "converted with biases": lambda: converted("vit_relpos_small_patch16_224"),
    "converted RoPE": lambda: converted("vit_small_patch16_rope_224"),
    "debiased": debiased,
    "within another": lambda: nn.Sequential(tiny("bucketed_bias + log_n").eval()),
}


@pytest.mark.parametrize("how", ["to_empty", "assign"])
@pytest.mark.parametrize("case", CHANGED)
def test_a_changed_model_is_the_same(case, how):
    """Meta-device reports: transformers#45902, torchtitan#4783, SkyRL#1709."""
    model = CHANGED[case]()
    makers = [lambda real: copy.deepcopy(real).to("meta"), lambda _: on_meta(CHANGED[case])]
    for make in makers[: 1 if case == "debiased" else 2]:  # fitting needs values
        assert difference(make, model, torch.randn(1, 3, 32, 32), how) == 0


@pytest.fixture
def process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def sharded(make):
    from torch.distributed.fsdp import fully_shard

    model = make()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def empty(make):
    model = sharded(lambda: on_meta(make)).to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(3)
    return model


SHARDED = [
    *[(name, "default") for name in ("alibi", "rope", "relative_bias", "irpe", "peg", "sinusoidal_2d", "fire", "gpsa")],
    *[("learnable", joining) for joining in ("lape", "unshared", "tupe")],
    ("rope(scaling='ntk') + log_n", "default"),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("encoding", "joining"), SHARDED)
def test_a_sharded_model_takes_the_same_steps_and_its_checkpoint_is_the_same(encoding, joining, process, tmp_path):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict as states

    whole, images, labels = tiny(encoding, joining), torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])
    models = [whole, *(empty(lambda: tiny(encoding, joining)) for _ in range(2))]
    optimizers = [torch.optim.AdamW(model.parameters(), 0.01) for model in models]
    options = states.StateDictOptions(full_state_dict=True)
    states.set_model_state_dict(models[1], whole.state_dict(), options=options)
    for model, optimizer in list(zip(models, optimizers, strict=True))[:2] * 2:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    stepped = states.get_model_state_dict(models[1], options=options)
    assert all(torch.equal(stepped[name], value) for name, value in whole.state_dict().items())
    saved = states.get_state_dict(models[1], optimizers[1])
    checkpoint.save({"states": list(saved)}, checkpoint_id=tmp_path)
    loaded = {"states": list(states.get_state_dict(models[2], optimizers[2]))}
    checkpoint.load(loaded, checkpoint_id=tmp_path)
    parts = dict(zip(("model_state_dict", "optim_state_dict"), loaded["states"], strict=True))
    states.set_state_dict(models[2], optimizers[2], **parts)
    with torch.no_grad():
        assert all(torch.equal(model.eval()(images), whole.eval()(images)) for model in models)


@pytest.mark.slow
def test_a_model_of_distributed_data_parallel_has_the_same_gradients(process):
    whole, images = tiny("learnable", "lape"), torch.randn(2, 3, 32, 32)
    parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(whole))
    for model in (whole, parallel):
        model(images).square().sum().backward()
    pairs = zip(whole.parameters(), parallel.module.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


@pytest.mark.slow
def test_the_recipe_of_the_guide_gives_the_model_of_the_state(process):

    whole = graticule.create_model("vit_nano_patch4_28", encoding="rope").eval()
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python shard\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    names = {**globals(), **locals(), "state": whole.state_dict()}
    exec(code, names)
    images = torch.randn(1, *(whole.in_chans, *whole.img_size))
    assert torch.equal(names["model"].eval()(images), whole(images))


def test_a_fixed_table_that_a_file_lacks_is_that_of_the_formula():
    """MAE-pytorch#26: published weights have no table of sines."""
    model = draw(tiny("sinusoidal_2d")).eval()
    state = {name: value for name, value in model.state_dict().items() if "pos_embed" not in name}
    other = on_meta(tiny, "sinusoidal_2d").to_empty(device="cpu").eval()
    other.load_state_dict(state)
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(other(images), model(images))


OPERATIONS = {
    "resize": lambda model: graticule.resize(model, 48),
    "fold": graticule.fold,
    "attach": graticule.attach,
    "convert": graticule.convert,
    "transfer": lambda model: graticule.transfer(model, model.state_dict()),
    "change_position": lambda model: graticule.change_position(model, "rope"),
    "debias": lambda model: graticule.debias(model, torch.randn(16, 3, 32, 32)),
    "position_share": lambda model: graticule.position_share(model, torch.randn(16, 3, 32, 32)),
    "export": lambda model: graticule.export(model, "model.onnx"),
    "save_pretrained": lambda model: graticule.save_pretrained(model, "folder"),
}


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_sharded_weights_are_refused_by_name(operation, process, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = sharded(tiny)
    with pytest.raises(ValueError, match=r"must have whole tensors, got cls_token, which is a DTensor"):
        OPERATIONS[operation](model)
    assert not model.position.encodings[0].pos_embed.is_meta


@pytest.mark.parametrize("operation", list(OPERATIONS)[4:])
def test_weights_without_values_are_refused_by_name(operation, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="must have values, got cls_token on the meta device"):
        OPERATIONS[operation](on_meta(tiny))


def test_what_was_removed_without_values_cannot_be_put_back():
    with pytest.raises(ValueError, match="got pos_embed on the meta device"):
        graticule.detach(on_meta(attached, "alibi"))


def parameters_alone(model):
    """Move parameters to the meta device, as `accelerate.init_empty_weights` does by default, without buffers."""
    for part in model.modules():
        for name, parameter in list(part._parameters.items()):
            part._parameters[name] = parameter if parameter is None else nn.Parameter(parameter.to("meta"))
    return model


def filled(model, state):
    for buffer in model.buffers():
        buffer.fill_(3)
    model.load_state_dict(state)
    return model


def copied(model, state):
    """Copy in place, as `torch.distributed.checkpoint.load` does."""
    for name, value in model.state_dict().items():
        value.copy_(state[name])
    return model


def assigned(model, state):
    model.load_state_dict(state, assign=True)
    return model


#: The thread that reports it -> how a model with a state dict is made, and its dtype.
WAYS = {
    "transformers#34234": (lambda make, state: filled(parameters_alone(make()).to_empty(device="cpu"), state), None),
    "pytorch-image-models#2350": (lambda make, state: assigned(parameters_alone(make()), state), None),
    "prime-rl#937": (lambda make, state: copied(on_meta(make).to_empty(device="cpu"), state), None),
    "SkyRL#1725": (lambda make, state: filled(on_meta(make).bfloat16().to_empty(device="cpu"), state), torch.bfloat16),
    "llm-foundry#916": (lambda make, state: assigned(on_meta(make), state), torch.bfloat16),
    "borzoi-pytorch#21": (lambda make, state: assigned(on_meta(make), state).to("cpu"), torch.float64),
}


@pytest.mark.parametrize("thread", WAYS)
def test_each_way_from_the_meta_device_gives_the_same_model(thread):
    """The same kind in LlamaFactory#10820, lmms-engine#185, UniRL#207, litgpt#887, transformers#36577."""
    way, dtype = WAYS[thread]
    for encoding in ("alibi", "rope", "relative_bias", "sandwich", "rope(scaling='ntk')", "irpe", "sinusoidal_2d"):
        model = draw(tiny(encoding)).to(dtype).eval()
        images = torch.randn(1, 3, 32, 32, dtype=dtype)
        other = way(lambda encoding=encoding: tiny(encoding), model.state_dict()).eval()
        with torch.no_grad():
            assert torch.equal(other(images), model(images)), encoding
