"""Reading of models of transformers: they must be what their configuration builds, and their tensors get timm's names.

transformers is not imported: a model of it brings its classes.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from graticule.external.convert.into_transformers import rebuild
from graticule.external.convert.parts import refuse

#: Attributes of modules that are not compared: of training, and the windows that Swin changes when it is called.
_FREE = frozenset({"training", "gradient_checkpointing", "name_or_path", "window_size", "shift_size"})

#: Patterns of names of tensors -> the part in timm's layout, applied one after the other. Several versions of
#: transformers are among them.
_NAMES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (
            r"^(?:vit|deit|dinov2_with_registers|dinov2|dinov3_vit|ijepa|beit|data2vec_vision|swinv2|swin|vision_model|vision_encoder)\.(?!model\.)",
            "",
        ),
        (r"^embeddings\.norm\.", "patch_embed.norm."),
        (r"^embeddings\.", ""),
        (r"^neck\.conv([12])\.", lambda found: f"neck.{2 * int(found[1]) - 2}."),
        (r"^neck\.layer_norm([12])\.", lambda found: f"neck.{2 * int(found[1]) - 1}."),
        (r"^head\.probe$", "attn_pool.latent"),
        (r"^head\.attention\.out_proj\.", "attn_pool.proj."),
        (r"^head\.layernorm\.", "attn_pool.norm."),
        (r"^head\.mlp\.", "attn_pool.mlp."),
        (r"^patch_embed(?:ding|dings)?(?:\.projection)?\.(?!norm\.)|^patch_conv\.", "patch_embed.proj."),
        (r"^class_embedding$", "cls_token"),
        (r"^position_embeddings?(?:\.weight)?$", "pos_embed"),
        (r"^(?:register_tokens|distillation_token)$", "reg_token"),
        (r"^(?:encoder\.|model\.|transformer\.)?layers?\.(\d+)\.", r"blocks.\1."),
        (r"^blocks\.(\d+)\.(?=blocks\.)", r"layers.\1."),
        (r"^blocks\.(\d+)\.(?=downsample\.)", lambda found: f"layers.{int(found[1]) + 1}."),
        (r"\.(?:layernorm_before|layer_norm1|attention_norm)\.", ".norm1."),
        (r"\.(?:layernorm_after|layer_norm2|ffn_norm)\.", ".norm2."),
        (r"\.feed_forward\.", ".mlp."),
        (r"\.(?:attention|self_attn)\.(?:attention\.|self\.)?([qkv])(?:uery|ey|alue|_proj)\.", r".attn.qkv.\1_proj."),
        (r"\.(?:attention|self_attn)\.(?:output\.dense|o_proj|out_proj)\.", ".attn.proj."),
        (r"^(?:shared_position_bias|encoder\.relative_position_bias)\.", "rel_pos_bias."),
        (r"\.(?:attention\.)*relative_position_bias\.(?=relative_position_bias_table$)", ".attn."),
        (r"\.attention\.self\.continuous_position_bias_mlp\.", ".attn.cpb_mlp."),
        (r"\.attention\.self\.logit_scale$", ".attn.logit_scale"),
        (r"\.mlp\.gate_proj\.", ".mlp.fc1_g."),
        (r"\.(?:intermediate\.dense|mlp\.up_proj|mlp\.weights_in|mlp\.lin1)\.", ".mlp.fc1."),
        (r"\.(?:(?<=\d\.)output\.dense|mlp\.down_proj|mlp\.weights_out|mlp\.lin2)\.", ".mlp.fc2."),
        (r"\.layer_scale([12])\.lambda1$|\.lambda_([12])$", r".ls\1\2.gamma"),
        (r"^(?:pre_layrnorm|ln_pre)\.", "norm_pre."),
        (r"^(?:layernorm|post_layernorm)\.", "norm."),
        (r"^pooler\.layernorm\.", "fc_norm."),
        (r"^(?:pooler\.dense|classifier|cls_classifier|visual_projection)\.", "head."),
        (r"^distillation_classifier\.", "head_dist."),
    )
)


def timm_name(name: str) -> str | tuple[str, ...]:
    """Return the name that a tensor of transformers has in timm's layout; none for a mask token."""
    for pattern, new in _NAMES:
        name = pattern.sub(new, name)
    if name == "mask_token":
        return ()
    if pooled := re.fullmatch(r"head\.attention\.in_proj_(weight|bias)", name):
        return f"attn_pool.q.{pooled[1]}", f"attn_pool.kv.{pooled[1]}"
    return name


def check_as_built(model: Any) -> None:
    """Check that a model of transformers is what its class builds from its configuration, with plain weights.

    Raises:
        ValueError: naming the part that differs: a changed forward, a quantized, tied or missing weight.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise refuse(model, "config.quantization_config", model.config.quantization_config, "must be left out")
    with torch.device("meta"):
        built = rebuild(model, model.config)
    parts, expected = dict(model.named_modules()), dict(built.named_modules())
    for name in {**expected, **parts}:
        own, other = parts.get(name), expected.get(name)
        if type(own) is not type(other):
            raise refuse(model, name, own, f"must be {type(other).__name__}, as in its config,")
        if "forward" in vars(own):
            raise refuse(model, f"{name}.forward".lstrip("."), vars(own)["forward"], "must be that of its class")
        settings = _settings(own)
        for key, value in _settings(other).items():
            if settings.get(key) != value:
                place = f"{name}.{key}".lstrip(".")
                raise refuse(model, place, settings.get(key), f"must be {value!r}, as in its config,")
    _check_tensors(model, built)


def _settings(module: nn.Module | None) -> dict[str, Any]:
    """Return the numbers, names and flags of a module."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | tuple) and not name.startswith("_") and name not in _FREE
    }


def _check_tensors(model: nn.Module, built: nn.Module) -> None:
    """Check that the tensors are those of the model that the configuration builds."""
    state, expected = model.state_dict(), built.state_dict()
    for name in [*expected, *state]:
        if name not in state or name not in expected:
            got = "without it" if name in expected else "with it"
            raise refuse(model, name, got, f"must {'' if name in expected else 'not '}exist, by its config,")
        value = state[name]
        if value.shape != expected[name].shape:
            raise refuse(model, name, tuple(value.shape), f"must be {tuple(expected[name].shape)}, as in its config,")
        if type(value) not in (Tensor, nn.Parameter) or not value.is_floating_point() or value.is_meta:
            what = "no values" if value.is_meta else f"{type(value).__name__} of {value.dtype}"
            raise refuse(model, name, what, "must have floating-point values, neither quantized nor missing,")
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = owners.setdefault(id(parameter), name)
        if first != name:
            raise refuse(model, name, f"that of {first}", "must be a parameter of its own, not a tied one,")
