"""gMLP and PosMLP: the papers' counts, any size, any mixing encoding."""

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import graticule
from graticule.backbones.registry import list_small_models
from graticule.hub.config import take_position
from in_turn import in_turn, refusals
from tiny import count

GMLP = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_blocks": 3, "groups": 4, "num_classes": 5}
POSMLP = {"img_size": 64, "embed_dim": 16, "depths": (2, 1, 2, 1), "windows": (4, 4, 4, 2), "groups": (2, 4, 4, 8)}
POSMLP["num_classes"] = 5
OF_POSMLP = {"name": "posmlp_tiny_224", **POSMLP}
MODELS = [("gmlp_s16_224", GMLP, 8), ("posmlp_tiny_224", POSMLP, 32)]
models = pytest.mark.parametrize(("name", "sizes", "step"), MODELS, ids=["gmlp", "posmlp"])


def full_size(name, **kwargs):
    with torch.device("meta"):
        return graticule.create_model(name, **kwargs).eval().requires_grad_(False)


def gmacs(model, size=224):
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, size, size, device="meta"))
    return counter.get_total_flops() / 2e9


@in_turn(
    ("name", "parameters", "macs"),
    [
        ("posmlp_tiny_384", 21, 17.7),  # tests/parity compares the others to the last parameter
        ("gmlp_b16_224", 73, 15.8),
    ],
)
def test_sizes_are_those_of_the_papers_table_2(name, parameters, macs):
    model = full_size(name)
    assert count(model) / 1e6 == pytest.approx(parameters, rel=0.01)
    assert gmacs(model, model.img_size[0]) == pytest.approx(macs, rel=0.03)


@pytest.mark.parametrize(
    ("encoding", "token_mixing"),
    [
        ("sgu", 196**2 + 196),
        ("glrpe", (4 * 8 + 1) * 196 - 4 * 8 * 14 + 8),  # printed with 4 * 8 at the end
        ("ggqpe", 196 + 6 * 8),
    ],
)
def test_a_block_has_the_parameters_of_appendix_4(encoding, token_mixing):
    first, second = (full_size("gmlp_s16_224", encoding=encoding, num_blocks=n) for n in (1, 2))
    d, gamma = 256, 6
    norms = 2 * d + (0 if encoding == "ggqpe" else 2 * (gamma * d // 2))  # not counted by the paper
    assert count(second) - count(first) - norms == 1.5 * gamma * d * d + (gamma + 1) * d + token_mixing


@in_turn("encoding", ["none", "learnable", "peg"])
@models
def test_an_encoding_that_mixes_nothing_is_refused(name, sizes, step, encoding):
    with pytest.raises(ValueError, match=r"give every layer of .* `mixing`"):
        graticule.create_model(name, encoding=encoding, **sizes)


test_invalid_arguments_are_refused_before_any_work = refusals(
    ({"name": "gmlp_s16_224", **GMLP, "groups": 5}, "`groups` must divide the 48 channels"),
    ({"name": "gmlp_s16_224", **GMLP, "combine": "mul"}, "`combine`"),
    ({"groups": (3, 4, 4, 8)}, "`groups` must divide the 32 channels"),
    ({"windows": (4, 4, 4)}, "each of the 4 stages"),
    ({"windows": (0, 4, 4, 2)}, "`windows?(_size)?`"),
    ({"patch_merging": "max"}, "`patch_merging`"),
    ({"stem_norm": "group"}, "`stem_norm` must be one of batch, layer"),
    ({"patch_merging": "linear", "merging_norm": "batch"}, "`merging_norm` must be left out where sampling is linear"),
    ({"shift": True}, "`shift` must be one of swin, released or None, got True"),
    ({"img_size": 48}, "nearest sizes are 32 and 64"),
    ({"encoding": "ggqpe(form='sigma')"}, "`form` of encoding ggqpe must be"),
    ({"encoding": "ggqpe(from_='gamma')"}, "did you mean 'form'"),
    ({"encoding": "ggqpe+lrpe"}, "`mixing` must be given by one encoding at most"),
    (
        {"name": "vit_tiny_patch16_224", "encoding": "ggqpe", "class_token": False, "global_pool": "avg"},
        "ggqpe, which mixes tokens",
    ),
    ({"name": "deit_tiny_patch16_224", "encoding": "learnable(bias=False)"}, "must not have the option 'bias'"),
    call=lambda kwargs: graticule.create_model(**({} if "name" in kwargs else OF_POSMLP) | kwargs),
    error=(ValueError, TypeError),
)


def test_attention_refuses_an_encoding_that_mixes_tokens_and_names_the_models_that_take_it():
    takes = {name.partition("_")[0] for name, sizes in list_small_models().values() if accepts(name, sizes)}
    assert takes == {"gfnet", "gmlp", "mixer", "posmlp", "resmlp"}
    message = f"ggqpe, which mixes tokens and is only for {', '.join(f'{family}_*' for family in sorted(takes))}."
    for build in (
        lambda: graticule.create_model("vit_nano_patch4_28", encoding="ggqpe(bias=False)"),
        lambda: graticule.create_model("swin_tiny_patch4_window7_224", encoding="learnable + ggqpe"),
        lambda: graticule.change_position(graticule.create_model("vit_nano_patch4_28"), "ggqpe"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            build()


def accepts(name, sizes):
    """Return whether the layers of a model can use an encoding that mixes tokens."""
    model = graticule.create_model(name, **sizes)
    try:
        model.replace_position(take_position({"encoding": "sgu"}))
    except ValueError:
        return False
    return True
