"""Models as people have them are carried through exactly, or refused with what is in the way, before any change."""

import tempfile
from copy import deepcopy
from functools import cache, partial

import pytest
import timm
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import parametrizations, prune, weight_norm
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

import graticule
from tiny import draw, images

SIZES = {"depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 5, "img_size": 32, "patch_size": 8}
QKV = "blocks.0.attn.qkv"


class LoraLinear(nn.Module):
    """A layer with a low-rank update, with the names of peft."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base_layer.out_features, bias=False)})

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def _replace(make, name):
    return lambda model: model.set_submodule(name, make(model.get_submodule(name)))


def _double(*args):
    return 2 * args[-1]


def _patch(path):
    """Return a change: a function of an instance returns twice as much."""

    def change(model):
        owner, _, leaf = path.rpartition(".")
        part = model.get_submodule(owner)
        original = getattr(part, leaf)
        setattr(part, leaf, lambda *args, **kwargs: 2 * original(*args, **kwargs))

    return change


def _on(name, method, *arguments):
    return lambda model: getattr(model.get_submodule(name), method)(*arguments) and None


def _apply(function, *arguments):
    return lambda model: function(model.get_submodule(QKV), *arguments) and None


def _distributed(model, wrapper=nn.parallel.DistributedDataParallel):
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    return wrapper(model)


compile_eagerly = partial(torch.compile, backend="eager")
WEIGHTS = {"convert", "to_timm", "save"}
CODE = {"convert", "to_timm"}
WRAPPED = {"convert", "to_timm", "save", "attach", "resize", "export", "change"}
COMPUTED, QUANTIZED = "weight, which is computed", "must have weights in floating point, got a quantized one"


def _ran_compiled(model):
    """Leave the notes of a compilation on the parameters."""
    compile_eagerly(model)(images(*(model if hasattr(model, "img_size") else model.patch_embed).img_size))
    assert any("_dynamo" in name for parameter in model.parameters() for name in vars(parameter))


#: Wrapper -> a function that changes or wraps a model, the error, and the operations that refuse it.
WRAPPERS = {
    "LoRA": (_replace(LoraLinear, QKV), "where LoraLinear adds to base_layer; merge both", WEIGHTS),
    # pytorch/ao#3474, pytorch/ao#2230, pytorch/ao#3800, megvii-research/FQ-ViT#48, safetensors/safetensors#515
    "int8": (lambda model: quantize_(model, Int8WeightOnlyConfig()), QUANTIZED, {*WEIGHTS, "attach", "change"}),
    "packed": (
        lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}),
        QUANTIZED,
        {*WEIGHTS, "attach", "change", "export", "freeze"},
    ),
    # pytorch/pytorch#37322, VainF/Torch-Pruning#374, KindXiaoming/pykan#285
    "pruned": (_apply(prune.l1_unstructured, "weight", 0.5), COMPUTED, {*WEIGHTS, "export"}),
    # pytorch/pytorch#28594, pytorch/pytorch#102981, descriptinc/descript-audio-codec#81
    "old weight norm": (_apply(weight_norm), COMPUTED, {*WEIGHTS, "export"}),
    "weight norm": (_apply(parametrizations.weight_norm), COMPUTED, WEIGHTS),
    "spectral norm": (_apply(parametrizations.spectral_norm), COMPUTED, WEIGHTS),
    # facebookresearch/ToMe#40, ultralytics/ultralytics#26132
    "block.forward": (_patch("blocks.0.forward"), "blocks.0.forward is the function .* not its class's own", CODE),
    "attn.forward": (_patch("blocks.1.attn.forward"), "blocks.1.attn.forward is the function .* not its class", CODE),
    "forward_features": (_patch("forward_features"), "forward_features is the function .* not its class", CODE),
    "hook": (
        _on("blocks.0", "register_forward_hook", _double),
        "blocks.0._forward_hooks is the function _double",
        CODE,
    ),
    "pre-hook": (
        _on("blocks.0", "register_forward_pre_hook", lambda module, args: (2 * args[0], *args[1:])),
        "blocks.0._forward_pre_hooks is the function",
        CODE,
    ),
    "hook of the model": (
        _on("", "register_forward_hook", _double),
        "but _forward_hooks is the function _double",
        CODE,
    ),
    # huggingface/pytorch-image-models#2003, #1566, karpathy/nanoGPT#325, Lightning-AI/pytorch-lightning#20233
    "compiled": (compile_eagerly, "OptimizedModule", {*WRAPPED, "freeze"}),
    "ran as a graph": (_ran_compiled, "", set()),
    "compiled block": (
        _replace(compile_eagerly, "blocks.0"),
        r"compiled|OptimizedModule|blocks\.0\.forward is",
        {*WEIGHTS, "attach"},
    ),
    "compile()": (
        lambda model: model.compile(backend="eager"),
        "must not be compiled, got VisionTransformer, which is",
        {"attach", "convert"},
    ),
    # pytorch/pytorch#12603: parameters that are replaced are not synchronized
    "DataParallel": (nn.DataParallel, "DataParallel", {*WRAPPED, "freeze"}),
    "DDP": (_distributed, "DistributedDataParallel", {*WRAPPED, "freeze"}),
}


@cache
def _host(is_converted):
    model = draw(timm.create_model("vit_tiny_patch16_224", **SIZES)).eval()
    return graticule.convert(model) if is_converted else model


def _timm():
    return deepcopy(_host(False))


def _opened(model):
    with tempfile.TemporaryDirectory() as folder:
        return graticule.from_pretrained(graticule.save_pretrained(model, folder))


def _exported(model):
    with tempfile.TemporaryDirectory() as folder:
        graticule.export(model, f"{folder}/model.pt2")
        program = torch.export.load(f"{folder}/model.pt2").module()
    return lambda x: torch.cat([program(image)[0] for image in x.split(1)])


def _audited(model):
    graticule.audit(model, {(32, 32): images(batch=9)}, timed=False)
    return model


def _converted():
    return deepcopy(_host(True))


def _resized_part(model):
    return graticule.resize(nn.ModuleDict({"backbone": model}), 48)["backbone"]


#: Operation -> a host, a function of it, and whether its outputs are the host's.
OPERATIONS = {
    "convert": (_timm, graticule.convert, True),
    "resize": (_timm, lambda model: graticule.resize(model, 48), False),
    "attach": (_timm, lambda model: graticule.attach(model, "learnable", remove=()), True),
    "to_timm": (_converted, graticule.to_timm, True),
    "save": (_converted, _opened, True),
    "fold": (_converted, graticule.fold, True),
    "change": (_converted, lambda model: graticule.change_position(model, "learnable"), True),
    "freeze": (_converted, graticule.freeze, True),
    "resize ours": (_converted, lambda model: graticule.resize(model, 48), False),
    "resize a part": (_converted, _resized_part, False),
    "debias": (_timm, lambda model: graticule.debias(model, images(batch=9), "mean").backbone, True),
    "export": (_converted, _exported, True),
    "audit": (_timm, _audited, True),
    "audit ours": (_converted, _audited, True),
}
REFUSED_ALSO = {
    *(("DDP", operation) for operation in ("resize ours", "resize a part")),
    *((wrapper, "debias") for wrapper in ("int8", "packed", "DataParallel", "DDP")),
}
SLOW = {*OPERATIONS} - {"convert", "resize", "attach", "save"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "wrapper",
    [pytest.param(name, marks=pytest.mark.slow) if "compil" in name or name == "DDP" else name for name in WRAPPERS],
)
@pytest.mark.parametrize(
    "operation", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in OPERATIONS]
)
def test_a_wrapped_model_is_carried_through_or_refused(operation, wrapper):
    build, function, is_same = OPERATIONS[operation]
    wrap, message, refusing = WRAPPERS[wrapper]

    def wrapped(model):
        torch.manual_seed(1)
        other = wrap(model)
        return model if other is None else other

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = wrapped(build())
    if operation in refusing or (wrapper, operation) in REFUSED_ALSO:
        tensors = {name: id(value) for name, value in model.named_parameters()}
        with pytest.raises(ValueError, match=message):
            function(model)
        assert {name: id(value) for name, value in model.named_parameters()} == tensors
        return
    x = images(batch=2) if is_same else images(48, 48, 2)
    with torch.no_grad():
        if is_same:
            expected = model(x)
        else:  # the operation and the wrapper commute
            torch.manual_seed(0)
            expected = wrapped(function(build()))(x)
        if operation == "save" and refusing >= CODE:
            with pytest.warns(UserWarning, match="not saved: the opened model computes what its classes do"):
                function(model)
            return
        torch.testing.assert_close(function(model)(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operation", ["resize", "resize ours", "resize a part", "attach", "to_timm"])
def test_a_model_whose_parameters_were_flattened_is_refused(operation):
    """pytorch/pytorch#151223, Lightning-AI/litgpt#491: the wrapper fails in the next pass if their shapes change."""
    build, function, _ = OPERATIONS[operation]
    wrapper = partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(ValueError, match="not be wrapped, got FullyShardedDataParallel; wrap the model after this"):
        function(_distributed(build(), wrapper))


def _plain_dtype(dtype):
    def change(model):
        layer = model.get_submodule(QKV)
        layer.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)

    return change


INTEGERS = [
    _plain_dtype(torch.uint8),  # as of bitsandbytes
    partial(quantize_, config=Int8DynamicActivationInt8WeightConfig()),
]


@pytest.mark.parametrize("change", INTEGERS)
def test_weights_that_are_not_in_floating_point_are_refused_by_name(change):
    for model, function in ((_timm(), graticule.convert), (_converted(), graticule.to_timm)):
        change(model)
        with pytest.raises(ValueError, match=r"got a quantized one \(blocks.0.attn.qkv.weight, "):
            function(model)


@torch.no_grad()
def test_a_hook_of_all_modules_is_refused():
    model = _timm()
    handle = nn.modules.module.register_module_forward_hook(_double)
    try:
        with pytest.raises(ValueError, match=r"_global_forward_hooks is .*, not empty"):
            graticule.convert(model)
    finally:
        handle.remove()
    assert graticule.convert(model)(images()).isfinite().all()


def test_a_bias_is_fitted_to_the_weights_with_their_low_rank_update():
    tables = []
    for wrap in (lambda model: None, WRAPPERS["LoRA"][0]):
        model = _timm()
        wrap(model)
        attached = graticule.attach(model, "relative_bias", example=images(batch=2), remove="pos_embed").graticule
        assert [fit.fitted for fit in attached.certificate.fits] == [True]
        tables.append(next(attached.position.parameters()))
    assert not torch.allclose(*tables)
