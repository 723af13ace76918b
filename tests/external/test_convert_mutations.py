"""Every attribute and part of a model that is changed after it was built is carried by `convert`, or refused."""

import inspect
import re
from collections import Counter
from copy import deepcopy
from functools import partial, wraps
from types import FunctionType
from unittest import mock

import pytest
import torch
from test_convert_pyramids import NAMES as PYRAMIDS
from test_convert_pyramids import timms
from timm.models.naflexvit import NaFlexVitCfg
from timm_models import build
from torch import nn
from transformers_models import MODELS, whole_float64
from transformers_models import build as build_by_config

import graticule
from evidence.vector_rotations import in_float64
from graticule.external.convert.verify import outputs_of
from tiny import draw

NAFLEX = {"img_size": None, "pos_embed_grid_size": (4, 6)}
#: A model of each reader and kind of block of timm's plain transformers.
PLAIN = {
    "vit_tiny_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "vit_small_patch16_18x2_224": {},
    "vit_base_patch16_xp_224": {},
    "vit_base_patch16_rpn_224": {},
    "vit_so150m_patch16_reg4_map_256": {},
    "vit_giant_patch14_dinov2": {},
    "beit_base_patch16_224": {},
    "eva02_base_patch14_224": {},
    "vit_small_patch16_dinov3": {},
    "vit_small_patch16_rope_mixed_224": {},
    "vit_relpos_small_patch16_224": {},
    "vit_srelpos_small_patch16_224": {},
    "samvit_base_patch16": {"window_size": 2, "global_attn_indexes": (1,)},
    "naflexvit_base_patch16_gap": NAFLEX,
    "naflexvit_base_patch16_siglip": {**NAFLEX, "rope_type": "axial"},
}
#: One for each reader, of which `make test` makes every 60th change.
READERS = (
    *("vit_tiny_patch16_224", "beit_base_patch16_224", "vit_relpos_small_patch16_224", "eva02_base_patch14_224"),
    *("samvit_base_patch16", "naflexvit_base_patch16_gap", "swinv2_tiny_window8_256", "twins_svt_small"),
    *("convit_tiny", "mixer", "ViTModel-0", "SwinModel-27", "SamVisionModel-31"),
)
TIMM = [*PLAIN, *PYRAMIDS]
TRANSFORMERS = {f"{name}-{index}": (name, config, options) for index, (name, config, options) in enumerate(MODELS)}
CASES = [(name, 60) for name in READERS]
CASES += [pytest.param(name, 1, marks=pytest.mark.slow) for name in (*TIMM, *TRANSFORMERS)]


def build_model(name, **kwargs):
    if name in TRANSFORMERS:
        return draw(build_by_config(*TRANSFORMERS[name])).eval()
    return timms(name, **kwargs) if name in PYRAMIDS else build(name, **PLAIN[name], **kwargs)


def blocks_of(model):
    """Return the names of the blocks: the modules of the class of which most have numbers as their last name."""
    numbered = [(name, type(part)) for name, part in model.named_modules() if name.rpartition(".")[2].isdigit()]
    stages = {name.rpartition(".")[0] for name, _ in numbered}
    return [
        name
        for name, kind in numbered
        if "Block" in kind.__name__ or re.search(r"Layer$|EncoderLayer", kind.__name__)
        if not any(stage.startswith(f"{name}.blocks") for stage in stages)
    ]


def scope_of(model):
    """Return the names of the modules of the second block, and of those outside of blocks."""
    blocks = blocks_of(model)
    assert len(blocks) > 1, [type(part).__name__ for part in model.modules()]
    second = blocks[1]
    within = tuple(f"{block}." for block in blocks)
    return [
        name
        for name, _ in model.named_modules()
        if f"{name}.".startswith(f"{second}.") or not f"{name}.".startswith(within)
    ]


def other_value(key, value):
    """Return another value of an attribute; None if it is of another kind than those that are changed."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return 0.25 if value == 0 else value * 1.5
    if isinstance(value, tuple | list) and value and all(isinstance(side, int | float) for side in value):
        return type(value)([other_value(key, value[0]), *value[1:]])
    if key == "padding_mode":
        return "circular"
    return f"{value}_" if isinstance(value, str) else torch.tanh if callable(value) else None


def set_attribute(name, key, value, model):
    setattr(model.get_submodule(name), key, value)
    if key == "padding_mode":
        part = model.get_submodule(name)
        part._reversed_padding_repeated_twice = [side for side in part.padding[::-1] for _ in range(2)]


def replace_part(name, part, model):
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, part)


def scale_buffer(name, key, model):
    value = model.get_submodule(name)._buffers[key]
    value.mul_(1.5) if value.is_floating_point() else value.copy_(value.flip(-1))


def double_forward(name, model):
    part = model.get_submodule(name)
    forward = part.forward

    def double(*args, **kwargs):
        output = forward(*args, **kwargs)
        return 2 * output if isinstance(output, torch.Tensor) else output

    part.forward = double


def double_output(name, model):
    model.get_submodule(name).register_forward_hook(
        lambda part, args, output: 2 * output if isinstance(output, torch.Tensor) else None
    )


def tie(name, other, model):
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, model.get_parameter(other))


def set_mode(name, model):
    part = model.get_submodule(name)
    part.training = not part.training


def freeze(name, model):
    model.get_parameter(name).requires_grad_(False)


def mutations(model):
    """Yield the label of each change, and a function that makes it in a copy of the model."""
    blocks = blocks_of(model)
    for name in scope_of(model):
        part = model.get_submodule(name)
        for key, value in vars(part).items():
            other = other_value(key, value)
            if not key.startswith("_") and key != "training" and other is not None:
                yield f"{name}.{key}", partial(set_attribute, name, key, other)
        for key, value in part._buffers.items():
            if value is not None:
                yield f"{name}.{key} scaled", partial(scale_buffer, name, key)
        if name and not any(True for _ in part.parameters()):
            for kind in (nn.ReLU, nn.Tanh, nn.Identity, partial(nn.Dropout, 0.25)):
                new = kind()
                if type(new) is not type(part):
                    yield f"{name} = {type(new).__name__}", partial(replace_part, name, new)
        yield f"{name}.forward", partial(double_forward, name)
        yield f"{name} hook", partial(double_output, name)
        yield f"{name} mode", partial(set_mode, name)
        if not any(True for _ in part.children()):
            for key, value in part._parameters.items():
                place = f"{name}.{key}".lstrip(".")
                others = [
                    place.replace(blocks[1], block, 1)
                    for block in blocks
                    if place.startswith(f"{blocks[1]}.") and block != blocks[1]
                ]
                for other in others:
                    if value is not None and has_parameter(model, other, value.shape):
                        yield f"{place} tied to {other}", partial(tie, place, other)
                        break
    yield "blocks swapped", partial(swap, blocks[0], blocks[1])
    yield "block repeated", lambda model: replace_part(blocks[1], model.get_submodule(blocks[0]), model)


def swap(first, second, model):
    one, two = model.get_submodule(first), model.get_submodule(second)
    replace_part(first, two, model)
    replace_part(second, one, model)


def has_parameter(model, name, shape):
    try:
        return model.get_parameter(name).shape == shape
    except AttributeError:
        return False


def rates(model):
    """Return the rates of all dropouts and stochastic depths that are not 0, by their names in timm's layout.

    The dropout in the network of relative biases is left out, since it is an option of the encoding.
    """
    found = Counter()
    for name, part in model.named_modules():
        for key in ("p", "drop_prob", "prob", "attn_drop", "patch_drop_rate"):
            if isinstance(rate := vars(part).get(key), float) and rate:
                place = f"{name}.{key}" if key in ("attn_drop", "patch_drop_rate") else name
                place = re.sub(r"^(?:embeds\.)?pos_drops?(?:\.\d+)?$", "pos_drop", place.lstrip("."))
                place = (
                    place.replace("head.drop", "head_drop")
                    .replace("shared_rel_pos", "rel_pos")
                    .replace("attn.attn_drop", "attn_drop")
                    .replace("patch_drop_rate", "patch_drop")
                )
                found[re.sub(r"drop_path[12]$", "drop_path", place), round(rate, 6)] = 1
    return {place: count for place, count in found.items() if "rel_pos.mlp" not in place[0]}


@torch.no_grad()
def run(model, x, ours=False):
    return model(x) if ours else outputs_of(model, x)[0]


def outcome(model, expected, change, x, is_transformers):
    """Return what `convert` makes of a changed model: 'carried', 'refused', 'without effect', or what is wrong."""
    changed = deepcopy(model)
    change(changed)
    try:
        ours = graticule.convert(changed, verify=False)
    except ValueError:
        return "refused"
    except Exception as error:
        return f"wrong: {type(error).__name__}"
    evaluated = deepcopy(changed).eval()
    try:
        actual = run(evaluated, x)
    except Exception as error:  # as with an image size that is no multiple of the patch
        with pytest.raises(ValueError, match="`verify=False` converts it without this check"):
            graticule.convert(changed)
        return f"refused: {error}"
    output = run(ours.eval(), x, ours=True)
    if output.shape != actual.shape or not torch.allclose(
        output, actual, rtol=0, atol=1e-8 * float(actual.abs().max())
    ):
        return f"wrong: outputs differ by {float((output - actual).abs().max()):.3g}"
    before, after = rates(model), rates(changed)
    if not is_transformers and rates(ours) != after:
        return "wrong: other rates"
    if is_transformers and before != after:
        return "wrong: other rates"
    return "without effect" if torch.equal(actual, expected) and before == after else "carried"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("name", "step"), CASES)
def test_what_is_changed_in_a_model_is_carried_or_refused(name, step):
    is_transformers = name in TRANSFORMERS
    with whole_float64() if is_transformers else in_float64():
        torch.manual_seed(0)
        model = build_model(name)
        ours = graticule.convert(model, verify=False)
        x = torch.randn(1, ours.in_chans, *ours.img_size)
        expected = run(deepcopy(model), x)
        outcomes = {
            label: outcome(model, expected, change, x, is_transformers) for label, change in [*mutations(model)][::step]
        }
    counts = Counter(result.partition(":")[0] for result in outcomes.values())
    print(name, len(outcomes), dict(counts))
    assert counts["refused"] > len(outcomes) / 2
    assert not {label: result for label, result in outcomes.items() if result.startswith("wrong")}


FAST = ("vit_tiny_patch16_224", "beit_base_patch16_224", "ViTModel-0")
FEW = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in READERS if name not in FAST)]


def replaced(function, kind, key):
    """Return a change of a class, to a function with the name and the module of the original."""
    return mock.patch.object(kind, key, wraps(function)(lambda *args, **kwargs: function(*args, **kwargs)))


@pytest.mark.parametrize("name", FEW)
def test_a_function_that_was_put_into_a_class_is_refused_by_its_name(name):
    model = build_model(name).float()
    kinds = {kind for part in model.modules() for kind in type(part).__mro__ if issubclass(kind, nn.Module)}
    changes = [(value, kind, key) for kind in kinds for key, value in vars(kind).items() if key != "__init__"]
    changes = [change for change in changes if isinstance(change[0], FunctionType)]
    assert len({change[1] for change in changes}) > 6
    for function, kind, key in (
        changes if name not in FAST else [change for change in changes if change[2] == "forward"]
    ):
        place = re.escape(
            f"but {kind.__module__}.{kind.__qualname__}.{key} is the function replaced.<locals>.<lambda> of "
        )
        with replaced(function, kind, key), pytest.raises(ValueError, match=place):
            graticule.convert(model, verify=False)
    graticule.convert(model, verify=False)


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_another_pooling_and_another_head_go_back_or_are_refused(name):
    counts, is_transformers = Counter(), name in TRANSFORMERS
    model = build_model(name).float()
    ours = graticule.convert(model)
    x = torch.randn(1, ours.in_chans, *ours.img_size)
    for pool in sorted({*ours.pools} - {"map", "seq"}):
        ours = graticule.convert(model, verify=False)
        try:
            ours.reset_classifier(ours.num_classes if is_transformers else 4 if pool else 0, pool)
            back = (graticule.to_transformers if is_transformers else graticule.to_timm)(ours)
        except ValueError as error:
            counts["refused"] += 1
            assert re.search("`global_pool`|another (?:global_pool|head_layer)", str(error)), error
            continue
        expected, output = outputs_of(back, x)[0], ours(x)
        torch.testing.assert_close(
            output.reshape(expected.shape), expected, rtol=0, atol=1e-4 * float(expected.abs().max())
        )
        counts["carried"] += 1
    assert counts["refused"] if is_transformers else counts["carried"], counts


#: Rates of timm's constructors, all different.
RATES = {
    "drop_rate": 0.11,
    "pos_drop_rate": 0.12,
    "patch_drop_rate": 0.13,
    "proj_drop_rate": 0.14,
    "attn_drop_rate": 0.15,
    "drop_path_rate": 0.16,
}
#: Model -> the rate that it cannot have here, and the part that the error names: ViT-22B's MLP and the mixing of tokens
#: have no dropout here, and Segment Anything's windows need all patches.
WITHOUT = {
    "vit_base_patch16_xp_224": ("proj_drop_rate", "blocks.0.mlp_drop.p is 0.14, not 0.0"),
    "samvit_base_patch16": ("patch_drop_rate", "patch_drop is PatchDropout, not Identity"),
    "mixer": ("proj_drop_rate", "blocks.0.mlp_tokens.drop1.p is 0.14, not 0.0"),
    "resmlp": ("proj_drop_rate", "blocks.0.mlp_channels.drop1.p is 0.14, not 0.0"),
}


@pytest.mark.parametrize(
    "name", [name if name in READERS else pytest.param(name, marks=pytest.mark.slow) for name in TIMM]
)
def test_rates_in_training_are_those_of_timm_or_refused(name):
    kind = NaFlexVitCfg if "naflex" in name else type(build_model(name))
    known = inspect.signature(kind).parameters
    all_rates = {rate: value for rate, value in RATES.items() if rate in known or "kwargs" in known}
    lost, message = WITHOUT.get(name, (None, ""))
    if lost is not None:
        with pytest.raises(ValueError, match=re.escape(message)):
            graticule.convert(build_model(name, **{lost: RATES[lost]}), verify=False)
    original = build_model(name, **{rate: value for rate, value in all_rates.items() if rate != lost}).train()
    ours = graticule.convert(original, verify=False)
    assert rates(ours) == rates(original)
    assert {value for _, value in rates(ours)} >= {value for rate, value in all_rates.items() if rate != lost}
    assert all(part.training for part in ours.modules())
    assert not any(part.training for part in graticule.convert(original.eval(), verify=False).modules())
