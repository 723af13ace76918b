"""Names in checkpoints: every model loads its own weights and its published ones, and no two names become one."""

import warnings

import pytest
import torch

import graticule
from graticule.backbones.swin_v2 import _is_reference
from graticule.checkpoints.layouts import rename_start
from graticule.position.position import ENCODINGS
from tiny import GATED, build, draw, every_family

#: Of every kind of name: tables, modules inside of an encoding whose names blocks have too, and biases.
FEW = ("learnable", "coordinates", "relative_bias", "peg")


def check_names(family, encodings, joinings):
    """Load the weights of every model with these encodings and joinings; returns the encodings that were built."""
    built = []
    for encoding in encodings:
        for joining in joinings:
            try:
                model, other = (build(family, encoding, joining) for _ in range(2))
            except ValueError:  # the family, or the joining, cannot use it
                continue
            built.append(encoding)
            state = draw(model).state_dict()
            published = graticule.published_state_dict(model)
            computed = sum(map(_is_reference, state)) if family == "Swin V2" else 0  # by timm
            assert len(published) == len(state) - computed, (encoding, joining)
            for values in (state, published):
                draw(other)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of a file that does not say its grid or its window
                    other.load_state_dict(values)
                different = [name for name, value in other.state_dict().items() if not torch.equal(value, state[name])]
                assert not different, (encoding, joining, different)
    return built


@every_family
def test_a_model_loads_its_own_weights_and_its_published_ones(family):
    mixing = ("sgu", "ggqpe", "global_filter") if family in GATED else ()
    sums = [f"{encoding}+{mixed}" for encoding in FEW for mixed in mixing]
    assert check_names(family, [*mixing, *sums] if mixing else FEW, ("default", "unshared"))


@pytest.mark.slow
@every_family
def test_a_model_with_any_encoding_loads_its_own_weights_and_its_published_ones(family):
    assert check_names(family, ENCODINGS, ("default", "unshared", "lape"))


def test_a_rename_applies_to_whole_components_at_the_beginning_of_a_name():
    pair = "blocks.*.mlp", "blocks.*.leff"
    assert rename_start("blocks.3.mlp.fc1.weight", *pair) == "blocks.3.leff.fc1.weight"
    for name in ("blocks.3.mlps.0", "blocks.3.attn.mlp.0", "position.blocks.3.mlp.0", "blocks", "myblocks.3.mlp"):
        assert rename_start(name, *pair) == name


def test_a_file_with_a_weight_under_two_names_is_refused():
    model = build("GFNet")
    state = model.state_dict()
    state["patch_embed.proj.bias"] = state["stem.proj.bias"] + 1
    with pytest.raises(ValueError, match=r"stem\.proj\.bias and patch_embed\.proj\.bias are both stem\.proj\.bias"):
        model.load_state_dict(state)


def test_tables_of_several_layers_keep_their_names_where_the_released_code_has_one():
    model = build("PosMLP", "learnable+ggqpe", "unshared")
    published = graticule.published_state_dict(model)
    assert "absolute_pos_embed" not in published
    assert sum(name.endswith(".pos_embed") for name in published) > 1
    assert "absolute_pos_embed" in graticule.published_state_dict(build("PosMLP", "learnable+ggqpe"))


def test_chunks_of_blocks_are_loaded_as_blocks():
    """DINOv2's training names block 1 `blocks.0.1` or, in chunks of one block, `blocks.1.1`."""
    model = draw(build("ViT, DeiT"))
    for chunk in (2, 1):
        other = draw(build("ViT, DeiT"))
        state = {
            ".".join([*name.split(".")[:1], str(int(name.split(".")[1]) // chunk), *name.split(".")[1:]])
            if name.startswith("blocks.")
            else name: value
            for name, value in model.state_dict().items()
        }
        assert "blocks.0.0.norm1.weight" in state
        other.load_state_dict(state)
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
