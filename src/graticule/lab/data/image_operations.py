"""Pillow's operations on batches of images, as tensors on any device, with arguments for each image.

Images are (n, C, H, W), uint8, with one or three channels; arguments are (n,). Operations on pixels and crops equal
Pillow's. Affine transforms compute in float64, as Pillow does, and differ by at most one gray level.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Pillow stores the weights of a filter as integers, in units of its inverse.
_ONE = 1 << 22


def crop(images: Tensor, boxes: Tensor, cubic: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize a box of each image, as `Image.crop` and `Image.resize` do, first along rows.

    Args:
        images: (n, C, H, W).
        boxes: (n, 4), top, left, height and width in pixels.
        cubic: (n,), whether the filter is bicubic instead of bilinear.
        size: (height, width) of the result.
    """
    boxes = boxes.double()
    across = _resize_weights(boxes[:, 1], boxes[:, 3], cubic, size[1], images.shape[3])
    down = _resize_weights(boxes[:, 0], boxes[:, 2], cubic, size[0], images.shape[2])
    rows = (images.double() @ across.mT[:, None]).add_(0.5).floor_().clamp_(0, 255)
    return (down[:, None] @ rows).add_(0.5).floor_().clamp_(0, 255).byte()


def _resize_weights(start: Tensor, length: Tensor, cubic: Tensor, size: int, pixels: int) -> Tensor:
    """Return the weights of the pixels of an axis in each pixel of the result: (n, size, pixels).

    Pillow stretches the filter if it shrinks the image, and divides by the sum of the weights within the box.
    """
    places = torch.arange(max(size, pixels), device=start.device, dtype=torch.float64)
    scale = (length / size)[:, None, None]
    center = start[:, None, None] + (places[:size, None] + 0.5) * scale
    stretch, cubic = scale.clamp(min=1), cubic[:, None, None]
    support = torch.where(cubic, 2.0, 1.0) * stretch
    pixel = places[:pixels]
    low = torch.maximum((center - support + 0.5).floor(), start[:, None, None])
    high = torch.minimum((center + support + 0.5).floor(), (start + length)[:, None, None])
    x = ((pixel + 0.5 - center) / stretch).abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    weights = torch.where(cubic, torch.where(x < 1, near, torch.where(x < 2, far, 0.0)), (1 - x).clamp(min=0))
    weights = weights * ((pixel >= low) & (pixel < high))
    return (weights / weights.sum(-1, keepdim=True) * _ONE).round_().div_(_ONE)


def affine(images: Tensor, matrices: Tensor, cubic: Tensor, fill: Tensor) -> Tensor:
    """Transform images as `Image.transform` with AFFINE does.

    Args:
        images: (n, C, H, W).
        matrices: (n, 6), float64: (a, b, c, d, e, f), with which a pixel (x, y) comes from (ax + by + c, dx + ey + f).
        cubic: (n,), whether the interpolation is bicubic instead of bilinear.
        fill: (C,), the color outside of the image, uint8.
    """
    height, width = images.shape[2:]
    x = torch.arange(width, device=images.device, dtype=torch.float64) + 0.5
    y = torch.arange(height, device=images.device, dtype=torch.float64)[:, None] + 0.5
    a, b, c, d, e, f = matrices.T[..., None, None]
    x, y = a * x + b * y + c, d * x + e * y + f  # (n, H, W) each
    inside = ((x >= 0) & (x < width) & (y >= 0) & (y < height))[:, None]
    left, top = (x - 0.5).floor(), (y - 0.5).floor()
    dx, dy = (x - 0.5 - left)[:, None], (y - 0.5 - top)[:, None]
    flat, curved = images.flatten(2), cubic[:, None, None, None]
    shape, columns = images.shape, [(left + n).clamp(0, width - 1).long() for n in range(-1, 3)]
    lines = []
    for n in range(-1, 3):
        first = (top + n).clamp(0, height - 1).long() * width
        taps = [(first + column).flatten(1)[:, None].expand(-1, shape[1], -1) for column in columns]
        lines.append(_interpolate([flat.gather(2, tap).view(shape).double() for tap in taps], dx, curved))
    values = _interpolate(lines, dy, curved).clamp_(0, 255).byte()  # Pillow truncates, too
    return torch.where(inside, values, fill[:, None, None])


def _interpolate(values: list[Tensor], d: Tensor, cubic: Tensor) -> Tensor:
    """Interpolate between the middle two of four values, at d in [0, 1), in the order of Pillow's operations."""
    v1, v2, v3, v4 = values
    curve = v2 + d * ((v3 - v1) + d * ((2 * (v1 - v2) + v3 - v4) + d * (v2 - v1 - v3 + v4)))
    return torch.where(cubic, curve, v2 + (v3 - v2) * d)


def gray(images: Tensor) -> Tensor:
    """Return the luminance of images, as `convert("L")` does: (n, 1, H, W)."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.int().split(1, dim=1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).byte()


def blend(first: Tensor, second: Tensor, factor: Tensor) -> Tensor:
    """Return first + factor (second - first), as `Image.blend` does in float32."""
    start = first.float()
    return (start + _per_image(factor.float()) * (second.float() - start)).clamp_(0, 255).byte()


def _per_image(arguments: Tensor) -> Tensor:
    """Return arguments (n,) as (n, 1, 1, 1), one for each image."""
    return arguments[:, None, None, None]


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Change the contrast around the mean luminance, as `ImageEnhance.Contrast` does."""
    mean = (gray(images).sum((1, 2, 3), dtype=torch.float64) / images[0, 0].numel() + 0.5).floor()
    return blend(_per_image(mean), images, factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with Pillow's filter SMOOTH, which leaves the border as it is, as `ImageEnhance.Sharpness` does."""
    values, smooth = images.int(), images.clone()
    total = 4 * values[..., 1:-1, 1:-1]
    for row in range(3):
        for column in range(3):
            total = total + values[..., row : values.shape[2] - 2 + row, column : values.shape[3] - 2 + column]
    smooth[..., 1:-1, 1:-1] = ((2 * total + 13) // 26).byte()  # of weights of a thirteenth, rounded
    return blend(smooth, images, factor)


def auto_contrast(images: Tensor, _: Tensor) -> Tensor:
    """Stretch the values of each channel to all of 0 to 255, as `ImageOps.autocontrast` does."""
    low, high = (extreme.double() for extreme in (images.amin((2, 3), True), images.amax((2, 3), True)))
    scale = torch.full_like(low, 255) / (high - low)  # 255 / tensor would multiply by the inverse, which rounds twice
    stretched = (images * scale + -low * scale).clamp(0, 255).byte()
    return torch.where(high > low, stretched, images)


def equalize(images: Tensor, _: Tensor) -> Tensor:
    """Make the histogram of each channel uniform, as `ImageOps.equalize` does."""
    values = images.flatten(2).int()
    levels = torch.arange(256, device=images.device, dtype=torch.int32).expand(*values.shape[:2], -1).contiguous()
    below = torch.searchsorted(values.sort(-1).values, levels)  # pixels that are darker than each level
    brightest = (values == values.amax(-1, True)).sum(-1, keepdim=True)
    step = (values.shape[2] - brightest) // 255
    table = torch.where(step > 0, ((step // 2 + below) // step.clamp(min=1)).clamp(max=255), levels)
    return table.gather(2, values.long()).view(images.shape).byte()


#: timm's names, without Increasing, of the operations on pixels; SolarizeAdd is timm's own.
PIXEL_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "AutoContrast": auto_contrast,
    "Equalize": equalize,
    "Invert": lambda images, _: 255 - images,
    "Posterize": lambda images, bits: images & _per_image(256 - 2 ** (8 - bits.int())).byte(),
    "Solarize": lambda images, threshold: torch.where(images < _per_image(threshold), images, 255 - images),
    "SolarizeAdd": lambda images, added: torch.where(images < 128, images + _per_image(added), images).byte(),
    "Color": lambda images, factor: blend(gray(images), images, factor),
    "Contrast": contrast,
    "Brightness": lambda images, factor: blend(torch.zeros_like(images[:1]), images, factor),
    "Sharpness": sharpness,
}
