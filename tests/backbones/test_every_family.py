"""Every public function on every family: a correct result, or a refusal that is listed in one table."""

import copy
import json
from functools import cache
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.models import get_notrace_functions, get_notrace_modules
from timm.optim import param_groups_layer_decay
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import graticule
from graticule import testing
from graticule.analysis.attention import attention_maps
from graticule.analysis.audit import audit
from graticule.analysis.correlation import position_correlations
from graticule.analysis.equivariance import translation_error, whole_patches
from graticule.analysis.mixing import mixing_maps
from graticule.analysis.position_maps import rotary_similarity
from graticule.analysis.probe import Probe
from graticule.checkpoints.load import load_position
from graticule.checkpoints.read import read_checkpoint, save_weights
from graticule.encodings.forms.mixing import MixingEncoding
from graticule.external.attention_map import save_attention
from graticule.hub.config import argument_defaults
from graticule.surgery.change import change_position
from in_turn import in_turn, refusals
from tiny import GATED, SMALL, THREE, assert_same, build, count, draw, families, images_for, shallow, three_families

#: Their attention is within windows, or has keys on another grid, so rotations and biases of pairs are not supported.
WITHOUT_PAIRS = ("PVT", "Twins-SVT", *GATED)
#: Measurements that an audit cannot make.
UNAVAILABLE: dict[str, set[str]] = {family: {"attention", "position zeroed"} for family in GATED}

#: Encoding (None: the family's default) and joining; together they use every field of `LayerPosition`.
OWN = (None, "default")
OF_RELATIVES = [OWN, ("sinusoidal_2d", "lape"), ("learnable+relative_bias", "shared"), ("rope+shaw", "default")]
#: The same with more for families that differ from these in more than their stem, head or block.
OF_ATTENTION = [*OF_RELATIVES, ("none", "default"), ("bucketed_bias", "default"), ("peg+learnable", "unshared")]
OF_GATES = [OWN, ("learnable+lrpe_m", "shared"), ("peg+sgu", "default"), ("sinusoidal_2d+gqpe", "default")]
OF_PVT = [(None, "default"), ("none", "default"), ("sinusoidal_2d", "lape"), ("peg+learnable", "unshared")]
CHOICES = dict.fromkeys(SMALL, OF_RELATIVES) | dict.fromkeys(GATED, OF_GATES)
CHOICES |= {"PVT": OF_PVT, "Twins-SVT": OF_RELATIVES[:2]}
CHOICES |= dict.fromkeys(("ViT, DeiT", "Swin", "CeiT"), OF_ATTENTION)


def every(test: Any) -> Any:
    """Test families with their encodings and joinings."""
    return three_families(in_turn(("encoding", "joining"), lambda family: CHOICES[family])(test))


#: (function, families or encodings) -> text of the refusal. Everything else must give a result.
REFUSED: dict[tuple[str, tuple[str | None, ...]], str] = {
    ("attention_maps", GATED): "`model` must have attention, got|`without_position` must be False",
    ("mixing_maps", tuple(set(SMALL) - set(GATED))): "`model` must mix its tokens by position",
    ("mixing_maps of its own", ("MLP-Mixer",)): "`model` must mix its tokens by weights",
    ("position_correlations", ("bucketed_bias", "rope+shaw", "peg+sgu")): "`model` must have an absolute encoding",
    # families whose default encoding is not a table
    (
        "position_correlations of its own",
        ("CPVT, GAP", "Swin", "Swin V2", "Twins-SVT", *(f for f in GATED if f != "GFNet")),
    ): "`model` must have an absolute encoding",
}


def refusal(function: str, *who: str | None) -> str | None:
    """Return the listed refusal of a function on a family, or with an encoding."""
    return next((why for (name, whom), why in REFUSED.items() if name == function and set(who) & set(whom)), None)


def result(refused: str | None, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function that must give a result, or refuse with `refused`; returns None after a refusal."""
    if refused is None:
        return function(*args, **kwargs)
    with pytest.raises(ValueError, match=refused.replace("(", r"\(")):
        function(*args, **kwargs)
    return None


@cache
def shared_model(family: str, encoding: str | None = None, joining: str = "default") -> Any:
    return draw(build(family, encoding, joining)).double().eval()


def model_of(family: str, encoding: str | None = None, joining: str = "default") -> Any:
    return copy.deepcopy(shared_model(family, encoding, joining))


def layers(model: Any) -> int:
    return sum(getattr(model, "depths", ())) or len(model.blocks)


@three_families
@torch.no_grad()
def test_the_intermediates_are_those_that_the_model_goes_through(family):
    model = shared_model(family)
    x = images_for(model, wider=2)
    final, maps = model.forward_intermediates(x)
    torch.testing.assert_close(final, model.forward_features(x))
    through = list(model.each_layer(x))
    assert len(through) == layers(model) and len(maps) == len(model.feature_info)
    tokens, grid = through[-1]
    torch.testing.assert_close(maps[-1], grid.to_map(tokens))
    for features, info in zip(maps, model.feature_info, strict=True):
        assert features.shape[:2] == (2, info["num_chs"]) and features.isfinite().all()
    # tokens instead of maps, with prefix tokens beside them, or in a dictionary
    tokens = model.forward_intermediates(x, output_fmt="NLC", intermediates_only=True)
    assert_same(tokens, [m.flatten(2).mT for m in maps], 0)
    paired = model.forward_intermediates(x, return_prefix_tokens=True, intermediates_only=True)
    named = model.forward_intermediates(x, return_prefix_tokens=True, output_dict=True)
    assert set(named) == {"image_intermediates", "image_features"} | (
        {"image_intermediates_prefix"} if model.num_prefix_tokens else set()
    )
    assert_same(named["image_intermediates"], maps, 0)
    assert_same(named["image_features"], final, 0)
    if model.num_prefix_tokens:
        assert_same([m for m, _ in paired], maps, 0)
        assert paired[-1][1].shape == (2, model.num_prefix_tokens, model.num_features)
        assert_same(paired[-1][1], through[-1][0][:, : model.num_prefix_tokens], 0)


@three_families
@torch.no_grad()
def test_stopping_early_gives_the_same_intermediates_and_so_does_a_pruned_model(family):
    model = model_of(family)
    x = images_for(model)
    first = model.forward_intermediates(x, indices=[0], intermediates_only=True)
    early = model.forward_intermediates(x, indices=[0], stop_early=True, intermediates_only=True)
    assert_same(early, first, 0)
    assert model.prune_intermediate_layers([0]) == [0] and len(model.feature_info) == 1
    final, after = model.forward_intermediates(x)
    assert_same(after, first, 0)
    channels = model.num_features if family == "SAM" else first[0].shape[1]  # its neck is unchanged
    assert final.shape[-1] == channels and count(model) < count(shared_model(family))


@three_families
@torch.no_grad()
def test_torch_fx_traces_the_model_with_timms_leaves_for_any_size(family):
    model = shared_model(family)
    tracer = {"leaf_modules": get_notrace_modules(), "autowrap_functions": get_notrace_functions()}
    names = get_graph_node_names(model, {**tracer, "param_shapes_constant": True})[1]
    block = model.feature_info[-1]["module"]
    wanted = {block: "block", names[-1]: "logits"}
    traced = create_feature_extractor(model, wanted, tracer_kwargs={**tracer, "param_shapes_constant": True})
    for x in (images_for(model), images_for(model, taller=2)):
        outputs = traced(x)
        assert_same(outputs["logits"], model(x), 0)
        if not any(position.map_after for position in model.position(model.grid)):
            last = [tokens for tokens, _ in model.each_layer(x)][-1]
            assert_same(outputs["block"], last, 0)


@every
def test_attention_maps_are_shares_of_the_keys_in_every_layer(tmp_path, family, encoding, joining):
    model = shared_model(family, encoding, joining)
    x = images_for(model, batch=1, taller=2)
    refused = refusal("attention_maps", family)
    maps = result(refused, attention_maps, model, x)
    without = result(refused, attention_maps, model, x, without_position=True)
    if maps is None:
        return
    assert [layer.layer for layer in maps] == list(range(layers(model)))
    for layer in maps:
        assert layer.weights.shape[2:] == (layer.queries.tokens, layer.keys.tokens)
        np.testing.assert_allclose(layer.weights.sum(-1), 1.0)
        assert all(0 <= layer.distance(head) <= np.hypot(*layer.queries.shape) for head in range(layer.num_heads))
    same = [np.array_equal(a.weights, b.weights) for a, b in zip(maps, without, strict=True)]
    assert all(same) if encoding == "none" else not any(same[1:])
    with np.load(save_attention(maps, tmp_path / "attention.npz")) as saved:
        np.testing.assert_array_equal(saved["layer0"], maps[0].weights)


@every
def test_the_translation_error_is_measured_in_every_layer(family, encoding, joining):
    model = shared_model(family, encoding, joining)
    x = images_for(model, taller=2, wider=2)
    error = translation_error(model, x)
    assert len(error.grids) == layers(model)
    assert whole_patches(model, (x.shape[-2], x.shape[-1])).shape == error.grids[-1].shape
    with pytest.raises(ValueError, match="must be a multiple of the coarsest patch"):
        translation_error(model, x[..., 1:])
    assert np.isfinite(error.all_patches).all() and (error.all_patches >= 0).all()
    assert np.isfinite(error.logits) and 0 <= error.flips <= 1
    assert np.isfinite(error.prefix).all() == all(grid.prefix for grid in error.grids)


@every
@torch.no_grad()
def test_weights_go_out_under_published_names_and_come_back(tmp_path, family, encoding, joining):
    model = shared_model(family, encoding, joining)
    x = images_for(model)
    path = tmp_path / "weights.safetensors"
    state = graticule.published_state_dict(model)
    save_weights(state, path)
    assert read_checkpoint(path).keys() == state.keys()
    fresh = build(family, encoding, joining).double().eval()
    assert_same(graticule.load_checkpoint(fresh, path)(x), model(x), 0)
    draw(fresh)
    if any(True for _ in fresh.position.parameters()):
        load_position(fresh, path)
        for name, value in model.position.state_dict().items():
            torch.testing.assert_close(fresh.position.state_dict()[name], value)
    else:
        with pytest.raises(ValueError, match=r"the position parameters of .* neither has any"):
            load_position(fresh, path)


@every
def test_every_trainable_parameter_is_in_one_group_of_timms_layer_decay(family, encoding, joining):
    model = shared_model(family, encoding, joining)
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay())
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    mixing = {id(p) for part in model.position.modules() if isinstance(part, MixingEncoding) for p in part.parameters()}
    assert not decayed & {id(p) for p in model.position.parameters()} - mixing


@three_families
def test_checkpointing_changes_no_gradient(family):
    gradients = []
    for checkpointing in (False, True):
        model = model_of(family)
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(0)
        x, runs = images_for(model), []
        block = model.get_submodule(model.feature_info[0]["module"])
        block.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        model(x).square().sum().backward()
        assert len(runs) == 1 + checkpointing  # recomputed for the gradient
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


@three_families
def test_dropout_is_where_its_argument_says_and_in_training_alone(family):
    rates = ("drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate")
    defaults = argument_defaults(type(shared_model(family)))
    assert defaults.keys() >= set(rates) - {"attn_drop_rate"}
    for rate in [rate for rate in rates if rate in defaults]:
        model = draw(build(family, **{rate: 0.5}))
        x = images_for(model, batch=8).float()
        assert not torch.equal(model.train()(x), model(x)), rate
        assert torch.equal(model.eval()(x), model(x)), rate


@three_families
@torch.no_grad()
def test_the_classifier_is_replaced_and_removed(family):
    model = model_of(family)
    x = images_for(model)
    model.reset_classifier(3)
    classifier = model.get_classifier()
    assert model(x).shape == (2, 3) and (classifier is model.head or classifier == (model.head, model.head_dist))
    features = model.forward_head(model.forward_features(x), pre_logits=True)
    model.reset_classifier(0)
    torch.testing.assert_close(model(x), features)
    assert features.shape == (2, model.num_features)


@three_families
@torch.no_grad()
def test_another_position_leaves_all_other_weights_or_is_refused_and_nothing_changes(family):
    mixed = {"lrpe_m", "sinusoidal_2d + sgu"}
    for encoding in ("none", "learnable", "rope", "lrpe_m", "sinusoidal_2d + sgu"):
        model = model_of(family)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        x = images_for(model)
        expected = model(x)
        if (encoding in mixed) != (family in GATED) or (encoding == "rope" and family in WITHOUT_PAIRS):
            with pytest.raises(ValueError, match=r"`(encoding|grid)` must"):
                change_position(model, encoding)
            assert_same(model(x), expected, 0)
            continue
        change_position(model, encoding, images=x)
        assert model(x).isfinite().all()
        assert [drift.layer for drift in model.certificate.drift] == list(range(sum(model.depths)))
        others = [{k: v for k, v in state.items() if k[:8] != "position"} for state in (before, model.state_dict())]
        assert_same(*others, atol=0)


@three_families
@torch.no_grad()
def test_an_audit_probes_every_layer_and_shuffles_the_position(family):
    model = model_of(family)
    height, width = model.img_size
    images = {(height, width): images_for(model, 5), (2 * height, width): images_for(model, 5, taller=2)}
    report = audit(model, images, timed=False)
    assert len(report.probes) == len(report.grids) == sum(model.depths) and not report.unknown
    for probe, grid in zip(report.probes, report.grids, strict=True):
        assert isinstance(probe, Probe) and probe.examples == 5 * grid.patches
        assert probe.r2.shape == (5, 2) and np.isfinite(probe.mean[[side > 1 for side in grid.shape]]).all()
    effects = {effect.name for effect in report.effects}
    assert effects >= {"position zeroed", "position shuffled", "probe's directions removed"} - set(report.unavailable)
    assert set(report.unavailable) - {"position maps"} == UNAVAILABLE.get(family, set()), report.unavailable
    assert json.dumps(report.record())


@three_families
@torch.no_grad()
def test_the_similarity_under_rotation_is_that_of_every_layer_that_rotates(family):
    assert rotary_similarity(shared_model(family)) is None
    if family in WITHOUT_PAIRS:
        return
    model = shared_model(family, "rope")
    for stage, depth in enumerate(model.depths):
        rotary = rotary_similarity(model, stage=stage)
        assert len(rotary.similarity) == depth
        for source, similarity in zip(rotary.sources, rotary.similarity, strict=True):
            if source is None:  # no rotation, or windows in a layer where another one has the whole grid
                assert np.isnan(similarity).all()
            else:
                np.testing.assert_allclose(similarity, similarity.T, atol=1e-6)
                np.testing.assert_allclose(np.diagonal(similarity), 1.0, atol=1e-6)
        assert any(rotary.sources)


@families((*THREE, "PVT", "SAM"))
@torch.no_grad()
def test_the_position_code_passes_every_check(family):
    model = draw(build(family, **shallow(family))).eval()
    findings = testing.check_model(model, skip=("export", "autocast", "caches", "crop"))
    assert {finding.outcome for finding in findings} <= {"passed", "not applicable"}
    assert "batch" in {finding.check for finding in findings if finding.outcome == "passed"}


@in_turn(
    ("family", "misspelt", "meant"),
    [
        ("PVT", "encodings", "encoding"),
        ("ViT, DeiT", "image_size", "img_size"),
        ("Swin", "join", "joining"),
        ("gMLP", "num_class", "num_classes"),
    ],
)
def test_a_misspelt_argument_is_refused_with_the_nearest_name(family, misspelt, meant):
    name, sizes = SMALL[family]
    for create, known in ((graticule.create_model, name), (timm.create_model, f"graticule_{name}")):
        with pytest.raises(ValueError, match=f"`{misspelt}` is not an argument of {name}; did you mean .*`{meant}`"):
            create(known, **sizes, **{misspelt: 1})


X = torch.zeros(2, 3, 32, 32)
test_a_language_model_is_refused_where_images_are_looked_at = refusals(
    (lambda model: attention_maps(model, X), "`model` must take images, got LanguageModel"),
    (mixing_maps, "`model` must mix its tokens by position"),
    (lambda model: translation_error(model, X), "`model` must take images, got LanguageModel"),
    (lambda model: position_correlations(model, 32), "`img_size` must be left out with a language model"),
    (lambda model: graticule.fold(model, 32), "`img_size` must be left out with a language model"),
    call=lambda function: function(graticule.create_language_model("lm_nano", 11, context=8, depth=2)),
)
test_a_module_that_is_no_backbone_is_refused_by_name = refusals(
    *(
        (function, r"`model` must .*got Linear|one that Linear runs on")
        for function in (
            *(mixing_maps, position_correlations, graticule.fold, graticule.published_state_dict),
            *(lambda model: attention_maps(model, X), lambda model: translation_error(model, X)),
            *(lambda model: graticule.transfer(model, {}), lambda model: graticule.load_checkpoint(model, "a.pt")),
        )
    ),
    call=lambda function: function(nn.Linear(2, 2)),
)
