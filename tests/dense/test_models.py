"""Detectors and segmentation models: their inputs and outputs, and the laws of their parts."""

import math
import re
from functools import partial

import pytest
import torch
from timm.optim import param_groups_layer_decay
from torchvision.ops import batched_nms, clip_boxes_to_image
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

import graticule
from graticule.dense.deformable import DeformableAttention, WindowedAttention
from graticule.dense.detector import HEADS, Anchors
from graticule.dense.features import FeaturePyramid
from graticule.dense.segmentation import DECODERS, Decoder, register_decoder, segment_in_windows
from graticule.layers.attention import Attention
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from in_turn import in_turn

VIT = {"backbone": "deit_tiny_patch16_224", "img_size": 64, "embed_dim": 24, "depth": 4, "num_heads": 2}
PVT = {
    "backbone": "pvt_tiny",
    "img_size": 64,
    "embed_dims": (8, 8, 16, 16),
    "depths": (1, 1, 1, 1),
    "num_heads": (1, 1, 2, 2),
}
ADAPTER = "adapter(width=4, points=2, heads=2)"
WINDOWED = "adapter(groups=2, width=4, points=2, heads=2, window=3, added='last')"
POSITIONS = [
    ("learnable", "default"),
    ("learnable", "lape"),
    ("sinusoidal_2d", "shared"),
    ("peg", "default"),
    ("rope", "default"),
    ("relative_bias", "default"),
    ("shaw", "default"),
    ("none", "default"),
]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def targets(masks=True):
    """Return targets of two images of 60 x 90 and 64 x 50, one without objects."""
    some = {"boxes": torch.tensor([[5.0, 6.0, 45.0, 50.0], [50.0, 8.0, 80.0, 30.0]]), "labels": torch.tensor([3, 1])}
    none = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    shapes = (2, 60, 90), (0, 64, 50)
    masked = [torch.ones(shape, dtype=torch.uint8) for shape in shapes]
    return [{**target, "masks": mask} if masks else target for target, mask in zip((some, none), masked, strict=True)]


IMAGES = [torch.rand(3, 60, 90), torch.rand(3, 64, 50)]


def test_points_of_a_fresh_layer_lie_one_to_p_cells_from_the_query_in_a_direction_per_head():
    attention = DeformableAttention(16, levels=2, num_heads=4, points=3)
    shapes = [(5, 10), (2, 4)]
    locations, weights = attention.points_of(torch.randn(1, 1, 16), torch.full((1, 1, 1, 2), 0.5), shapes)
    steps = (locations - 0.5) * torch.tensor([[10.0, 5.0], [4.0, 2.0]])[:, None]
    directions = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]])[:, None, None]
    torch.testing.assert_close(steps[0, 0], (directions * torch.arange(1.0, 4)[:, None]).expand(-1, 2, -1, -1))
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 6))


@in_turn(("encoding", "joining"), POSITIONS)
def test_a_fresh_adapter_leaves_the_tokens_of_the_vit_as_they_are_with_any_position_at_any_size(encoding, joining):
    model = graticule.create_segmenter(
        **VIT, num_classes=2, decoder="uperhead(channels=8)", encoding=encoding, joining=joining, neck=ADAPTER
    ).eval()
    adapter, vit, image = model.features.reader, model.backbone, torch.randn(2, 3, 64, 96)
    grid = vit.grid_of(image)
    _, *maps = adapter.spm(image)
    spatial = torch.cat([level.flatten(2).mT for level in maps], 1)
    shapes = [tuple(level.shape[-2:]) for level in maps]
    tokens, _ = adapter.exchange(vit, image, grid, spatial, shapes)
    for actual, expected in zip(tokens, vit.forward_intermediates(image, intermediates_only=True), strict=True):
        torch.testing.assert_close(grid.to_map(actual), expected)


def test_every_parameter_of_an_adapter_learns_and_checkpointing_changes_no_gradient():
    model = (
        graticule.create_segmenter(
            **VIT,
            num_classes=2,
            decoder="uperhead(channels=8, drop=0.0)",
            neck=ADAPTER,
            joining="lape",
            encoding="learnable",
        )
        .double()
        .train()
    )
    with torch.no_grad():
        for interaction in model.features.reader.interactions:
            interaction.injector.gamma.normal_()
    image, gradients = torch.randn(2, 3, 64, 96, dtype=torch.float64), []
    for recompute in (False, True):
        model.backbone.set_grad_checkpointing(recompute)
        model.zero_grad()
        model(image).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        assert [name for name, gradient in gradients[-1].items() if gradient is None] == []
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-9, atol=1e-12, msg=name)


def in_windows(grid, window):
    """Return 0 for pairs of tokens in the same window, -inf for others."""
    y, x = grid.coordinates().unbind(-1)
    label = y // window * 1000 + x // window
    return torch.zeros(grid.tokens, grid.tokens).masked_fill(label[:, None] != label, -math.inf).double()


@pytest.mark.parametrize("batch", [1, 3])
def test_attention_in_windows_is_attention_with_all_pairs_across_windows_masked(batch):
    grid, attention = Grid(4, 6), Attention(8, 2).double()
    windows = WindowedAttention(attention, 2)
    x, mask = torch.randn(batch, 24, 8, dtype=torch.float64), in_windows(grid, 2)
    bias = torch.randn(2, 24, 24, dtype=torch.float64)
    for value, masked in ((None, mask), (bias, bias + mask), (lambda q: bias * q.sum(), None)):
        position = LayerPosition(bias=value)
        if masked is None:
            masked = lambda q: bias * q.sum() + mask  # noqa: E731
        expected = LayerPosition(bias=masked)
        torch.testing.assert_close(windows(x, position, grid), attention(x, expected, grid))
        torch.testing.assert_close(windows.weights(x, position, grid), attention.weights(x, expected, grid))


def test_windows_that_reach_beyond_the_grid_have_zeros_as_keys_and_values():
    grid, attention = Grid(3, 5), Attention(8, 2).double()
    windows, x = WindowedAttention(attention, 2), torch.randn(2, 15, 8, dtype=torch.float64)
    q, k, v = attention.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    logits = (q @ k.mT / 2).exp() * in_windows(grid, 2).exp()
    y, xs = grid.coordinates().unbind(-1)
    missing = 4 - in_windows(grid, 2).exp().sum(-1)  # zeros in the window of each token: each has the logit 0
    weights = logits / (logits.sum(-1, keepdim=True) + missing[:, None])
    assert missing.max() == 3 and y.max() == 2 and xs.max() == 4
    torch.testing.assert_close(windows.weights(x, LayerPosition(), grid), weights)
    expected = attention.proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(windows(x, LayerPosition(), grid), expected)


NARROW = "simple_pyramid(channels=32)"


@pytest.fixture(scope="module")
def detectors():
    """Return a detector per head, alternating between a pyramid, a plain ViT and an adapter."""
    torch.manual_seed(0)
    small = {"retinanet": "retinanet(convs=1)", "mask_rcnn": "mask_rcnn(most=5)", "faster_rcnn": "faster_rcnn(most=5)"}
    kinds = {
        "retinanet": {**PVT, "neck": "fpn(channels=32)"},
        "fcos": {**VIT, "neck": "simple_pyramid(channels=32)", "encoding": "rope"},
        "faster_rcnn": {**VIT, "neck": "simple_pyramid(channels=16)", "encoding": "peg"},
        "mask_rcnn": {**VIT, "neck": f"{WINDOWED} + fpn(channels=16, norm=True)", "joining": "lape"},
    }
    return {head: graticule.create_detector(num_classes=3, head=small.get(head, head), **kinds[head]) for head in HEADS}


@pytest.mark.parametrize("head", list(HEADS))
def test_a_detector_gives_losses_in_training_and_detections_in_evaluation(detectors, head):
    model = detectors[head].train()
    losses = model(IMAGES, targets(model.masks))
    sum(losses.values()).backward()
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    with torch.no_grad():
        detections = model.eval()(IMAGES)
    for detection, image in zip(detections, IMAGES, strict=True):
        count, (height, width) = len(detection["scores"]), image.shape[-2:]
        assert detection["boxes"].shape == (count, 4) and detection["labels"].shape == (count,)
        assert (detection["boxes"] >= 0).all() and (
            detection["boxes"] <= torch.tensor([width, height, width, height])
        ).all()
        assert (detection["labels"] >= 1).all() and (detection["labels"] <= 3).all()
        if model.masks:
            assert detection["masks"].shape == (count, 1, height, width)


@pytest.mark.parametrize(
    "head", [pytest.param(head, marks=pytest.mark.slow) if head == "mask_rcnn" else head for head in HEADS]
)
def test_the_classes_that_a_detector_returns_are_those_of_its_targets(detectors, head):
    model = detectors[head].eval()
    layers = {
        "retinanet": "head.classification_head.cls_logits",
        "fcos": "head.classification_head.cls_logits",
        "faster_rcnn": "roi_heads.box_predictor.cls_score",
        "mask_rcnn": "roi_heads.box_predictor.cls_score",
    }
    layer = model.model.get_submodule(layers[head])
    before, classes = [p.detach().clone() for p in layer.parameters()], 3 + (model.first_class == 1)
    for label in (1, 3):
        torch.nn.init.zeros_(layer.weight)  # all classes are equally likely
        torch.nn.init.zeros_(layer.bias)
        labeled = [{**target, "labels": target["labels"] * 0 + label} for target in targets()]
        model.train().zero_grad()
        sum(model(IMAGES, labeled).values()).backward()
        gradient = layer.bias.grad.reshape(-1, classes).sum(0)[model.first_class :]
        assert gradient.argmin() == label - 1  # the loss falls only with the logit of this class
        raised = torch.full((classes,), -50.0)
        raised[label - 1 + model.first_class] = 50
        layer.bias.data.copy_(raised.repeat(len(layer.bias) // classes))
        with torch.no_grad():
            labels = torch.cat([detection["labels"] for detection in model.eval()(IMAGES)])
        layer.weight.data, layer.bias.data = (value.clone() for value in before)
        assert len(labels) and (labels == label).all()


def test_images_are_normalized_padded_and_never_resized(detectors):
    batch = detectors["retinanet"].model.transform
    mean = torch.tensor(batch.image_mean)[:, None, None]
    images, _ = batch([mean.expand(3, 60, 90).clone(), torch.zeros(3, 33, 20)])
    assert images.tensors.shape == (2, 3, 64, 96) and images.image_sizes == [(60, 90), (33, 20)]
    assert not images.tensors[0].any() and not images.tensors[1, :, 33:].any()


@in_turn("head", ["fcos", "retinanet"])
def test_the_best_predictions_without_overlaps_are_the_detections(detectors, head):
    model = detectors[head].eval()
    images = torch.rand(2, 3, 64, 128)
    with torch.no_grad():
        boxes, scores = model.predictions(images)
        detections = model(list(images))
    assert boxes.shape == (2, scores.shape[1], 4) and scores.shape[2] == model.num_classes
    for i, detection in enumerate(detections):
        flat, labels = scores[i].flatten(), torch.arange(model.num_classes).repeat(len(boxes[i]))
        clipped = clip_boxes_to_image(boxes[i], (64, 128)).repeat_interleave(model.num_classes, 0)
        above = (flat > model.model.score_thresh).nonzero()[:, 0]
        best = above[batched_nms(clipped[above], flat[above], labels[above], model.model.nms_thresh)]
        best = best[: model.model.detections_per_img]
        torch.testing.assert_close(clipped[best], detection["boxes"], rtol=0, atol=0)
        torch.testing.assert_close(flat[best], detection["scores"], rtol=0, atol=0)
        assert torch.equal(labels[best] + 1, detection["labels"])


def test_anchors_of_coarse_levels_are_at_multiples_of_their_stride():
    images = type("Images", (), {"image_sizes": [(800, 1333)]})
    (boxes,) = Anchors((64, 128), (1.0,), (0.5, 2.0))(images, [torch.zeros(1, 1, 13, 21), torch.zeros(1, 1, 7, 11)])
    centers = (boxes[:, :2] + boxes[:, 2:]) / 2
    assert torch.equal(centers[2 * 13 * 21 - 1], torch.tensor([20 * 64.0, 12 * 64]))
    assert torch.equal(centers[-1], torch.tensor([10 * 128.0, 6 * 128]))
    width, height = (boxes[-1, 2:] - boxes[-1, :2]).tolist()
    assert math.isclose(width * height, 128**2, rel_tol=1e-5) and math.isclose(height / width, 2, rel_tol=1e-5)


def test_anchors_of_retinanet_have_the_scales_and_ratios_of_its_options():
    head = "retinanet(convs=0, scale=2, octave=2, ratios=(0.25, 1))"
    model = graticule.create_detector(**PVT, num_classes=3, head=head, neck="fpn(channels=32)")
    sizes = 2 * model.model.anchor_generator.cell_anchors[0][:, 2:]  # width and height, at a stride of 8
    torch.testing.assert_close(
        sizes, torch.tensor([[32, 8], [32 * 2**0.5, 8 * 2**0.5], [16, 16], [16 * 2**0.5] * 2]).double()
    )
    assert model.model.head.classification_head.cls_logits.out_channels == 4 * 3


def test_levels_added_to_the_outputs_of_a_pyramid_are_torchvisions():
    neck = FeaturePyramid((4, 6), (4, 8), channels=5, extra="outputs")
    reference = LastLevelP6P7(5, 5)
    reference.load_state_dict(dict(zip(reference.state_dict(), neck.more.state_dict().values(), strict=True)))
    maps = neck([torch.randn(2, 4, 16, 24), torch.randn(2, 6, 8, 12)])
    expected, _ = reference(maps[:2], maps[:2], ["0", "1"])
    assert neck.strides == (4, 8, 16, 32) and len(maps) == 4
    torch.testing.assert_close(maps, expected)


@in_turn(
    ("decoder", "options"),
    [
        ("segmenter_linear", {**VIT, "encoding": "rope"}),
        ("segmenter_mask(depth=1)", {**VIT, "joining": "lape"}),
        ("uperhead(channels=8)", PVT),
        ("fpn(channels=8)", {**VIT, "encoding": "relative_bias"}),
        ("fcn(channels=8)", PVT),
    ],
)
def test_a_segmentation_model_gives_logits_of_the_size_of_any_image(decoder, options):
    model = graticule.create_segmenter(num_classes=3, decoder=decoder, **options)
    logits = model(torch.randn(2, 3, 50, 70))
    assert logits.shape == (2, 3, 50, 70)
    logits.square().sum().backward()
    unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert all(
        (decoder.startswith("fcn") and "blocks.3" in name) or "patch_embeds.3" in name or "stages.3" in name
        for name in unused
    )
    copy = graticule.create_segmenter(num_classes=3, decoder=decoder, **options).eval()
    copy.load_state_dict(model.state_dict())
    image = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(copy(image), model.eval()(image))


@pytest.mark.parametrize("located", [False, True])
def test_windows_cover_an_image_and_each_pixel_has_the_mean_of_its_windows(located):
    model = graticule.create_segmenter(**VIT, num_classes=3, decoder="segmenter_linear", encoding="rope").eval()
    image, calls = torch.randn(1, 3, 64, 100), []
    model.register_forward_pre_hook(lambda module, args: calls.append(args))
    undivided = segment_in_windows(model, image, (64, 112), located=located)
    torch.testing.assert_close(undivided, model(image)[..., :100], rtol=1e-4, atol=1e-4)
    calls.clear()
    logits = segment_in_windows(model, image, (32, 64), (32, 48), located=located)
    windows = {(0, 0): calls[0], (0, 36): calls[1], (32, 0): calls[2], (32, 36): calls[3]}  # 36: ends at the border
    assert len(calls) == 4
    total, count = torch.zeros(1, 3, 64, 100), torch.zeros(64, 100)
    for (top, left), (pixels, crop) in windows.items():
        assert torch.equal(pixels, image[..., top : top + 32, left : left + 64])
        assert crop == (graticule.Crop((4, 7), (top / 16, left / 16, 2, 4)) if located else None)
        total[..., top : top + 32, left : left + 64] += model(pixels, crop)
        count[top : top + 32, left : left + 64] += 1
    torch.testing.assert_close(logits, total / count)


@pytest.mark.parametrize("options", [{**VIT, "neck": f"{ADAPTER} + fpn(channels=8)"}, PVT])
def test_layers_of_the_backbone_have_learning_rates_of_their_own(options):
    model = graticule.create_detector(num_classes=2, head="retinanet(convs=0)", joining="lape", **options)
    names = dict(model.named_parameters())
    assert model.no_weight_decay() <= names.keys()
    assert any("position" in name for name in model.no_weight_decay())
    of = {id(parameter): name for name, parameter in names.items()}
    groups = param_groups_layer_decay(model, 0.05, layer_decay=0.5)
    scale = {of[id(parameter)]: group["lr_scale"] for group in groups for parameter in group["params"]}
    assert scale.keys() == names.keys()
    by_layer = [min(s for name, s in scale.items() if f"backbone.blocks.{layer}." in name) for layer in range(4)]
    heads = [s for name, s in scale.items() if not name.startswith("model.backbone.backbone.")]
    assert by_layer == sorted(set(by_layer)) and max(by_layer) < 1 and set(heads) == {1.0}


def test_an_adapter_reads_a_crop_at_its_place_in_the_whole_image():
    model = graticule.create_segmenter(
        **VIT, num_classes=2, decoder="fpn(channels=8)", neck=ADAPTER, encoding="rope"
    ).eval()
    crop, image = graticule.Crop((8, 8), (2, 3, 4, 4)), torch.randn(1, 3, 64, 64)
    table = model.backbone.position(model.backbone.grid_at((128, 128)))[0].rotary
    seen = []
    block = model.backbone.blocks[0]
    block.register_forward_pre_hook(lambda module, args: seen.append(args[1].rotary))
    model(image, crop)
    rows = torch.arange(64).reshape(8, 8)[2:6, 3:7].flatten()
    for actual, expected in zip(seen[0], table, strict=True):
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(actual, expected[..., rows, :])


def test_a_decoder_of_ones_own_has_the_rights_of_the_others(monkeypatch):
    monkeypatch.setattr(DECODERS, "data", dict(DECODERS))

    @register_decoder("of_the_last_map")
    class OfTheLastMap(Decoder):
        def __init__(self, inputs, strides, num_classes, scale: float = 1.0):
            super().__init__()
            self.head, self.scale = torch.nn.Conv2d(inputs[-1], num_classes, 1), scale

        def forward(self, maps):
            return self.head(maps[-1]) * self.scale

    image, outputs = torch.randn(1, 3, 64, 64), []
    for decoder in ("of_the_last_map", "of_the_last_map(scale=2)"):
        torch.manual_seed(1)
        outputs.append(graticule.create_segmenter(**PVT, num_classes=3, decoder=decoder).eval()(image))
    torch.testing.assert_close(outputs[1], 2 * outputs[0])
    with pytest.raises(ValueError, match="scale"):
        graticule.create_segmenter(**PVT, num_classes=3, decoder="of_the_last_map(scal=2)")


def test_parts_that_do_not_fit_are_refused_with_a_remedy():
    detector, segmenter = graticule.create_detector, graticule.create_segmenter
    model = segmenter(**VIT, num_classes=2, decoder="segmenter_linear")
    trained = detector(**PVT, num_classes=2, head="retinanet(convs=0)", neck="fpn(channels=32)").train()
    image, (some, _) = torch.rand(3, 64, 64), targets()
    box = {"boxes": torch.tensor([[3.0, 3, 3, 9]]), "labels": torch.tensor([1])}
    cases = [
        (partial(detector, **VIT, num_classes=0), "`num_classes` must be at least 1"),
        (
            partial(segmenter, **VIT, num_classes=2, decoder="fpn(channels=0)"),
            "`channels` of decoder fpn must be at least",
        ),
        (partial(detector, **VIT, num_classes=2, head="retinanet(score_=1)"), "did you mean 'score'"),
        (partial(detector, **VIT, num_classes=2, head="retina"), "`head` must be"),
        (
            partial(detector, **VIT, num_classes=2, head="fcos(convs=5)", neck=NARROW),
            "`convs` must be from 0 to 4, got 5",
        ),
        (partial(detector, **VIT, num_classes=2, head="retinanet + fcos"), "`head` must be one name"),
        (partial(detector, **VIT, num_classes=2, neck="fpm"), "`neck` must be"),
        (partial(detector, **VIT, num_classes=2, neck="fpn + adapter"), "must begin with 'adapter'"),
        (partial(detector, **PVT, num_classes=2, neck="adapter"), "unless the backbone is a plain ViT"),
        (partial(detector, **PVT, num_classes=2, neck="simple_pyramid"), "use 'fpn' for a pyramid"),
        (partial(detector, **VIT, num_classes=2, neck="adapter(groups=3)"), "`groups` must divide"),
        (partial(detector, **VIT, num_classes=2, neck="adapter(heads=5)"), "`heads` must divide"),
        (partial(detector, **VIT, num_classes=2, neck="adapter(heads=2)", class_token=True), "prefix tokens"),
        (
            partial(detector, **VIT, num_classes=2, neck="adapter(groups=2, heads=2)", encoding="gpsa"),
            "blend attention weights",
        ),
        (partial(detector, **PVT, num_classes=2, neck="fpn(first=4)"), "`first` must be the index"),
        (partial(detector, **VIT, num_classes=2, encodin="rope"), "did you mean `encoding`"),
        (partial(detector, model.backbone, 2, img_size=32), "`backbone` must be a name"),
        (partial(segmenter, **PVT, num_classes=2, decoder="fcn(level=7)"), "`level` must be the index"),
        (partial(detector, **PVT, num_classes=2, head="retinanet(ratios=())"), "`ratios` must have at least one"),
        (
            partial(DeformableAttention(8, 1, 2), box["boxes"].new_zeros(1, 1, 8), torch.zeros(1, 1, 1, 4), None, []),
            "`reference` must be the (x, y) of each query; boxes are not supported, got 4 numbers",
        ),
        (partial(segment_in_windows, model, image[None], 40), "multiples of 16 pixels"),
        (partial(segment_in_windows, model, image[None], 32, 40), "`stride` must be from 1"),
        (partial(model, image[None, :, :40], graticule.Crop((4, 4), (0, 0, 2, 4))), "multiples of 16 if `crop`"),
        (partial(trained, [image]), "one entry per image in training, got none"),
        (partial(trained, [image], [box]), "positive width and height"),
        (partial(trained, [image], [{**box, "boxes": torch.full((1, 4), math.nan)}]), "`boxes` must be finite"),
        (partial(trained, [image], [{"boxes": box["boxes"]}]), "got no `labels` for image 0"),
        (partial(trained, [image], [{**some, "labels": torch.ones(2)}]), "`labels` must be whole numbers"),
        (partial(trained, [image], [some]), "`labels` must be from 1 to 2"),
        (partial(trained, [image], [{**some, "labels": torch.tensor([1])}]), "`targets` must have `boxes`"),
    ]
    for call, message in cases:
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            call()
