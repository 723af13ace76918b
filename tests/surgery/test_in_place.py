"""In place means in place: only what holds position changes, and every other object stays the one that it was."""

import copy
import re
import warnings
from contextlib import suppress
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from timm.layers.helpers import to_2tuple
from torch import nn
from torch.nn.utils import parametrize, prune

import graticule
from evidence.vector_rotations import in_float64
from graticule.checkpoints.skeleton import attributes, same_value
from graticule.position.position import Encoding
from in_turn import in_turn
from tiny import draw

PLAIN = {"depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 5, "img_size": 32, "patch_size": 8}
SWIN = {"img_size": 64, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4, "num_classes": 5}
MIXER = {"img_size": 64, "num_classes": 5}
SAM = {**PLAIN, "window_size": 2, "global_attn_indexes": (1,)}
CONVIT = {"img_size": 32, "patch_size": 8, "embed_dim": 8, "num_classes": 5}
ROPE = {"rope_type": "dinov3", "img_size": None, **{name: PLAIN[name] for name in ("depth", "embed_dim", "num_heads")}}
LEVIT = {"img_size": 64, "num_classes": 5, "embed_dim": (32, 48, 64), "key_dim": 8, "depth": (1, 1, 1)}
FORMER = {"depths": (1, 1, 1, 2), "embed_dims": (8, 16, 32, 48), "num_vit": 1}
#: Models of timm, and two sizes.
TIMM = {
    "vit_tiny_patch16_224": (PLAIN, (48, 64)),
    "deit_tiny_distilled_patch16_224": (PLAIN, (24, 16)),
    "vit_relpos_small_patch16_224": (PLAIN, (48, 64)),
    "vit_srelpos_small_patch16_224": (PLAIN, (24, 16)),
    "beit_base_patch16_224": (PLAIN, (48, 64)),
    "eva02_tiny_patch14_224": (PLAIN, (48, 64)),
    "vit_small_patch16_dinov3": (PLAIN, (48, 64)),
    "vit_small_patch16_rope_mixed_224": (PLAIN, (48, 64)),
    "swin_tiny_patch4_window7_224": (SWIN, (96, 128)),
    "swinv2_tiny_window8_256": (SWIN, (96, 128)),
    "samvit_base_patch16": (SAM, (48, 64)),
    "convit_tiny": (CONVIT, (48, 64)),
    "twins_pcpvt_small": (MIXER, (96, 128)),
    "mixer_s16_224": (MIXER, (96, 128)),
    "gmixer_12_224": (MIXER, (32, 48)),
    "resmlp_12_224": (MIXER, (96, 128)),
    "gmlp_ti16_224": (MIXER, (32, 48)),
    "naflexvit_base_patch16_gap": ({**PLAIN, "img_size": None}, (64, 96)),
    "hiera_tiny_224": ({"img_size": 64, "num_classes": 5}, (128, 96)),
    "sam2_hiera_tiny": ({"embed_dim": 16, "stages": (1, 1, 2, 1), "global_att_blocks": (3,)}, (128, 256)),
    # facebookresearch/LeViT#6 and #25, huggingface/pytorch-image-models#1540 and #1769
    "levit_128s": (LEVIT, (96, 160)),
    "levit_conv_128s": (LEVIT, (48, 64)),
    # snap-research/EfficientFormer#19, #20 and #29, and of version 2 #44
    "efficientformer_l1": ({**FORMER, "num_classes": 5}, (96, 160)),
    "efficientformerv2_s0": ({**FORMER, "img_size": 64, "num_classes": 5}, (96, 160)),
}
#: Names of parameters and buffers that hold position, or weights over the tokens, or are caches.
POSITION = re.compile(
    r"(^|\.)(pos_embed|position_embeddings|rel_pos_[hw]|relative_[pc]o\w*|attention_bia\w+"
    r"|rel_coords_log|rel_indices|attn_mask|bands|pos_embed_cached|t_[xy])$|mlp_tokens\.fc1\.weight|mlp_tokens\.fc2|linear_tokens|gate\.proj|^graticule\.|^position\."
)


#: Of those, the larger ones.
SLOW = ("hiera", "mixer", "gmixer", "resmlp", "gmlp", "twins", "vit_sr", "deit", "levit_conv", "vit_small_patch16_rope")
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name.startswith(SLOW) else name for name in TIMM]
#: Those that do not convert, and Swin, which scales its windows in timm, and keeps them here.
OTHERS = ("swin", "hiera", "sam2", "gmixer", "levit", "efficientformer")
CONVERTED = [mark for name, mark in zip(TIMM, NAMES, strict=True) if not name.startswith(OTHERS)]


def hook(module, args, output):
    """Change nothing."""


def prepared(model):
    """Return a model as it is in use: some parameters frozen, some modules in evaluation mode, hooks, checkpointing."""
    model = draw(model).double().train()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 != 0)
    for index, module in enumerate(model.modules()):
        module.training = index % 4 != 0
        if index % 2:
            module.register_forward_hook(hook)
            module.register_forward_pre_hook(lambda module, args: None)
    with suppress(AssertionError, AttributeError):  # of timm's Twins and ConViT, which lack it
        model.set_grad_checkpointing(True)
    return model


def source_of(function):
    """Return the module that a hook is from."""
    return source_of(function.func) if isinstance(function, partial) else function.__module__


def described(model, modes=True, flags=True, changed=()):
    """Return what an operation in place keeps: by name, the object or value; hooks of the library come and go."""
    kept = {}
    for name, module in model.named_modules():
        hooks = [hook for key, value in vars(module).items() if key.endswith("_hooks") for hook in value.values()]
        hooks = [hook for hook in hooks if not source_of(hook).startswith("graticule.")]
        kept[name] = id(module), modes and module.training, hooks, getattr(module, "grad_checkpointing", None)
    kept = {name: value for name, value in kept.items() if not POSITION.search(f"{name}.")}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        kept[f"{name} flags"] = value.dtype, value.device, flags and name not in changed and value.requires_grad
        kept[f"{name} object"] = None if POSITION.search(name) or name in changed else id(value)
    return kept


def check_in_place(model, operation, **parts):
    """Check that an operation on a model returns it, with everything as it was; tables may be replaced or leave."""
    before = described(model, **parts)
    assert operation(model) is model
    after = described(model, **parts)
    lost = before.keys() - after.keys()
    assert all(POSITION.search(name.partition(" ")[0]) for name in lost)
    assert {name: before[name] for name in before.keys() - lost if after[name] != before[name]} == {}


def resized(model, size, **sizes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return graticule.resize(model, size, **sizes)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_timm_is_resized_in_place(name):
    """It opens again in a model of the arguments that timm records; ConViT computes other displacements there."""
    options, size = TIMM[name]
    model = prepared(timm.create_model(name, **options))
    check_in_place(model, lambda model: resized(model, size))
    assert timm.data.resolve_model_data_config(model)["input_size"] == (3, *size)
    if name in ("convit_tiny", "efficientformer_l1"):
        again = model
    else:
        sizes = {key: value for key, value in model._model_args.items() if key.endswith("_size")}
        again = timm.create_model(name, **{**options, **sizes}).double()
        again.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), again.eval()(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CONVERTED)
def test_a_resized_model_of_timm_is_what_its_resized_conversion_is(name):
    """By either door, tables are resampled by timm's rules."""
    options, size = TIMM[name]
    with in_float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = draw(timm.create_model(name, **options)).eval()
        ours = graticule.convert(model)
        for shape in (size, size[::-1]):  # whose tables have as many rows
            graticule.resize(ours, shape)
            graticule.resize(model, shape)
            x = torch.randn(1, 3, *shape)
            with torch.no_grad():
                torch.testing.assert_close(model(x), ours(x), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            dict(graticule.to_timm(ours).state_dict()), dict(model.state_dict()), rtol=0, atol=1e-9
        )


def _table(path, *shape):
    """Return a change of a model: another table."""
    owner, _, leaf = path.rpartition(".")
    return lambda model: setattr(model.get_submodule(owner), leaf, nn.Parameter(torch.randn(shape)))


def _overlapping(model):
    model.pos_embed = nn.Parameter(torch.randn(1, 1 + 12 * 25, 32))
    model.patch_embed.proj = nn.Conv2d(3, 32, 8, stride=5)


def _buffer(model):
    model.rope.register_buffer("pos_embed", torch.randn(36, 64), persistent=False)


@torch.no_grad()
def test_tables_of_efficientformer_of_one_size_are_resized_with_a_warning_and_their_index_is_that_of_offsets():
    model = draw(timm.create_model("efficientformer_l1", **TIMM["efficientformer_l1"][0])).eval()
    part = model.stages[3].blocks[-1].token_mixer
    table, index = part.attention_biases.clone(), part.attention_bias_idxs.clone()
    with pytest.warns(UserWarning, match="timm builds EfficientFormer for tables of 7 x 7 alone"):
        graticule.resize(model, (96, 160))
    bias = part.get_attention_biases(torch.device("cpu")).unflatten(2, (3, 5)).unflatten(1, (3, 5))
    expected = F.interpolate(table.view(1, -1, 7, 7), (3, 5), mode="bicubic", antialias=True)[0]
    torch.testing.assert_close(bias[:, 2, 4].flip(1, 2), expected, rtol=0, atol=1e-5)
    assert torch.equal(bias[:, 0, 0], bias[:, 2, 4].flip(1, 2)) and model(torch.randn(1, 3, 96, 160)).isfinite().all()
    resized(model, 224)
    assert torch.equal(part.attention_bias_idxs, index)
    part.attention_biases = nn.Parameter(torch.zeros(8, 64))
    with pytest.raises(ValueError, match=r"attention_biases` of EfficientFormer must be \(8, 49\).* got \(8, 64\)"):
        graticule.resize(model, 256)


@pytest.mark.parametrize("name", ["levit_128s", "levit_conv_128s", "efficientformerv2_s0"])
@torch.no_grad()
def test_tables_of_absolute_offsets_are_resampled_and_read_as_in_a_model_that_is_built_for_the_size(name):
    options, size = TIMM[name]
    model = draw(timm.create_model(name, **options)).eval()
    model(torch.randn(1, 3, 64, 64))  # fills timm's caches of biases
    parts = [part for part in model.modules() if hasattr(part, "attention_biases")]
    assert len({part.attention_biases.shape[1] for part in parts}) > 1
    for shape in (size, size[::-1]):  # whose tables have as many rows
        before = [part.attention_biases.unflatten(1, to_2tuple(part.resolution))[None] for part in parts]
        graticule.resize(model, shape)
        other = timm.create_model(name, **{**options, "img_size": shape}).eval()
        other.load_state_dict(model.state_dict())
        x = torch.randn(1, 3, *shape)
        assert torch.equal(model(x), other(x))
        for part, table in zip(parts, before, strict=True):
            expected = F.interpolate(table, part.resolution, mode="bicubic", antialias=True)[0].flatten(1)
            torch.testing.assert_close(part.attention_biases, expected, rtol=0, atol=1e-5)
    for wrong in (72, (96, 90)):
        with pytest.raises(ValueError, match=r"`img_size` must be a multiple of the strides, (16|32) x .* pixels"):
            graticule.resize(model, wrong)
    assert torch.equal(model(x), other(x))


def test_hiera_with_height_and_width_exchanged_has_a_resampled_table():
    model = timm.create_model("hiera_tiny_224", embed_dim=16, img_size=(64, 96), num_classes=5)
    table = model.pos_embed.mT.unflatten(2, (16, 24))
    expected = F.interpolate(table, (24, 16), mode="bicubic", antialias=True).flatten(2).mT
    torch.testing.assert_close(graticule.resize(model, (96, 64)).pos_embed, expected, rtol=0, atol=1e-6)


ONE_BLOCK = {"embed_dim": 16, "stages": (1, 1, 1, 1), "num_classes": 5}
#: Models that resample their table for each image, and whether they accept images of any size.
# facebookresearch/sam2#138 and #407, keras-team/keras-hub#2697
RESAMPLING = {
    "sam2_hiera_tiny": ({**ONE_BLOCK, "global_att_blocks": ()}, True),
    "hiera_small_abswin_256": ({**ONE_BLOCK, "img_size": 64}, False),
}


@pytest.mark.parametrize("name", RESAMPLING)
def test_a_table_that_a_model_resamples_for_each_image_is_kept_for_all_sizes(name):
    options, accepts_any = RESAMPLING[name]
    model = timm.create_model(name, **options).eval()
    x, table = torch.randn(1, 3, 64, 96), model.pos_embed
    other = model if accepts_any else timm.create_model(name, **{**options, "img_size": (64, 96)}).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = other(x)
        for size in (32, 256, (64, 96)):
            assert graticule.resize(model, size).pos_embed is table
            assert timm.data.resolve_model_data_config(model)["input_size"] == (3, *to_2tuple(size))
        assert torch.equal(model(x), expected)
    assert "img_size" not in model._model_args or not accepts_any  # SAM 2's class has no such argument


# tlpss/keypoint-detection#44, google-research/maxvit#10, SLDGroup/G-CASCADE#3
RUNS_NOT = [
    *(("maxvit_tiny_rw_224", 97), ("maxvit_tiny_rw_224", 72), ("maxxvit_rmlp_nano_rw_256", (112, 224))),
    *(("coatnet_nano_rw_224", 72), ("coatnet_rmlp_nano_rw_224", (224, 112)), ("mixer_s16_224", 33)),
]
STAGES = {"embed_dim": (16,) * 4, "depths": (1,) * 4, "stem_width": (8, 16), "transformer_dim_head": 8, "img_size": 64}


@pytest.mark.filterwarnings("ignore::UserWarning:timm")
@pytest.mark.parametrize(("name", "size"), RUNS_NOT)
def test_a_size_that_a_model_of_timm_could_not_run_on_is_refused(name, size):
    model = timm.create_model(name, **(MIXER if name.startswith("mixer") else STAGES))
    before = described(model)
    with pytest.raises(ValueError, match=r"`img_size` must be (multiples of 32 for MaxxVit|a positive multiple)"):
        graticule.resize(model, size)
    assert described(model) == before
    assert graticule.resize(model, (64, 96)).eval()(torch.randn(1, 3, 64, 96)).isfinite().all()


@pytest.mark.parametrize("name", ["vit_relpos_small_patch16_224", "levit_128s", "converted"])
def test_a_model_that_is_resized_in_inference_mode_can_be_trained(name):
    model = HOSTS[name]() if name in HOSTS else timm.create_model(name, **TIMM[name][0])
    with torch.inference_mode():
        graticule.resize(model, (96, 64))
    model(torch.randn(2, 3, 96, 64)).sum().backward()
    assert not any(value.is_inference() for value in [*model.parameters(), *model.buffers()])


ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}


def _beit():
    return transformers.BeitModel(transformers.BeitConfig(**ENCODER, use_relative_position_bias=True))


#: Where it has its tables.
BEIT = [f"layers.{layer}.relative_position_bias" for layer in range(2)]


def _parametrize(model):
    parametrize.register_parametrization(model, "pos_embed", nn.Identity())


class Marked(nn.Parameter):
    """A parameter of another class."""


class Doubled(nn.Embedding):
    """An embedding with code of its own."""

    def forward(self, ids):
        return 2 * super().forward(ids)


def _embedding(model):
    return next(part for part in model.modules() if isinstance(part, nn.Embedding))


def _own(change):
    """Return a change of the first encoding of a model of this library."""
    return lambda model: change(next(part for part in model.modules() if isinstance(part, Encoding)))


def _as_buffer(part):
    table = part.pos_embed.detach()
    del part.pos_embed
    part.register_buffer("pos_embed", table)


VIT, BIAS = "vit_tiny_patch16_224", "attn.relative_position_bias_table"
#: Model -> a change by hand as people make it, and the error; the grid on record is 4 x 4.
REPLACED = [
    # Martinser/REG#9: a table that was resampled by hand
    (VIT, _table("pos_embed", 1, 37, 32), "`pos_embed` .* be .1, 17, 32., .* got .1, 37, 32."),
    (VIT, _overlapping, "got .1, 301, 32.; tell it"),  # YuanGongND/ast#27: patches that overlap
    (VIT, _table("pos_embed", 1, 16, 32), "must be .1, 17, 32."),  # without the row of the class
    ("deit_tiny_distilled_patch16_224", _table("pos_embed", 1, 17, 32), "must be .1, 18, 32."),
    ("eva02_tiny_patch14_224", _buffer, r"`rope.pos_embed` of Eva must be \(16, 64\)"),
    ("beit_base_patch16_224", _table(f"blocks.0.{BIAS}", 124, 2), "must be .52, 2."),
    ("swin_tiny_patch4_window7_224", _table(f"layers.0.blocks.0.{BIAS}", 81, 2), "must be .49, 2."),
    ("vit_relpos_small_patch16_224", _table(f"blocks.0.{BIAS.replace('.', '.rel_pos.')}", 81, 2), "must be .49, 2."),
    ("levit_128s", _table("stages.0.blocks.0.attn.attention_biases", 4, 36), "must be .4, 16."),
    ("convit_tiny", _table("pos_embed", 1, 36, 32), "must be .1, 16, 32."),
    (VIT, lambda model: setattr(model.patch_embed.proj, "stride", (5, 5)), "got 8 x 8 and 5 x 5"),
    (VIT, lambda model: prune.l1_unstructured(model, "pos_embed", 3), "got one that is computed"),
    (VIT, _parametrize, "got one that is computed"),
    (VIT, lambda model: setattr(model.patch_embed, "grid_size", (2, 8)), r"`grid_size` \(4, 4\) .*2, 8"),
    (VIT, lambda model: model.pos_embed.register_hook(torch.neg), "`pos_embed` must have no hooks"),
    (VIT, lambda model: setattr(model, "pos_embed", Marked(model.pos_embed)), "Parameter, got Marked"),
    ("converted", _own(_parametrize), "`model.position` must have its weights as tensors, got encodings.0.pos_embed"),
    *(
        (name, _own(change), f"`{place}position.encodings.0.pos_embed` must have no hooks")
        for name, place in (("converted", ""), ("folded", ""), ("attached", "graticule."))
        for change in (
            lambda part: part.pos_embed.register_hook(torch.neg),
            lambda part: part.pos_embed.register_post_accumulate_grad_hook(hook),
        )
    ),
    ("sinusoidal", _own(lambda part: part.pos_embed.mul_(1.2)), r"encodings.0.pos_embed is a tensor of other values"),
    ("rotary", _own(lambda part: part.table.mul_(1.2)), r"position.encoding.table is a tensor of other values"),
    ("CLIP", lambda model: setattr(_embedding(model), "max_norm", 0.2), "embedding.max_norm is 0.2, not None"),
    ("CLIP", lambda model: setattr(_embedding(model), "__class__", Doubled), "position_embedding is Doubled, not Emb"),
]


@pytest.mark.parametrize(("name", "change", "message"), REPLACED)
def test_a_table_of_another_grid_than_that_on_record_is_refused(name, change, message):
    model = HOSTS[name]() if name in HOSTS else timm.create_model(name, **TIMM[name][0])
    change(model)
    check_refused(model, 64, message)


@in_turn(
    ("name", "sizes"),
    [(name, sizes) for name in ("timm", "converted") for sizes in ({"patch_size": 4}, {"channels": 1})],
)
def test_a_kernel_that_is_computed_is_refused_where_it_would_be_replaced(name, sizes):
    model = HOSTS[name]()
    parametrize.register_parametrization(model.patch_embed.proj, "weight", nn.Identity())
    check_refused(model, None, "`model.patch_embed.proj` must have its weights as tensors, got weight", **sizes)
    assert graticule.resize(model, 64).patch_embed.proj.weight.shape == (32, 3, 8, 8)


def check_refused(model, size, message, **sizes):
    """Check that a size is refused, and that all tensors are the same, with the same values."""
    state = [(key, id(value), value.clone()) for key, value in [*model.named_parameters(), *model.named_buffers()]]
    with pytest.raises(ValueError, match=message):
        graticule.resize(model, size, **sizes)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(id(after[key]) == place and torch.equal(after[key], value) for key, place, value in state)


def settings_of(model):
    """Map the class of a part and the name of a tensor or number of it to the first such part and the value."""
    known = {}
    for name, part in model.named_modules():
        for key, value in attributes(part).items():
            if not isinstance(value, nn.Parameter):
                value = value.clone() if isinstance(value, torch.Tensor) else value
                known.setdefault((type(part), key), (name, value))
    return known


def another(value):
    """Return another value of the same type and shape; None if there is none."""
    if isinstance(value, tuple):
        return tuple(map(another, value))
    if isinstance(value, torch.Tensor):
        return value.flip(0) if value.dtype == torch.long else 2 * value + 1
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else None


@pytest.mark.parametrize("name", [
    name if name.startswith(("swin_", "eva02")) else pytest.param(name, marks=pytest.mark.slow)
    for name in TIMM if not name.startswith(("naflex", "convit"))
])  # fmt: skip
def test_what_a_resize_replaces_must_be_what_timm_gives(name):
    """As EVA's bands, or Swin's shifts, masks and indices; the size itself is what a resize is asked to change."""
    options, size = TIMM[name]
    model = timm.create_model(name, **options)
    before, after = settings_of(model), settings_of(resized(model, size))
    for (kind, key), (place, value) in before.items():
        new, other = after[kind, key][1], another(value)
        if key == "img_size" or other is None or (new is value or same_value(new, value)):
            continue
        model = timm.create_model(name, **options)
        part = model.get_submodule(place)
        setattr(part, key, other)
        if not same_value(other, value):
            check_refused(model, size, "undo this change first|must have `grid_size`|for the grid that the model has")


def test_ties_kinds_and_attributes_of_tables_are_carried_over():
    vit, expected = _vit().bfloat16(), graticule.resize(_vit(), (24, 16))
    table = vit.pos_embed.detach()
    del vit.pos_embed
    vit.register_buffer("pos_embed", table, persistent=False)
    vit.blocks[1].register_buffer("pos", table)
    resized(vit, (24, 16))
    assert type(vit.pos_embed) is torch.Tensor and vit.blocks[1].pos is vit.pos_embed
    assert (vit.pos_embed.shape, vit.pos_embed.dtype) == (expected.pos_embed.shape, torch.bfloat16)
    assert "pos_embed" not in vit.state_dict() and "blocks.1.pos" in vit.state_dict()
    ours = HOSTS["converted"]()
    expected = graticule.resize(copy.deepcopy(ours), (24, 16)).position.encodings[0].pos_embed
    _own(_as_buffer)(ours)
    table = graticule.resize(ours, (24, 16)).position.encodings[0].pos_embed
    assert type(table) is torch.Tensor and torch.equal(table, expected)
    for model, holders, key in (
        (timm.create_model("beit_base_patch16_224", **PLAIN), ("blocks.0.attn", "blocks.1.attn"), BIAS[5:]),
        (_vit(), ("", "blocks.1"), "pos_embed"),
        (_beit(), BEIT, BIAS[5:]),
        *((HOSTS[name](), ("position.encodings.0", "blocks.1"), "pos_embed") for name in ("converted", "folded")),
    ):
        first, second = map(model.get_submodule, holders)
        table = getattr(first, key).requires_grad_(False)
        table.no_decay = True
        setattr(second, key, table)
        resized(model, (32, 48))
        new = getattr(first, key)
        assert new is not table and new is getattr(second, key) and new.no_decay and not new.requires_grad


@in_turn("name", [VIT, "swin_tiny_patch4_window7_224", "eva02_tiny_patch14_224", "levit_128s", "convit_tiny"])
def test_a_model_of_timm_with_changes_is_the_same_at_its_own_size(name):
    model = timm.create_model(name, **TIMM[name][0])
    for part in model.modules():
        for key, value in attributes(part).items():
            if isinstance(value, torch.Tensor) and key in part._buffers:
                part._buffers[key] = value.clone().fill_(1)
            elif key == "shift_size":
                part.shift_size = (1, 1)
    before = [{**attributes(part)} for part in model.modules()]
    graticule.resize(model, TIMM[name][0]["img_size"])
    for part, values in zip(model.modules(), before, strict=True):
        assert all(value is values[key] or "_cfg" in key for key, value in attributes(part).items())


def test_a_table_that_was_replaced_is_resized_from_the_grid_that_the_model_is_told():
    model = _vit().eval()
    model.patch_embed.set_input_size(img_size=(48, 32))  # as the error says
    _table("pos_embed", 1, 25, 32)(model)
    other = timm.create_model("vit_tiny_patch16_224", **{**PLAIN, "img_size": (48, 32)}).eval()
    other.load_state_dict(model.state_dict())
    other.set_input_size(img_size=(64, 96))
    assert torch.equal(graticule.resize(model, (64, 96)).pos_embed, other.pos_embed)


def _vit():
    return timm.create_model(VIT, **PLAIN)


#: Models whose transforms follow their images, and whether they are saved and opened.
CONFIGURED = {
    "converted": (lambda: graticule.convert(_vit()), True),  # lxtGH/CAE#4
    "built": (lambda: graticule.create_model("vit_tiny_patch16_224", **{**PLAIN, "img_size": (16, 24)}), True),
    "built, of windows": (lambda: graticule.create_model("swin_tiny_patch4_window7_224", **SWIN), True),
    "mixer": (lambda: graticule.create_model("mixer_s16_224", img_size=32, embed_dim=8, num_blocks=1), True),
    "debiased": (lambda: graticule.debias(graticule.convert(_vit()), torch.randn(9, 3, 32, 32), "mean"), True),
    "of timm": (_vit, False),
    "of timm, SAM": (lambda: timm.create_model("samvit_base_patch16", **SAM), False),
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_transforms_of_timm_follow_the_images_of_a_model(name, tmp_path):
    build, is_saved = CONFIGURED[name]
    model = build()
    if name.startswith("built"):
        assert timm.data.resolve_model_data_config(model)["input_size"] == (3, *model.img_size)
    for sizes, expected in (((64, 96), None), (3, 64, 96)), ((64, 1), (1, 64, 64)), ((None, 6), (6, 64, 64)):
        graticule.resize(model, sizes[0], channels=sizes[1])  # huggingface/pytorch-image-models#2780
        models = [model]
        if is_saved and expected[0] == 1:
            models.append(graticule.from_pretrained(graticule.save_pretrained(model, tmp_path / "model")))
        for changed in models:
            config = timm.data.resolve_model_data_config(changed)
            assert (config["input_size"], len(config["mean"]), len(config["std"])) == (expected, *[expected[0]] * 2)


def _debiased(model):
    images = torch.randn(9, 3, 32, 32, dtype=torch.float64)
    return graticule.debias(model, images, "mean").backbone


PATCHES, TABLES = (
    {"changed": ("patch_embed.proj.weight",)},
    {"changed": ("pos_embed", "embeddings.position_embeddings")},
)
#: An operation, the models, and what it changes besides position.
OPERATIONS = {
    "attach": (lambda model: graticule.attach(model, "learnable", "lape"), ("timm", "transformers"), TABLES),
    "attach, detach": (lambda model: graticule.detach(graticule.attach(model, "peg")), ("timm", "transformers"), {}),
    "attach, resize": (lambda model: graticule.resize(graticule.attach(model), (48, 64)), ("timm",), TABLES),
    "debias": (_debiased, ("timm", "transformers", "converted"), {}),
    "change_position": (lambda model: graticule.change_position(model, "relative_bias", "default"), ("converted",), {}),
    "resize": (lambda model: graticule.resize(model, (48, 64)), ("converted", "transformers"), {}),
    "resize, patches": (lambda model: graticule.resize(model, 48, patch_size=12), ("timm", "converted"), PATCHES),
    "resize, channels": (lambda model: graticule.resize(model, channels=1), ("timm", "converted"), PATCHES),
    "fold": (graticule.fold, ("converted",), {"modes": False}),
    "fold, unfold": (lambda model: graticule.unfold(graticule.fold(model)), ("converted",), {"modes": False}),
    "freeze": (lambda model: graticule.freeze(model, "all-but-head"), ("converted",), {"modes": False, "flags": False}),
}
HOSTS = {
    "timm": _vit,
    "transformers": lambda: transformers.Dinov2Model(transformers.Dinov2Config(**ENCODER)),
    "CLIP": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**ENCODER)).eval(),
    "converted": lambda: graticule.convert(_vit()),
    "folded": lambda: graticule.fold(graticule.convert(_vit())),
    "attached": lambda: graticule.attach(_vit()),
    **{
        name: lambda encoding=encoding: graticule.create_model("vit_tiny_patch16_224", encoding=encoding, **PLAIN)
        for name, encoding in (("sinusoidal", "sinusoidal_2d"), ("rotary", "rope"))
    },
}


@pytest.mark.parametrize(("name", "host"), [(name, host) for name in OPERATIONS for host in OPERATIONS[name][1]])
def test_an_operation_in_place_keeps_every_other_object(name, host):
    operation, _, parts = OPERATIONS[name]
    model = prepared(HOSTS[host]())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_in_place(model, operation, **parts)


def test_a_model_on_the_meta_device_is_resized():
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224")
    graticule.resize(model, (448, 224))
    assert model.pos_embed.is_meta and model.pos_embed.shape == (1, 28 * 14 + 1, 192)
