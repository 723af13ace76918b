"""Two-stage detectors: sampling of regions, choice of training regions, and mmdetection's weights."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import graticule
from graticule.checkpoints.released_dense import load_published
from graticule.dense.regions import RegionPool, RegionSampler
from graticule.lab.tasks.detection import image_seed
from graticule.lab.tasks.options import DetectionRecipe
from graticule.lab.training.task import task_of

IMAGES = [torch.rand(3, 64, 96, generator=torch.Generator().manual_seed(n)) for n in range(2)]
SMALL = {
    "num_classes": 3,
    "neck": "simple_pyramid(channels=8)",
    "depth": 1,
    "embed_dim": 16,
    "num_heads": 2,
    "patch_size": 16,
    "in_chans": 3,
    "img_size": (64, 96),
}


@pytest.fixture(scope="module")
def mask_rcnn():
    torch.manual_seed(0)
    head = (
        "mask_rcnn(score=0.0, most=5, regions=24, proposals=50, hidden=32, channels=16, convs=3, ratios=(0.5, 1, 2, 3))"
    )
    return graticule.create_detector("vit_nano_patch4_28", head=head, **SMALL)


def test_a_region_of_a_map_that_is_linear_in_pixels_has_the_values_at_the_centers_of_its_bins():
    strides = (8, 16, 24)
    maps = {}
    for level, stride in enumerate(strides):
        y, x = (((torch.arange(side // stride, dtype=torch.float64)) + 0.5) * stride for side in (480, 720))
        maps[str(level)] = torch.stack([y[:, None].expand(-1, len(x)), x.expand(len(y), -1)])[None]
    boxes = torch.tensor([[40.0, 50, 133, 90], [30, 70, 260, 300], [33, 44, 610, 440]], dtype=torch.float64)
    pool = RegionPool(strides, 7)
    assert pool.levels(boxes).tolist() == [0, 1, 2]  # 61, 230 and 478 pixels, of 112 and 224
    read = pool(maps, [boxes], [(480, 720)])
    bins = (torch.arange(7, dtype=torch.float64) + 0.5) / 7
    for actual, (left, top, right, bottom) in zip(read, boxes, strict=True):
        y, x = top + bins * (bottom - top), left + bins * (right - left)
        torch.testing.assert_close(actual[0], y[:, None].expand(7, 7), rtol=0, atol=1e-9)
        torch.testing.assert_close(actual[1], x.expand(7, 7), rtol=0, atol=1e-9)


def test_a_region_of_224_pixels_is_read_at_stride_16_as_in_the_paper():
    sides = torch.tensor([1.0, 55, 56, 111, 112, 223, 224, 447, 448, 5000])
    boxes = torch.stack([0 * sides, 0 * sides, sides / 2, 2 * sides], 1)  # boxes of this area, not square
    assert RegionPool((4, 8, 16, 32), 7).levels(boxes).tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]


def test_the_regions_drawn_for_an_image_depend_on_its_seed_alone():
    sampler = RegionSampler(20, 0.25, stream=0)
    matched = [torch.randint(-1, 3, (100,), generator=torch.Generator().manual_seed(n)) for n in range(3)]
    sampler.seeds = [7, 8, 9]
    drawn = sampler(matched)
    sampler.seeds = [9, 7]
    torch.rand(5)
    part = sampler([matched[2], matched[0]])
    for kind in (0, 1):
        assert torch.equal(part[kind][0], drawn[kind][2]) and torch.equal(part[kind][1], drawn[kind][0])
    objects, background = (torch.stack(masks) for masks in drawn)
    assert objects.sum(1).tolist() == [5] * 3 and background.sum(1).tolist() == [15] * 3
    assert not objects[torch.stack(matched) < 1].any() and not background[torch.stack(matched) != 0].any()
    sampler.seeds = [1, 2, 3]
    assert not torch.equal(sampler(matched)[1][0], drawn[1][0])
    other = RegionSampler(20, 0.25, stream=1)
    other.seeds = [7, 8, 9]
    assert not torch.equal(other(matched)[1][0], drawn[1][0])
    few = torch.tensor([1, 0, 0, -1])
    sampler.seeds = [1]
    assert [masks[0].tolist() for masks in sampler([few])] == [[1, 0, 0, 0], [0, 1, 1, 0]]


def test_several_processes_and_a_resumed_run_draw_the_regions_of_one_process(mask_rcnn):
    task = task_of(DetectionRecipe(seed=5, head="mask_rcnn"))
    model = mask_rcnn.train()
    target = {
        "boxes": torch.tensor([[4.0, 8, 60, 50], [30, 20, 90, 60]], dtype=torch.float64),
        "labels": torch.tensor([0, 2]),
        "masks": torch.ones(2, 64, 96, dtype=torch.uint8),
    }
    targets = [{**target, "image_id": 40 + n} for n in range(2)]
    drawn = []
    inner = RegionSampler.__call__

    def outer(self, matched):
        targets = inner(self, matched)
        drawn.append([torch.stack(masks) for masks in zip(*targets, strict=True)])
        return targets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RegionSampler, "__call__", outer)
        for chosen, epoch in (([0, 1], 3), ([0], 3), ([1], 3), ([1], 3), ([1], 4)):
            torch.rand(3)
            with torch.no_grad():
                task.loss(model, ([IMAGES[n] for n in chosen], [targets[n] for n in chosen]), epoch)
    both, first, second, again, later = drawn[::2]  # those of the first stage
    assert torch.equal(both[0], first[0]) and torch.equal(both[1], second[0])
    assert torch.equal(second[0], again[0]) and not torch.equal(second[0], later[0])
    assert [len(masks) for masks in drawn] == [2, 2, 1, 1, 1, 1, 1, 1, 1, 1]
    _, _, second, again, _ = drawn[1::2]  # of the second stage, whose proposals may differ by rounding
    assert torch.equal(second[0], again[0])
    assert len({image_seed(*key) for key in ((5, 3, 40), (5, 3, 41), (5, 4, 40), (6, 3, 40))}) == 4


def test_losses_and_gradients_of_a_batch_are_the_means_of_those_of_its_images(mask_rcnn):
    model = copy.deepcopy(mask_rcnn).double().train()
    boxes = [torch.tensor([[4.0, 8, 60, 50], [30, 20, 90, 60]]), torch.tensor([[8.0, 8, 30, 40]]), torch.zeros(0, 4)]
    targets = [
        {
            "boxes": image_boxes.double(),
            "labels": torch.arange(1, 1 + len(image_boxes)),
            "masks": torch.ones(len(image_boxes), 64, 96, dtype=torch.uint8),
            "seed": torch.tensor(7 + number),
        }
        for number, image_boxes in enumerate(boxes)
    ]
    images = [image.double() for image in (*IMAGES, IMAGES[0].flip(-1))]

    def learned(chosen):
        model.zero_grad()
        losses = model([images[n] for n in chosen], [targets[n] for n in chosen])
        sum(losses.values()).backward()
        return losses, {
            name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
        }

    together = learned([0, 1, 2])
    alone = [learned([n]) for n in range(3)]
    assert alone[2][0]["loss_mask"] == 0 and len(together[0]) == 5  # no object, no mask to learn
    for number, gradients in enumerate(together):
        for name, value in gradients.items():
            mean = sum(parts[number].get(name, torch.zeros(())) for parts in alone) / 3
            torch.testing.assert_close(value, mean, rtol=1e-9, atol=1e-12, msg=name)


def published_heads(model, classes, channels, hidden=32, inner=16):
    """Return the state dict of a model with random heads of `classes` classes, under mmdetection's names."""
    generator = torch.Generator().manual_seed(classes)
    box, mask = "roi_head.bbox_head", "roi_head.mask_head"
    heads = [
        ("rpn_head.rpn_conv", (channels, channels, 3, 3)),
        ("rpn_head.rpn_cls", (4, channels, 1, 1)),
        ("rpn_head.rpn_reg", (16, channels, 1, 1)),
        (f"{box}.shared_fcs.0", (hidden, channels * 49)),
        (f"{box}.shared_fcs.1", (hidden, hidden)),
        (f"{box}.fc_cls", (classes + 1, hidden)),
        (f"{box}.fc_reg", (4 * classes, hidden)),
        *((f"{mask}.convs.{n}.conv", (inner, inner if n else channels, 3, 3)) for n in range(3)),
        (f"{mask}.upsample", (inner, inner, 2, 2)),
        (f"{mask}.conv_logits", (classes, inner, 1, 1)),
    ]
    prefix = "model.backbone."
    # a simple pyramid has no published form, so it keeps its names
    state = {
        name.replace(f"{prefix}backbone.", "backbone."): value.clone()
        for name, value in model.state_dict().items()
        if name.startswith(prefix)
    }
    for name, shape in heads:
        weight = torch.randn(shape, generator=generator) / math.prod(shape[1:]) ** 0.5
        state |= {f"{name}.weight": weight, f"{name}.bias": torch.randn(shape[0], generator=generator)}
    return state


def test_mask_rcnn_with_mmdetections_weights_computes_its_formulas(mask_rcnn):
    weights = published_heads(mask_rcnn, classes=3, channels=8)
    model = load_published(copy.deepcopy(mask_rcnn), weights).double().eval()
    weights = {name: value.double() for name, value in weights.items()}
    heads = model.model.roi_heads
    regions = torch.randn(6, 8, 7, 7, dtype=torch.float64)

    def layer(name, x):
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    x = regions.flatten(1)
    for name in ("shared_fcs.0", "shared_fcs.1"):
        x = layer(f"roi_head.bbox_head.{name}", x).relu()
    logits, moves = heads.box_predictor(heads.box_head(regions))
    expected = layer("roi_head.bbox_head.fc_cls", x).softmax(1)  # three classes and the background
    torch.testing.assert_close(logits.softmax(1)[:, 1:], expected[:, :3], rtol=0, atol=1e-12)
    torch.testing.assert_close(logits.softmax(1)[:, 0], expected[:, 3], rtol=0, atol=1e-12)
    torch.testing.assert_close(moves[:, 4:], layer("roi_head.bbox_head.fc_reg", x), rtol=0, atol=1e-12)
    assert heads.box_coder.weights == (10.0, 10.0, 5.0, 5.0)  # mmdetection's deviations 0.1, 0.1, 0.2 and 0.2

    def conv(name, x, padding=1):
        return F.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=padding)

    y = torch.randn(2, 8, 14, 14, dtype=torch.float64)
    masks = heads.mask_predictor(heads.mask_head(y))
    for index in range(3):
        y = conv(f"roi_head.mask_head.convs.{index}.conv", y).relu()
    up = "roi_head.mask_head.upsample"
    y = F.conv_transpose2d(y, weights[f"{up}.weight"], weights[f"{up}.bias"], stride=2).relu()
    torch.testing.assert_close(masks[:, 1:], conv("roi_head.mask_head.conv_logits", y, 0), rtol=0, atol=1e-12)

    z = torch.randn(1, 8, 5, 6, dtype=torch.float64)
    objectness, deltas = model.model.rpn.head([z])
    hidden = conv("rpn_head.rpn_conv", z).relu()
    torch.testing.assert_close(objectness[0], conv("rpn_head.rpn_cls", hidden, 0), rtol=0, atol=1e-12)
    torch.testing.assert_close(deltas[0], conv("rpn_head.rpn_reg", hidden, 0), rtol=0, atol=1e-12)
