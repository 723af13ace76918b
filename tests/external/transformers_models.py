"""Small models of transformers for tests, and their outputs."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from evidence.models_page import SMALL
from evidence.models_page import STAGES as WINDOWS

SAM: dict[str, Any] = {**SMALL, "mlp_dim": 48, "output_channels": 8, "global_attn_indexes": [1]}
_PATCHES = {name: value for name, value in SMALL.items() if name != "image_size"}
#: A model for each part that no other one has: class, configuration, arguments of the class.
MODELS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("ViTModel", SMALL, {}),
    ("ViTModel", {**SMALL, "qkv_bias": False}, {"add_pooling_layer": False, "use_mask_token": True}),
    ("ViTForImageClassification", {**SMALL, "num_labels": 5, "hidden_act": "quick_gelu"}, {}),
    ("DeiTModel", SMALL, {}),
    ("DeiTForImageClassification", {**SMALL, "num_labels": 5}, {}),
    ("DeiTForImageClassificationWithTeacher", {**SMALL, "num_labels": 5}, {}),
    ("Dinov2Model", SMALL, {}),
    ("Dinov2Model", {**SMALL, "use_swiglu_ffn": True}, {}),
    ("Dinov2WithRegistersModel", SMALL, {}),
    ("DINOv3ViTModel", SMALL, {}),
    ("DINOv3ViTModel", {**SMALL, "use_gated_mlp": True, "num_register_tokens": 3, "hidden_act": "silu"}, {}),
    ("CLIPVisionModel", SMALL, {}),
    ("CLIPVisionModelWithProjection", {**SMALL, "projection_dim": 7}, {}),
    ("SiglipVisionModel", SMALL, {}),
    ("SiglipVisionModel", {**SMALL, "vision_use_head": False}, {}),
    ("Siglip2VisionModel", {**_PATCHES, "num_patches": 16}, {}),
    ("IJepaModel", SMALL, {}),
    ("IJepaForImageClassification", {**SMALL, "num_labels": 5}, {}),
    ("ViTMAEModel", {**SMALL, "mask_ratio": 0.0}, {}),
    ("BeitModel", {**SMALL, "use_relative_position_bias": True}, {}),
    ("BeitModel", {**SMALL, "use_shared_relative_position_bias": True, "use_mean_pooling": False}, {}),
    ("BeitForImageClassification", {**SMALL, "use_absolute_position_embeddings": True, "use_mask_token": True}, {}),
    ("ViTMSNModel", SMALL, {}),
    ("ViTMSNForImageClassification", {**SMALL, "num_labels": 5}, {}),
    ("Data2VecVisionModel", {**SMALL, "use_relative_position_bias": True}, {}),
    ("Data2VecVisionForImageClassification", {**SMALL, "use_shared_relative_position_bias": True}, {}),
    ("PixtralVisionModel", {**SMALL, "hidden_act": "silu", "image_size": 64}, {}),
    ("SwinModel", WINDOWS, {}),
    ("SwinForImageClassification", {**WINDOWS, "use_absolute_embeddings": True, "qkv_bias": False}, {}),
    ("Swinv2Model", WINDOWS, {}),
    ("Swinv2ForImageClassification", {**WINDOWS, "pretrained_window_sizes": [3, 3], "drop_path_rate": 0.0}, {}),
    ("SamVisionModel", {**SAM, "window_size": 2}, {}),
    ("SamVisionModel", {**SAM, "window_size": 3, "use_abs_pos": False}, {}),
]
#: Classes that resample without being asked.
_ALWAYS = ("Dinov2", "DINOv3", "Beit", "Sam", "Swinv2", "Siglip2", "Pixtral", "Data2Vec")


def build(name: str, config: dict[str, Any], given: dict[str, Any] | None = None) -> Any:
    """Build a model of transformers with weights as drawn by its class, in evaluation mode."""
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config), **(given or {})).eval()


def outputs(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the output of a model and its tokens for images (B, C, height, width), whatever its class needs."""
    name, config = type(model).__name__, model.config
    given: dict[str, Any] = {"pixel_values": x}
    if not name.startswith(_ALWAYS):
        given["interpolate_pos_encoding"] = True
    if name == "ViTMAEModel":  # keeps the order of the patches
        given["noise"] = torch.arange(x[0, 0].numel() // config.patch_size**2, dtype=x.dtype).expand(len(x), -1)
    if name.startswith("Siglip2"):
        patch = config.patch_size
        rows, columns = x.shape[-2] // patch, x.shape[-1] // patch
        patches = x.unflatten(3, (columns, patch)).unflatten(2, (rows, patch)).permute(0, 2, 4, 3, 5, 1)
        given["pixel_values"] = patches.reshape(len(x), rows * columns, -1)
        given["pixel_attention_mask"] = torch.ones(len(x), rows * columns, dtype=torch.long)
        given["spatial_shapes"] = torch.tensor([[rows, columns]] * len(x))
    if name.startswith("Pixtral"):  # all images in one row
        given["image_sizes"] = [tuple(x.shape[-2:])] * len(x)
    found = model(**given)
    if name.startswith("Pixtral"):
        return found.last_hidden_state.unflatten(1, (len(x), -1))[0], None
    if name.startswith("Sam"):
        return found.last_hidden_state.flatten(2).mT, None
    names = [one for one in ("logits", "image_embeds", "pooler_output", "last_hidden_state") if one in found]
    return found[names[0]], found.get("last_hidden_state")
