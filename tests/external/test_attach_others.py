"""Attaching a position to models of transformers and torchvision, and to user-defined modules."""

import copy

import pytest
import timm
import torch
import transformers
from torch import nn
from torchvision.models import VisionTransformer

import graticule
from graticule import attach, detach
from graticule.surgery.change import change_position
from in_turn import in_turn
from tiny import DIM, assert_same, draw, images, tiny


@pytest.fixture(scope="module")
def models():
    """Return small models of other libraries in float64 with random parameters, and the arguments of `attach`."""
    torch.manual_seed(0)
    sizes = {"image_size": 32, "patch_size": 8, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3}
    sizes |= {"layer_norm_eps": 1e-6, "attn_implementation": "sdpa"}
    vit = transformers.ViTModel(transformers.ViTConfig(**sizes, intermediate_size=96), add_pooling_layer=False)
    dinov2 = transformers.Dinov2Model(transformers.Dinov2Config(**sizes))
    torchvision = VisionTransformer(32, 8, 3, 3, DIM, 96, num_classes=5)
    for model in (vit, dinov2, torchvision):
        draw(model).double().eval()
    return {
        "vit": (vit, {"blocks": "layers.*", "norm": "layernorm_before"}),
        "dinov2": (dinov2, {"blocks": "encoder.layer.*"}),
        "torchvision": (torchvision, {"blocks": "encoder.layers.*", "norm": "ln_1"}),
    }


def tokens(model, x, **options):
    """Return the tokens after the final norm, (B, N, D), of any of the models."""
    if isinstance(model, VisionTransformer):
        x = model._process_input(x)
        return model.encoder(torch.cat([model.class_token.expand(len(x), -1, -1), x], 1))
    out = model.forward_features(x) if hasattr(model, "forward_features") else model(x, **options)
    return out if isinstance(out, torch.Tensor) else out.last_hidden_state


def as_ours(model):
    """Return the weights of a model under our names, without its position."""
    renamed = [
        *[("embeddings.cls_token", "cls_token"), ("class_token", "cls_token"), ("heads.head", "head")],
        *[("layernorm.", "norm."), ("encoder.ln.", "norm."), ("self_attention.in_proj_", "attn.qkv.")],
        *[("embeddings.patch_embeddings.projection", "patch_embed.proj"), ("conv_proj", "patch_embed.proj")],
        *[("encoder.layers.encoder_layer_", "blocks."), ("encoder.layer.", "blocks."), ("layers.", "blocks.")],
        *[("layernorm_before", "norm1"), ("layernorm_after", "norm2"), ("ln_1", "norm1"), ("ln_2", "norm2")],
        *[("self_attention.out_proj", "attn.proj"), ("attention.o_proj", "attn.proj")],
        *[("mlp.0.", "mlp.fc1."), ("mlp.3.", "mlp.fc2.")],
    ]  # fmt: skip
    state = {}
    for name, value in model.state_dict().items():
        for old, new in renamed:
            name = name.replace(old, new)
        state[name] = value
    for name in [name for name in state if "attention.q_proj" in name]:
        parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        state[name.replace("attention.q_proj", "attn.qkv")] = torch.cat(parts)
    return {name: value for name, value in state.items() if "position" not in name and "pos_embedding" not in name}


JOININGS = [
    *[("learnable", name) for name in graticule.list_joinings()],
    ("relative_bias", "default"),
    ("peg(places=[-1, 1]) + learnable", "lape"),
]


def test_outputs_of_models_of_other_libraries_equal_the_built_in_model(models):
    x = images(dtype=torch.float64)
    for name in ("vit", "torchvision"):
        stock, how = models[name]
        for encoding, joining in JOININGS:
            if (name, joining) == ("torchvision", "tupe"):
                continue
            built_in = draw(tiny(encoding, joining, num_classes=0 if name == "vit" else 5)).double().eval()
            left = built_in.load_state_dict(as_ours(stock), strict=False)
            assert not left.unexpected_keys and all(key.startswith("position.") for key in left.missing_keys)
            model = attach(copy.deepcopy(stock), encoding, joining, start="new", **how)
            model.graticule.position.load_state_dict(built_in.position.state_dict())
            with torch.no_grad():
                assert_same(tokens(model, x), built_in.forward_features(x))


def test_models_of_others_start_as_the_built_in_model_whose_position_is_changed(models):
    for name, own in (("vit", "embeddings.position_embeddings"), ("torchvision", "encoder.pos_embedding")):
        stock, how = models[name]
        for encoding, joining in (("learnable", "lape"), ("relative_bias", "default")):
            built_in = tiny(num_classes=0 if name == "vit" else 5).double().eval()
            built_in.load_state_dict(as_ours(stock), strict=False)
            table = built_in.position.encodings[0].pos_embed
            with torch.no_grad():
                table.copy_(stock.get_parameter(own))
            change_position(built_in, encoding, joining)
            model = attach(copy.deepcopy(stock), encoding, joining, **how)
            for key, value in built_in.position.state_dict().items():
                assert_same(model.graticule.position.state_dict()[key], value)


def test_every_model_is_copied_loaded_trained_and_restored(models):
    x = images(dtype=torch.float64)
    for name, (stock, how) in models.items():
        for encoding, joining in (("learnable + peg", "lape"), ("learnable", "queries_keys")):
            before = tokens(stock, x)
            model = attach(copy.deepcopy(stock), encoding, joining, **how)
            draw(model.graticule)
            found = tokens(model, x)
            assert not torch.allclose(found, before)
            other = attach(copy.deepcopy(stock), encoding, joining, **how)
            other.load_state_dict(model.state_dict())
            assert torch.equal(tokens(other, x), found) and torch.equal(tokens(copy.deepcopy(model), x), found), name
            tokens(model, x).pow(3).sum().backward()
            assert all(p.grad is not None and p.grad.any() for p in model.graticule.parameters()), name
            names = list(stock.state_dict())
            assert list(detach(model).state_dict()) == names and torch.equal(tokens(model, x), before), name


def test_the_position_follows_the_size_of_each_image(models):
    x = images(24, 40, dtype=torch.float64)
    for name, options in (("vit", {"interpolate_pos_encoding": True}), ("dinov2", {})):
        stock, how = models[name]
        model = attach(copy.deepcopy(stock), "learnable", "default", **how)
        grid = graticule.Grid(3, 5, prefix=1)
        table = model.graticule.position(grid)[0].added_to_stream
        assert table.shape == (16, DIM)
        entered = []
        model.get_submodule(how["blocks"].replace("*", "0")).register_forward_pre_hook(
            lambda block, args, entered=entered: entered.append(args[0])
        )
        tokens(model, x, **options)
        nn.init.zeros_(model.graticule.position.encodings[0].pos_embed)
        tokens(model, x, **options)
        assert_same(entered[0] - entered[1], table.expand(2, -1, -1))


@pytest.mark.slow
def test_a_model_of_transformers_compiles_as_one_graph(models):
    stock, how = models["vit"]
    model = copy.deepcopy(stock)
    del model.layers[1:]
    attach(model, "learnable", "lape", **how)
    x = images(dtype=torch.float64)
    assert_same(torch.compile(model, fullgraph=True, backend="eager")(x).last_hidden_state, tokens(model, x))


class Own(nn.Module):
    """A user-defined transformer: patches by a linear layer, blocks that are called by keyword."""

    def __init__(self, parallel: bool = False) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * 8 * 8, DIM)
        self.layers = nn.ModuleList(Unpacked(parallel) for _ in range(2))

    def embed(self, x):
        return self.patches(x.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(tokens=x)
        return x


class OwnBlock(nn.Module):
    """Attention of one head, with an MLP after it or parallel to it."""

    def __init__(self, parallel: bool = False) -> None:
        super().__init__()
        self.parallel = parallel
        self.before = nn.LayerNorm(DIM)
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.ffn = nn.Linear(DIM, DIM)

    def forward(self, tokens):
        y = self.before(tokens)
        attended = nn.functional.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y))
        return tokens + attended + self.ffn(y if self.parallel else attended), "more"


class Unpacked(OwnBlock):
    """Returns only its tokens."""

    def forward(self, tokens):
        return super().forward(tokens)[0]


def own(parallel=False, kind=Own):
    """Return a user-defined module, with the same parameters each time."""
    torch.manual_seed(5)
    return draw(kind(parallel)).double().eval()


OWN = {
    "blocks": "layers.*",
    "norm": "before",
    "patch_grid": (4, 4),
    "example": torch.zeros(2, 3, 32, 32, dtype=torch.float64),
}


def test_a_table_is_added_to_the_tokens_of_an_unknown_module():
    x = images(dtype=torch.float64)
    module = own()
    with torch.no_grad():
        table = attach(own(), **OWN).graticule.position.encodings[0].pos_embed.normal_().clone()
        y = module.embed(x) + table
        for layer in module.layers:
            y = layer(y)
        attached = attach(own(), **OWN)
        attached.graticule.position.encodings[0].pos_embed.copy_(table)
        assert_same(attached(x), y)


def test_tokens_may_come_before_samples():
    class EncoderFirst(nn.Module):
        """PyTorch's own layers, pre-norm, with tokens (N, B, D) or (B, N, D)."""

        def __init__(self, batch_first: bool) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, DIM, 8, 8)
            self.pos_embed = nn.Parameter(torch.zeros(1, 16, DIM))
            layer = nn.TransformerEncoderLayer(DIM, 3, 48, dropout=0.0, norm_first=True, batch_first=batch_first)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.batch_first = batch_first

        def forward(self, x):
            x = self.patches(x).flatten(2).transpose(1, 2) + self.pos_embed
            return self.encoder(x) if self.batch_first else self.encoder(x.transpose(0, 1)).transpose(0, 1)

    state = draw(EncoderFirst(True)).double().state_dict()
    x = images(dtype=torch.float64, batch=3)
    for encoding, joining in (("learnable", "lape"), ("learnable + relative_bias", "queries_keys"), ("peg", "default")):
        found = []
        for batch_first in (True, False):
            module = EncoderFirst(batch_first).double().eval()
            module.load_state_dict(state)
            attach(module, encoding, joining, blocks="encoder.layers.*", remove="pos_embed", example=x)
            assert module.graticule.host.sequence_first != batch_first and module.graticule.grid.prefix == 0
            with torch.no_grad():
                found.append(module(x))
                torch.manual_seed(7)
                draw(module.graticule)
                found.append(module(x))
        assert_same(found[0], found[2])
        assert_same(found[1], found[3])
        with torch.no_grad():
            assert not torch.allclose(detach(module)(x), found[1])


class Twice(Own):
    """Adds two tables to its tokens."""

    def __init__(self, parallel: bool = False) -> None:
        super().__init__(parallel)
        self.places, self.more = (nn.Parameter(torch.ones(1, 16, DIM)) for _ in range(2))

    def embed(self, x):
        return super().embed(x) + self.places + self.more


class Pyramid(Own):
    """Its second block gets half of the tokens."""

    def forward(self, x):
        return self.layers[1](self.layers[0](self.patches(x))[:, ::2])


class Unused(Own):
    """Calls one of its two blocks."""

    def forward(self, x):
        return self.layers[0](self.patches(x))


FEW = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
STAGES = {"img_size": 32, "embed_dim": 12, "depths": (2, 2), "num_heads": (3, 3), "window_size": 4}
ROWS = torch.zeros(2, 16, 192)
TUPE, BIAS = {"joining": "tupe"}, {"encoding": "relative_bias"}
#: A model of timm, of `models` or of `own`, options of `attach`, and a part of the message.
REFUSED = [
    (("vit_base_patch16_rpn_224", FEW), {}, "it is post-norm"),
    (
        ("swin_tiny_patch4_window7_224", STAGES),
        {"blocks": "layers.*.blocks.*"},
        r"\(B, N, D\) on one grid, got \(2, 8, 8, 12\)",
    ),
    (("beit_base_patch16_224", FEW), BIAS, "`bias`: Attention has no argument `attn_mask`"),
    (("beit_base_patch16_224", FEW), {"joining": "queries_keys"}, "Attention is not called with queries"),
    (("mixer_s16_224", {"img_size": 32}), TUPE, "`bias`: no module of the block is called with"),
    ("torchvision", TUPE, "`query_scale`: MultiheadAttention gives no access to its queries between projection and lo"),
    (
        "vit",
        BIAS,
        "'flash_attention_2' of ViTAttention adds nothing to its logits; load the model with 'sdpa'",
    ),
    ({"parallel": True}, {"joining": "lape"}, "gives layers `after_norm`: the normalized tokens go to ffn, too"),
    ({}, {"patch_grid": None}, "`patch_grid` must be given: no convolution before the blocks"),
    ({}, {"example": None}, "`example` must be given for Own, which does not say the shape of its inputs"),
    ({}, TUPE, "`bias`: Linear has no argument `attn_mask`"),
    ({}, BIAS, "`bias`: Linear has no argument `attn_mask`"),
    ({"kind": Twice}, {}, r"`remove` must name .* of places, more; \(\) keeps all"),
    (
        {"kind": Pyramid},
        {"example": ROWS},
        r"on one grid, got \(2, 16, 24\) and \(2, 8, 24\); attach supports no maps, windows or pyramids",
    ),
    ({"kind": Unused}, {"example": ROWS}, "in the order of their names; layers.1 was not called"),
]


@in_turn(("source", "options", "message"), REFUSED)
def test_modules_that_do_not_fit_are_refused_with_the_reason(models, source, options, message):
    if isinstance(source, dict):
        module, options = own(**source).to(ROWS.dtype), {**OWN, "example": OWN["example"].to(ROWS.dtype), **options}
    elif isinstance(source, tuple):
        module = timm.create_model(source[0], **source[1])
    else:
        module = copy.deepcopy(models[source][0])
        if source == "vit":  # after the call of the survey, since this attention is not installed
            module.register_forward_hook(lambda *_: setattr(module.config, "_attn_implementation", "flash_attention_2"))
    with pytest.raises(ValueError, match=message):
        attach(module, **options)
    assert not hasattr(module, "graticule")


def test_videos_and_taken_names_are_refused_and_one_of_several_tables_is_replaced():
    with pytest.raises(ValueError, match=r"`example` must be given for Conv3d, which does not say .* or videos"):
        attach(nn.Conv3d(3, DIM, 8))
    taken = own()
    taken.graticule = nn.Identity()
    with pytest.raises(ValueError, match="`module` must have no attribute 'graticule'"):
        attach(taken, **OWN)
    module = attach(own(kind=Twice), **OWN, remove="more")
    assert module.places.any() and not module.more.any()


def test_blocks_norm_and_table_are_found_by_default(models):
    for name, (stock, how) in models.items():
        model = attach(copy.deepcopy(stock), "learnable", "lape")
        named = attach(copy.deepcopy(stock), "learnable", "lape", **how)
        assert {key: model.graticule.created[key] for key in ("blocks", "norm", "remove")} == {
            key: named.graticule.created[key] for key in ("blocks", "norm", "remove")
        }, name


def test_a_mask_that_attention_already_has_is_kept():
    class Masked(nn.Module):
        """One block whose attention is called with a mask."""

        def __init__(self, mask):
            super().__init__()
            self.mask = mask
            self.blocks = nn.ModuleList([nn.Module()])
            self.blocks[0].norm1 = nn.LayerNorm(DIM)
            self.blocks[0].attn = nn.MultiheadAttention(DIM, 3, batch_first=True)
            self.blocks[0].forward = lambda x: self.attend(x)

        def attend(self, x):
            y = self.blocks[0].norm1(x)
            return self.blocks[0].attn(y, y, y, attn_mask=self.mask, need_weights=False)[0]

        def forward(self, x):
            return self.blocks[0](x)

    seen = torch.ones(4, 4, dtype=torch.bool).tril()
    added = torch.zeros(4, 4, dtype=torch.float64).masked_fill(~seen, float("-inf"))
    x = torch.randn(2, 4, DIM, dtype=torch.float64)
    found = []
    for mask in (~seen, added):
        torch.manual_seed(2)
        module = draw(Masked(mask)).double()
        attach(module, "relative_bias", patch_grid=(2, 2), example=x)
        draw(module.graticule)
        with torch.no_grad():
            found.append(module(x))
            first = module(x)[:, 0]
            changed = module(torch.cat([x[:, :1], torch.randn_like(x[:, 1:])], 1))[:, 0]
        assert_same(first, changed)  # the first token sees only itself
    assert_same(*found)


def test_a_block_that_returns_more_than_tokens_keeps_it():
    module = nn.Module()
    module.layers = nn.ModuleList([draw(OwnBlock()).double()])
    module.forward = lambda x: module.layers[0](x)
    x = torch.randn(2, 16, DIM, dtype=torch.float64)
    with torch.no_grad():
        attach(module, "peg", blocks="layers.*", norm="before", patch_grid=(4, 4), example=x)
        expected = module.graticule.position.pegs["0"](module.layers[0].forward(x)[0], graticule.Grid(4, 4))
        found, more = module(x)
    assert_same(found, expected)
    assert more == "more"
