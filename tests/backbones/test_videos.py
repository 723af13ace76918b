"""Models of videos and volumes, (B, C, depth, height, width)."""

import torch

import graticule
from graticule import Grid
from in_turn import in_turn, refusals
from tiny import assert_same

SMALL = {"num_classes": 5, "in_chans": 2, "embed_dim": 24, "num_heads": 2, "depth": 2}
ENCODINGS = ["learnable", "factorized", "rope_mixed", "relative_bias", "alibi", "shaw", "peg(places=[-1, 0])"]


def built(name="vit_tiny_patch16_224", img_size=(4, 8, 12), patch_size=(2, 4, 4), **kwargs):
    torch.manual_seed(0)
    model = graticule.create_model(name, img_size=img_size, patch_size=patch_size, **{**SMALL, **kwargs})
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape) / 5
    return model.double().eval()


@in_turn("encoding", ENCODINGS)
@torch.no_grad()
def test_a_video_of_one_frame_is_the_image(encoding):
    image, video = (
        built(img_size=(8, 12), patch_size=(4, 4), encoding=encoding),
        built(img_size=(1, 8, 12), patch_size=(1, 4, 4), encoding=encoding),
    )
    weights = dict(image.named_parameters())
    for name, parameter in video.named_parameters():
        if name.endswith(("_t", "rel_pos_t")):
            parameter.zero_()
        elif parameter.shape == weights[name].shape:
            parameter.copy_(weights[name])
        elif "proj" in name and parameter.ndim == 5:
            parameter[:, :, parameter.shape[2] // 2] = weights[name]  # the others see zeros before and after the frame
        else:
            parameter[:2] = weights[name]
    images = torch.randn(3, 2, 8, 12, dtype=torch.float64)
    assert_same(video(images[:, :, None]), image(images), 1e-12)


@torch.no_grad()
def test_a_video_model_takes_more_frames_and_is_set_to_them():
    model = built(encoding="learnable")
    videos = torch.randn(2, 2, 8, 8, 16, dtype=torch.float64)
    logits = model(videos)
    model.set_input_size((8, 8, 16))
    assert model.grid == Grid(4, 2, 4, prefix=1) and model.patch_embed.num_patches == 32
    assert_same(model(videos), logits, 1e-12)
    crop = graticule.Crop((4, 2, 4), (1, 0, 1, 2, 2, 3))
    table = model.position(model.grid)[0].added_to_stream[1:].unflatten(0, (4, 2, 4))
    part = model.position(Grid(2, 2, 3, prefix=1, crop=crop))[0].added_to_stream[1:].unflatten(0, (2, 2, 3))
    assert torch.equal(part, table[1:3, :, 1:]) and model(videos[:, :, 2:6, :, 4:], crop=crop).shape == (2, 5)


@in_turn(
    ("name", "encoding"),
    [("vit_tiny_patch16_224", "rope_mixed + causal"), ("deit_tiny_distilled_patch16_224", "alibi + causal")],
)
@torch.no_grad()
def test_patches_know_nothing_of_later_frames_with_a_causal_mask(name, encoding):
    kwargs = {"embed_dim": 24, "num_heads": 2, "joining": "default"}
    model = built(name, img_size=(6, 8, 12), encoding=encoding, patch_size=(1, 4, 4), **kwargs)
    videos = torch.randn(2, 2, 6, 8, 12, dtype=torch.float64)
    other = torch.cat([videos[:, :, :4], torch.randn(2, 2, 2, 8, 12, dtype=torch.float64)], 2)
    before, after = (model.forward_intermediates(x, indices=[-1], intermediates_only=True)[0] for x in (videos, other))
    assert_same(after[:, :, :4], before[:, :, :4], 1e-12)
    assert not torch.allclose(after[:, :, 4:], before[:, :, 4:]) and not torch.allclose(model(videos), model(other))
    first = model.forward_intermediates(videos[:, :, :2], indices=[-1], intermediates_only=True)[0]
    assert_same(first, before[:, :, :2], 1e-12)  # and appended frames change nothing


@torch.no_grad()
def test_a_video_model_folds_and_compiles():
    model = built(encoding="relative_bias + rope_mixed")
    videos = torch.randn(2, 2, 4, 8, 12, dtype=torch.float64)
    logits = model(videos)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(videos), logits)
    assert_same(graticule.fold(model)(videos), logits, 1e-12)


test_inputs_of_other_axes_are_refused = refusals(
    (lambda: built()(torch.zeros(1, 2, 8, 12)), r"`x` must be videos or volumes \(B, 2, depth, height, width\)"),
    (
        lambda: built(img_size=(8, 12), patch_size=(4, 4))(torch.zeros(1, 2, 4, 8, 12)),
        r"`x` must be images \(B, 2, height, width\), .* whose depth this model has no axis for",
    ),
    (lambda: built(img_size=(3, 8, 12)), "`img_size` must be a positive multiple .* got depth 3"),
    (lambda: built(patch_size=(4, 4)), "`patch_size` must have 3 axes, as many as the image"),
    (lambda: built().set_input_size((4, 8)), "`patch_size` must have 2 axes|`img_size` must have 3"),
    (lambda: built().set_input_size(patch_size=(1, 4, 4)), "`patch_size` must stay 2 x 4 x 4"),
    (lambda: built("cct_2_3x2_32"), "`img_size` must be a whole number or 2 whole numbers"),
    (
        lambda: graticule.create_model("pvt_tiny", img_size=(4, 64, 64)),
        "`img_size` must have height and width in PyramidVisionTransformer, got",
    ),
    error=(ValueError, TypeError),
)
