"""Small models of transformers for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import transformers
import transformers.models.dinov3_vit.modeling_dinov3_vit as dinov3

from evidence.models_page import MERGED, SMALL, VIDEO, configured
from evidence.models_page import STAGES as WINDOWS
from evidence.vector_rotations import in_float64
from graticule.external.transformers_folder import class_of

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
    ("VideoMAEModel", {**VIDEO, "use_mean_pooling": False}, {}),
    ("VideoMAEForVideoClassification", {**VIDEO, "num_labels": 5}, {}),
    ("VivitModel", {**VIDEO, "tubelet_size": [2, 8, 8]}, {}),
    ("VivitForVideoClassification", {**VIDEO, "tubelet_size": [2, 8, 8], "num_labels": 5}, {}),
    ("VJEPA2Model", configured("VJEPA2Model"), {}),
    ("Qwen2VisionTransformerPretrainedModel", {**MERGED, "embed_dim": 32, "mlp_ratio": 2}, {}),
    ("Qwen3VLVisionModel", {**MERGED, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, {}),
]
#: Sizes of the inputs of classes that do not compute all of them. V-JEPA 2 takes more frames, but counts the patches
#: of other heights and widths as its own, and Vivit interpolates as for one frame.
VIDEO: list[tuple[int, ...]] = [(4, 32, 32)]
SIZES: dict[str, list[tuple[int, ...]]] = {"SamVisionModel": [(32, 32)], "VJEPA2Model": [*VIDEO, (8, 32, 32)]}
SIZES |= dict.fromkeys(("VideoMAEModel", "VideoMAEForVideoClassification", "VivitModel"), VIDEO)
SIZES["VivitForVideoClassification"] = VIDEO


def build(name: str, config: dict[str, Any], options: dict[str, Any] | None = None) -> Any:
    """Build a model of transformers with weights as drawn by its class, in evaluation mode."""
    kind = class_of(transformers, name)
    return kind(kind.config_class(**config), **(options or {})).eval()


@contextmanager
def whole_float64() -> Iterator[None]:
    """Build and compute models in float64, including tables that transformers stores or caches in float32."""
    uncached = dinov3.get_patches_center_coordinates.__wrapped__
    with (
        in_float64(),
        mock.patch.object(torch, "FloatTensor", torch.DoubleTensor),
        mock.patch.object(dinov3, "get_patches_center_coordinates", uncached),
    ):
        yield
