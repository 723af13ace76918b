"""Recorded cases of mmdetection, mmsegmentation, ViT-Adapter and Segmenter, with all their intermediates."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torchvision.ops import box_iou

import graticule
from graticule.backbones import PyramidVisionTransformer, VisionTransformer
from graticule.checkpoints.released_dense import renamed
from graticule.dense import (
    Adapter,
    DeformableAttention,
    FeaturePyramid,
    Features,
    LinearDecoder,
    MaskTransformer,
    RetinaNet,
    SegmentationModel,
    SemanticFpn,
    UperHead,
    load_published,
)
from graticule.dense.deformable import cell_centers
from graticule.dense.features import Stages
from graticule.factory import build_position

GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
BILINEAR = "learnable(resampler='bilinear(antialias=False)')"


@pytest.fixture(autouse=True)
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def read(case):
    """Return the tensors of a case, its weights under their published names, and its keyword arguments."""
    tensors = {
        name: value.double() if value.is_floating_point() else value
        for name, value in load_file(GOLDEN / f"{case}.safetensors").items()
    }
    weights = {name.removeprefix("weight."): tensors.pop(name) for name in list(tensors) if name.startswith("weight.")}
    return tensors, weights, json.loads((GOLDEN / f"{case}.json").read_text())["kwargs"]


def inputs(tensors):
    return [tensors[name] for name in sorted(tensors) if name.startswith("input_")]


def assert_recorded(tensors, **found):
    """Check that every recorded tensor except the inputs equals that in `found`, to 1e-9."""
    assert {name for name in tensors if not name.startswith("input")} <= found.keys()
    for name, value in found.items():
        torch.testing.assert_close(value.to(tensors[name].dtype), tensors[name], rtol=0, atol=1e-9, msg=name)


class Given(Features):
    """Backbone with given feature maps, for a case that records only a neck or a head."""

    def __init__(self, channels, strides, necks=()):
        nn.Module.__init__(self)
        self.channels, self.strides, self.extra, self.divisor = channels, strides, 0, 32
        self.necks, self.backbone = nn.ModuleList(necks), nn.Module()
        self.backbone.in_chans = 3


def with_prefix(prefix, weights):
    return {f"{prefix}.{name}": value for name, value in weights.items()}


def test_deformable_attention_is_that_of_deformable_detr():
    tensors, weights, kwargs = read("ms_deform_attn")
    attention = DeformableAttention(kwargs["d_model"], kwargs["n_levels"], kwargs["n_heads"], kwargs["n_points"])
    attention.load_state_dict(weights)
    shapes = [tuple(shape) for shape in tensors["spatial_shapes"].tolist()]
    starts = torch.tensor([0, *(height * width for height, width in shapes)]).cumsum(0)[:-1]
    query, reference = tensors["input"], tensors["input_reference_points"]
    locations, shares = attention.points_of(query, reference, shapes)
    assert_recorded(
        tensors,
        spatial_shapes=torch.tensor(shapes),
        level_start_index=starts,
        sampling_locations=locations,
        attention_weights=shares,
        output=attention(query, reference, tensors["input_value"], shapes),
    )


def test_the_adapter_is_that_of_vit_adapter():
    tensors, weights, kwargs = read("vit_adapter_segmentation")
    size = {name: kwargs[name] for name in ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio")}
    position = partial(build_position, encoding="learnable(resampler='bicubic(antialias=False)')")
    vit = VisionTransformer(position, num_classes=0, class_token=False, global_pool="avg", **size)
    adapter = Adapter(
        vit,
        width=kwargs["conv_inplane"],
        points=kwargs["n_points"],
        heads=kwargs["deform_num_heads"],
        mlp_ratio=kwargs["cffn_ratio"],
    )
    model = SegmentationModel(Features(vit, adapter), LinearDecoder((16,), (4,), 2), 2).eval()
    classifier = with_prefix("decoder", model.decoder.state_dict())
    load_published(model, {**with_prefix("backbone", weights), **classifier})
    image = tensors["input"]
    _, *maps = adapter.spm(image)
    shapes = [tuple(one.shape[-2:]) for one in maps]
    flat = [one.flatten(2).mT for one in maps]
    first, spatial = (
        adapter.interactions[0],
        torch.cat([x + e for x, e in zip(flat, adapter.level_embed, strict=True)], 1),
    )
    at, at_spatial = cell_centers([(4, 4)], image), cell_centers(shapes, image)
    x = vit.position(vit.grid)[0].enter(vit.embed(image))
    x = vit.blocks[0](first.injector(x, at, spatial, shapes))
    outputs = model.features(image)
    assert_recorded(
        tensors,
        spm_c2=flat[0],
        spm_c4=flat[2],
        interaction_0_x=x,
        interaction_0_c=first.extract(spatial, at_spatial, x, (4, 4), shapes),
        reference_points_injector=at,
        reference_points_extractor=at_spatial,
        **{f"output_{level + 1}": outputs[str(level)] for level in range(4)},
    )


def test_segmenter_with_a_linear_decoder_is_segmenters():
    tensors, weights, kwargs = read("segmenter_linear")
    encoder = kwargs["encoder"]
    vit = VisionTransformer(
        partial(build_position, encoding=BILINEAR),
        img_size=tuple(encoder["image_size"]),
        patch_size=encoder["patch_size"],
        embed_dim=encoder["d_model"],
        depth=encoder["n_layers"],
        num_heads=encoder["n_heads"],
        mlp_ratio=encoder["d_ff"] / encoder["d_model"],
        num_classes=0,
        norm_layer=partial(nn.LayerNorm, eps=1e-5),
    )
    model = graticule.create_segmenter(vit, encoder["n_cls"], "segmenter_linear").eval()
    load_published(model, weights)
    image = tensors["input"]
    padded = torch.nn.functional.pad(image, (0, 2, 0, 3))
    assert_recorded(tensors, masks=model.decoder(list(model.features(padded).values())), output=model(image))


def test_the_mask_transformer_is_segmenters():
    tensors, weights, kwargs = read("segmenter_mask_decoder")
    decoder = MaskTransformer(
        (kwargs["d_encoder"],),
        (kwargs["patch_size"],),
        kwargs["n_cls"],
        depth=kwargs["n_layers"],
        dim=kwargs["d_model"],
        num_heads=kwargs["n_heads"],
        mlp_ratio=kwargs["d_ff"] / kwargs["d_model"],
    ).eval()
    decoder.load_state_dict(weights)
    side, x = [pixels // kwargs["patch_size"] for pixels in kwargs["im_size"]], tensors["input"]
    tokens = torch.cat([decoder.proj_dec(x), decoder.cls_emb.expand(len(x), -1, -1)], 1)
    first = decoder.blocks[0]
    assert_recorded(
        tensors,
        output=decoder([x.mT.unflatten(-1, side)]),
        attention_layer_0=first.attn.weights(first.norm1(tokens)),
    )


def test_uperhead_is_that_of_mmsegmentation():
    tensors, weights, kwargs = read("uperhead")
    head = UperHead(kwargs["in_channels"], (4, 8, 16, 32), kwargs["num_classes"], channels=kwargs["channels"]).eval()
    head.load_state_dict(weights)
    maps = inputs(tensors)
    pools = {f"pool_{side}": module(maps[-1]) for side, module in zip((1, 2, 3, 6), head.psp_modules, strict=True)}
    assert_recorded(tensors, output=head(maps), psp=head.pool(maps[-1]), **pools)


def test_the_head_of_semantic_fpn_is_that_of_mmsegmentation():
    tensors, weights, kwargs = read("fpnhead")
    head = SemanticFpn(kwargs["in_channels"], (4, 8, 16, 32), kwargs["num_classes"], channels=kwargs["channels"]).eval()
    head.load_state_dict(weights)
    maps = inputs(tensors)
    assert_recorded(tensors, output=head(maps), scale_3=head.scale_heads[3](maps[-1]))


@pytest.mark.parametrize(
    ("case", "options"), [("fpn_semantic", {}), ("fpn_retinanet", {"first": 1, "extra": "convolutions"})]
)
def test_the_feature_pyramid_is_that_of_mmdetection(case, options):
    tensors, weights, kwargs = read(case)
    neck = FeaturePyramid(kwargs["in_channels"], (4, 8, 16, 32), kwargs["out_channels"], **options)
    detector = RetinaNet(Given(neck.channels, neck.strides, [neck]), 1)
    own = {name: value for name, value in detector.state_dict().items() if "necks" not in name}
    state = renamed(with_prefix("neck", weights), "model.backbone.", detector.state_dict())
    detector.load_state_dict({**own, **state})
    found = neck(inputs(tensors))
    assert_recorded(tensors, **{f"output_{level}": one for level, one in enumerate(found, 1)})


def test_retinanet_is_that_of_mmdetection():
    tensors, weights, kwargs = read("retina_head")
    strides = tuple(kwargs["anchor_generator"]["strides"])
    detector = RetinaNet(Given((8,) * 5, strides), kwargs["num_classes"], convs=kwargs["stacked_convs"])
    detector.load_state_dict(renamed(with_prefix("bbox_head", weights), "", detector.state_dict()))
    maps, model, classes = inputs(tensors), detector.model, kwargs["num_classes"]
    counts = [9 * one.shape[-2] * one.shape[-1] for one in maps]
    images = type("Images", (), {"image_sizes": [tuple(kwargs["image"])]})
    (anchors,) = model.anchor_generator(images, maps)
    found = model.head(maps)
    boxes = model.box_coder.decode_single(found["bbox_regression"][0], anchors)
    boxes[:, 0::2], boxes[:, 1::2] = boxes[:, 0::2].clamp(0, 64), boxes[:, 1::2].clamp(0, 64)
    truth = {"boxes": tensors["gt_boxes_1"], "labels": tensors["gt_labels_1"]}
    matched = model.proposal_matcher(box_iou(truth["boxes"], anchors))
    labels = torch.where(matched >= 0, truth["labels"][matched.clamp(0)], classes)
    targets = model.box_coder.encode_single(truth["boxes"][matched.clamp(0)], anchors)
    targets = torch.where(matched[:, None] >= 0, targets, 0)
    losses = model.head.compute_loss([truth], found, [anchors], [matched])
    by_level = {
        "anchors": anchors.split(counts),
        "decoded": boxes[None].split(counts, 1),
        "labels": labels[None].split(counts, 1),
        "bbox_targets": targets[None].split(counts, 1),
    }
    for name, key, width in (("cls_score", "cls_logits", classes), ("bbox_pred", "bbox_regression", 4)):
        by_level[name] = [
            part.unflatten(1, (*one.shape[-2:], 9)).permute(0, 3, 4, 1, 2).flatten(1, 2)
            for part, one in zip(found[key].split(counts, 1), maps, strict=True)
        ]
        assert by_level[name][0].shape[1] == 9 * width
    flat = {f"{name}_{level}": one for name, levels in by_level.items() for level, one in enumerate(levels, 1)}
    sums = {
        name: tensors.pop(f"loss_{short}").sum()
        for name, short in (("classification", "cls"), ("bbox_regression", "bbox"))
    }
    assert_recorded(tensors, gt_boxes_1=truth["boxes"], gt_labels_1=truth["labels"], **flat)
    positive = int((matched >= 0).sum())
    added = 1 + torch.finfo(torch.float32).eps / positive  # mmdetection divides by their number and this epsilon
    for name, total in sums.items():
        torch.testing.assert_close(losses[name], total * added, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", ["pvt_retinanet", "cpvt_retinanet"])
def test_pvt_and_its_feature_pyramid_are_those_of_the_published_detectors(case):
    tensors, weights, kwargs = read(case)
    sizes = dict(kwargs["backbone"])
    sizes.pop("num_classes", None)
    eps = sizes.pop("norm_eps")
    position = partial(build_position, encoding="peg" if case.startswith("c") else BILINEAR)
    pvt = PyramidVisionTransformer(
        position, num_classes=0, global_pool="avg", norm_layer=partial(nn.LayerNorm, eps=eps), **sizes
    )
    neck = f"fpn(channels={kwargs['neck']['out_channels']})"
    model = graticule.create_detector(pvt, 2, "retinanet(convs=0)", neck).eval()
    head = {name: value for name, value in model.state_dict().items() if name.startswith("model.head.")}
    load_published(model, {**weights, **head})
    image = tensors["input"]
    features = Stages(pvt)(pvt, image)
    assert_recorded(
        tensors,
        **{f"feature_{level}": one for level, one in enumerate(features, 1)},
        **{f"output_{level}": one for level, one in enumerate(model.features(image).values(), 1)},
    )


def test_a_checkpoint_that_does_not_fit_is_refused_and_the_model_is_as_it_was():
    model = graticule.create_segmenter(
        "deit_tiny_patch16_224", 3, "segmenter_linear", depth=1, img_size=32, embed_dim=24, num_heads=2
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    published = {name.replace("features.backbone", "encoder"): value for name, value in before.items()}
    published = {name.replace("position.encodings.0.", ""): value + 1 for name, value in published.items()}
    wrong = {**published, "decoder.head.weight": torch.zeros(4, 24)}
    with pytest.raises(ValueError, match="does not fit SegmentationModel"):
        load_published(model, wrong)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    load_published(model, published)
    assert all(torch.equal(value, before[name] + 1) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="must be of create_detector or create_segmenter"):
        load_published(model.backbone, published)


@pytest.mark.parametrize("scale", [None, 1.0])
def test_a_layer_scale_is_loaded_or_multiplied_into_the_layer_before_it(scale):
    def build(init_values):
        return graticule.create_segmenter(
            "deit_tiny_patch16_224", 2, "segmenter_linear", depth=2, img_size=32, embed_dim=8, num_heads=1,
            init_values=init_values,
        ).eval()  # fmt: skip

    scaled = build(1.0)
    for parameter in scaled.parameters():
        torch.nn.init.normal_(parameter)
    published = {
        name.replace("features.backbone", "encoder").replace("position.encodings.0.", ""): value
        for name, value in scaled.state_dict().items()
    }
    published = {name.replace("ls1.gamma", "gamma1").replace("ls2.gamma", "gamma2"): v for name, v in published.items()}
    assert "encoder.blocks.1.gamma2" in published
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(load_published(build(scale), published)(image), scaled(image), rtol=1e-9, atol=1e-9)
