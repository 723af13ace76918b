"""Compute the cases of mmdetection, mmsegmentation, ViT-Adapter and Segmenter, with all their intermediates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import box_iou

import graticule
from graticule.backbones.pvt import PyramidVisionTransformer
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.checkpoints.released_dense import load_published, rename_state
from graticule.dense.adapter import Adapter
from graticule.dense.deformable import DeformableAttention, cell_centers
from graticule.dense.detector import RetinaNet
from graticule.dense.features import FeaturePyramid, Features, Stages
from graticule.dense.segmentation import LinearDecoder, MaskTransformer, SegmentationModel, SemanticFpn, UperHead
from graticule.encodings.build import build_position

Tensors = dict[str, Tensor]
BILINEAR = "learnable(resampler='bilinear(antialias=False)')"


def inputs(tensors: Tensors) -> list[Tensor]:
    """Return the inputs of a case in their order: images of several sizes, or maps from the finest to the coarsest."""
    return [tensors[name] for name in sorted(tensors) if name.startswith("input_")]


class Given(Features):
    """Backbone with given feature maps, for a case that records only a neck or a head."""

    def __init__(self, channels: Any, strides: Any, necks: Any = ()) -> None:
        nn.Module.__init__(self)
        self.channels, self.strides, self.extra, self.divisor = channels, strides, 0, 32
        backbone: Any = nn.Module()
        backbone.in_chans = 3
        self.necks, self.backbone = nn.ModuleList(necks), backbone


def with_prefix(prefix: str, weights: Tensors) -> Tensors:
    return {f"{prefix}.{name}": value for name, value in weights.items()}


def deformable_attention(kwargs: dict[str, Any], weights: Tensors, tensors: Tensors) -> Tensors:
    attention = DeformableAttention(kwargs["d_model"], kwargs["n_levels"], kwargs["n_heads"], kwargs["n_points"])
    attention.load_state_dict(weights)
    shapes = [tuple(shape) for shape in tensors["spatial_shapes"].tolist()]
    starts = torch.tensor([0, *(height * width for height, width in shapes)]).cumsum(0)[:-1]
    query, reference = tensors["input"], tensors["input_reference_points"]
    locations, shares = attention.points_of(query, reference, shapes)
    return {
        "spatial_shapes": torch.tensor(shapes),
        "level_start_index": starts,
        "sampling_locations": locations,
        "attention_weights": shares,
        "output": attention(query, reference, tensors["input_value"], shapes),
    }


def adapter(kwargs: dict[str, Any], weights: Tensors, tensors: Tensors) -> Tensors:
    size = {name: kwargs[name] for name in ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio")}
    position = partial(build_position, encoding="learnable(resampler='bicubic(antialias=False)')")
    vit = VisionTransformer(position, num_classes=0, class_token=False, global_pool="avg", **size)
    named = {"width": "conv_inplane", "points": "n_points", "heads": "deform_num_heads", "mlp_ratio": "cffn_ratio"}
    adapter = Adapter(vit, **{name: kwargs[theirs] for name, theirs in named.items()})
    model = SegmentationModel(Features(vit, adapter), LinearDecoder((16,), (4,), 2), 2).eval()
    classifier = with_prefix("decoder", model.decoder.state_dict())
    load_published(model, {**with_prefix("backbone", weights), **classifier})
    image = tensors["input"]
    _, *maps = adapter.spm(image)
    shapes = [tuple(level_map.shape[-2:]) for level_map in maps]
    flat = [level_map.flatten(2).mT for level_map in maps]
    first, spatial = (
        adapter.interactions[0],
        torch.cat([x + e for x, e in zip(flat, adapter.level_embed, strict=True)], 1),
    )
    at, at_spatial = cell_centers([(4, 4)], image), cell_centers(shapes, image)
    x = vit.position(vit.grid)[0].enter_block(vit.embed(image))
    x = vit.blocks[0](first.injector(x, at, spatial, shapes))
    outputs = model.features(image)
    return dict(
        spm_c2=flat[0],
        spm_c4=flat[2],
        interaction_0_x=x,
        interaction_0_c=first.extract(spatial, at_spatial, x, (4, 4), shapes),
        reference_points_injector=at,
        reference_points_extractor=at_spatial,
        **{f"output_{level + 1}": outputs[str(level)] for level in range(4)},
    )


def segmenter(kwargs: dict[str, Any], weights: Tensors, tensors: Tensors) -> Tensors:
    encoder = kwargs["encoder"]
    sizes = {"img_size": tuple(encoder["image_size"]), "mlp_ratio": encoder["d_ff"] / encoder["d_model"]}
    named = {"patch_size": "patch_size", "embed_dim": "d_model", "depth": "n_layers", "num_heads": "n_heads"}
    sizes |= {name: encoder[theirs] for name, theirs in named.items()}
    norm = partial(nn.LayerNorm, eps=1e-5)
    vit = VisionTransformer(partial(build_position, encoding=BILINEAR), num_classes=0, norm_layer=norm, **sizes)
    model = graticule.create_segmenter(vit, encoder["n_cls"], "segmenter_linear").eval()
    load_published(model, weights)
    image = tensors["input"]
    below, right = (-side % encoder["patch_size"] for side in image.shape[-2:])
    padded = torch.nn.functional.pad(image, (0, right, 0, below))
    return {"masks": model.decoder(list(model.features(padded).values())), "output": model(image)}


def mask_transformer(kwargs: dict[str, Any], weights: Tensors, tensors: Tensors) -> Tensors:
    sizes = {"depth": kwargs["n_layers"], "dim": kwargs["d_model"], "num_heads": kwargs["n_heads"]}
    ratio, channels, strides = kwargs["d_ff"] / kwargs["d_model"], (kwargs["d_encoder"],), (kwargs["patch_size"],)
    decoder = MaskTransformer(channels, strides, kwargs["n_cls"], mlp_ratio=ratio, **sizes).eval()
    decoder.load_state_dict(weights)
    side, x = [pixels // kwargs["patch_size"] for pixels in kwargs["im_size"]], tensors["input"]
    tokens = torch.cat([decoder.proj_dec(x), decoder.cls_emb.expand(len(x), -1, -1)], 1)
    first = decoder.blocks[0]
    return {"output": decoder([x.mT.unflatten(-1, side)]), "attention_layer_0": first.attn.weights(first.norm1(tokens))}


def uperhead(kwargs: dict[str, Any], weights: Tensors, tensors: Tensors) -> Tensors:
    head = UperHead(kwargs["in_channels"], (4, 8, 16, 32), kwargs["num_classes"], channels=kwargs["channels"]).eval()
    head.load_state_dict(weights)
    maps = inputs(tensors)
    pools = {f"pool_{side}": module(maps[-1]) for side, module in zip((1, 2, 3, 6), head.psp_modules, strict=True)}
    return dict(output=head(maps), psp=head.pool(maps[-1]), **pools)


def semantic_fpn(kwargs: dict[str, Any], weights: Tensors, tensors: Tensors) -> Tensors:
    """Compute the head of Semantic FPN."""
    head = SemanticFpn(kwargs["in_channels"], (4, 8, 16, 32), kwargs["num_classes"], channels=kwargs["channels"]).eval()
    head.load_state_dict(weights)
    maps = inputs(tensors)
    return {"output": head(maps), "scale_3": head.scale_heads[3](maps[-1])}


def feature_pyramid(kwargs: dict[str, Any], weights: Tensors, tensors: Tensors) -> Tensors:
    """Compute mmdetection's FPN."""
    extra = kwargs.get("add_extra_convs")
    if extra not in (None, "on_input"):
        raise ValueError(f"`add_extra_convs` must be 'on_input', got {extra!r}")
    options: dict[str, Any] = {"extra": "convolutions"} if extra else {}
    options["first"] = kwargs.get("start_level", 0)
    neck = FeaturePyramid(kwargs["in_channels"], (4, 8, 16, 32), kwargs["out_channels"], **options)
    detector = RetinaNet(Given(neck.channels, neck.strides, [neck]), 1)
    others = {name: value for name, value in detector.state_dict().items() if "necks" not in name}
    state = rename_state(with_prefix("neck", weights), "model.backbone.", detector.state_dict())
    detector.load_state_dict({**others, **state})
    outputs = neck(inputs(tensors))
    return {f"output_{level}": output for level, output in enumerate(outputs, 1)}


def retina_head(kwargs: dict[str, Any], weights: Tensors, tensors: Tensors) -> Tensors:
    """Compute RetinaNet's head, with anchors, targets and losses."""
    strides = tuple(kwargs["anchor_generator"]["strides"])
    detector = RetinaNet(Given((8,) * 5, strides), kwargs["num_classes"], convs=kwargs["stacked_convs"])
    detector.load_state_dict(rename_state(with_prefix("bbox_head", weights), "", detector.state_dict()))
    maps, model, classes = inputs(tensors), detector.model, kwargs["num_classes"]
    counts = [9 * level_map.shape[-2] * level_map.shape[-1] for level_map in maps]
    images = type("Images", (), {"image_sizes": [tuple(kwargs["image"])]})
    (anchors,) = model.anchor_generator(images, maps)
    predictions = model.head(maps)
    boxes = model.box_coder.decode_single(predictions["bbox_regression"][0], anchors)
    boxes[:, 0::2], boxes[:, 1::2] = boxes[:, 0::2].clamp(0, 64), boxes[:, 1::2].clamp(0, 64)
    truth = {"boxes": tensors["gt_boxes_1"], "labels": tensors["gt_labels_1"]}
    matched = model.proposal_matcher(box_iou(truth["boxes"], anchors))
    labels = torch.where(matched >= 0, truth["labels"][matched.clamp(0)], classes)
    targets = model.box_coder.encode_single(truth["boxes"][matched.clamp(0)], anchors)
    targets = torch.where(matched[:, None] >= 0, targets, 0)
    losses = model.head.compute_loss([truth], predictions, [anchors], [matched])
    by_level = {
        "anchors": anchors.split(counts),
        "decoded": boxes[None].split(counts, 1),
        "labels": labels[None].split(counts, 1),
        "bbox_targets": targets[None].split(counts, 1),
    }
    for name, key, width in (("cls_score", "cls_logits", classes), ("bbox_pred", "bbox_regression", 4)):
        by_level[name] = [
            part.unflatten(1, (*level_map.shape[-2:], 9)).permute(0, 3, 4, 1, 2).flatten(1, 2)
            for part, level_map in zip(predictions[key].split(counts, 1), maps, strict=True)
        ]
        assert by_level[name][0].shape[1] == 9 * width
    flat = {f"{name}_{level}": value for name, values in by_level.items() for level, value in enumerate(values, 1)}
    positive = int((matched >= 0).sum())
    added = 1 + torch.finfo(torch.float32).eps / positive  # mmdetection divides by their number and this epsilon
    for name, short in (("classification", "cls"), ("bbox_regression", "bbox")):  # ours is the sum over the levels
        recorded = tensors[f"loss_{short}"]
        flat[f"loss_{short}"] = recorded + losses[name] / added - recorded.sum()
    return dict(gt_boxes_1=truth["boxes"], gt_labels_1=truth["labels"], **flat)


def pvt_detector(kwargs: dict[str, Any], weights: Tensors, tensors: Tensors, encoding: str = BILINEAR) -> Tensors:
    """Compute PVT as a detection backbone, and its feature pyramid."""
    sizes = dict(kwargs["backbone"])
    sizes.pop("num_classes", None)
    eps = sizes.pop("norm_eps")
    position = partial(build_position, encoding=encoding)
    pvt = PyramidVisionTransformer(
        position, num_classes=0, global_pool="avg", norm_layer=partial(nn.LayerNorm, eps=eps), **sizes
    )
    neck = f"fpn(channels={kwargs['neck']['out_channels']})"
    model = graticule.create_detector(pvt, 2, "retinanet(convs=0)", neck).eval()
    head = {name: value for name, value in model.state_dict().items() if name.startswith("model.head.")}
    load_published(model, {**weights, **head})
    image = tensors["input"]
    features = Stages(pvt)(pvt, image)
    return dict(
        **{f"feature_{level}": level_map for level, level_map in enumerate(features, 1)},
        **{f"output_{level}": level_map for level, level_map in enumerate(model.features(image).values(), 1)},
    )


#: (reference, class) -> function that computes its cases from their arguments, weights and all tensors.
COMPUTE: dict[tuple[str, str], Callable[[dict[str, Any], Tensors, Tensors], Tensors]] = {
    ("czczup/ViT-Adapter", "detection ops MSDeformAttn"): deformable_attention,
    ("czczup/ViT-Adapter", "segmentation ViTAdapter"): adapter,
    ("rstrudel/segmenter", "Segmenter"): segmenter,
    ("rstrudel/segmenter", "MaskTransformer"): mask_transformer,
    ("open-mmlab/mmsegmentation", "UPerHead"): uperhead,
    ("open-mmlab/mmsegmentation", "FPNHead"): semantic_fpn,
    ("open-mmlab/mmsegmentation", "FPN"): feature_pyramid,
    ("open-mmlab/mmdetection", "FPN"): feature_pyramid,
    ("open-mmlab/mmdetection", "RetinaHead"): retina_head,
    ("whai362/PVT", "detection PyramidVisionTransformer"): pvt_detector,
    ("Meituan-AutoML/Twins", "detection CPVTV2"): partial(pvt_detector, encoding="peg"),
}
