"""FIRE against RoPE on more tokens: objects that grow or more of them, coordinates that are normalized or counted."""

from collections.abc import Iterator
from typing import Any

from graticule.lab.studies.study import Measured, Study

#: Modes and sides in pixels: 4.84 times the tokens of 20 x 20 pixels, and 21.2 times, 4.6 times the side.
CONDITIONS = (("zoom", 44), ("canvas", 44), ("mosaic", 44), ("zoom", 92))


def mosaics(images: Any, labels: Any) -> Any:
    """Return images of 2 x 2 digits of one class, (B, C, 44, 44): the image, and three others drawn with a fixed seed.

    A digit keeps its size; between two is a gap of a patch of 4 pixels.
    """
    import torch

    random, side = torch.Generator().manual_seed(0), images.shape[-1]
    result = images.new_full((*images.shape[:2], 44, 44), images.min().item())
    for top, left in ((0, 0), (0, 24), (24, 0), (24, 24)):
        partners = torch.arange(len(labels))
        for label in labels.unique() if top or left else ():
            (same,) = torch.where(labels == label)
            partners[same] = same[torch.randint(len(same), (len(same),), generator=random)]
        result[..., top : top + side, left : left + side] = images[partners]
    return result


def set_coordinates(model: Any, counted: bool) -> None:
    """Count coordinates in patches of the trained grid, or normalize them by the image; there both are the same."""
    import torch

    from graticule.encodings.fire import Fire
    from graticule.encodings.rope import Rope

    for part in model.modules():
        if isinstance(part, Fire) and counted:  # the largest distance, R, is that of the trained grid
            part._share = lambda distance, _, reference, part=part: Fire._share(part, distance, reference, reference)
        elif isinstance(part, Rope) and part.coordinates.in_patches != counted:
            power, known = (1 if counted else -1), part.coordinates

            def scaled(grid: Any, device: Any, built: Any, power: int = power, known: Any = known) -> Any:
                ratio = torch.tensor(grid.shape) / torch.tensor(built.shape)
                return known(grid, device, built) * ratio.double() ** power

            part.coordinates = scaled


def measure(run: Any) -> Iterator[Measured]:
    """Measure top-1 of the last weights, and the share of that at the trained size that is kept, chance subtracted."""
    import torch

    data, home = run.data(), run.result()["last_top1"]
    small, labels = (torch.cat(parts) for parts in zip(*data.eval_dataloader(data.size), strict=True))
    crowded = list(zip(mosaics(small, labels).split(100), labels.split(100), strict=True))
    for coordinates in ("counted", "normalized"):
        model = run.model(data, "last").eval()
        set_coordinates(model, counted=coordinates == "counted")
        for mode, side in CONDITIONS:
            batches = data.eval_dataloader((side, side), mode=mode) if mode != "mosaic" else crowded
            with torch.inference_mode():
                correct = torch.cat([model(images).argmax(-1) == labels for images, labels in batches])
            top1, at = 100 * correct.double().mean().item(), f"{mode} {side} {coordinates}"
            yield "top1", at, round(top1, 4)
            yield "kept", at, round(100 * (top1 - 10) / max(home - 10, 1), 3)


def study() -> Study:
    """Train without position and with five encodings on 5 x 5 tokens; test two readings of their coordinates."""
    encodings = {
        "none": "none",
        "FIRE": "fire",
        "FIRE, axes": "fire(form='axes')",
        "RoPE": "rope",
        "DINOv3 RoPE": "rope(preset='dinov3')",
        "DINOv3 RoPE, not rescaled": "rope(preset='dinov3', rescale=1.0)",
    }
    return Study(
        question="Does FIRE keep more accuracy than RoPE on more tokens, and is it the encoding or its coordinates?",
        recipe="digits_small",
        choices={name: {"encoding": encoding} for name, encoding in encodings.items()},
        seeds=tuple(range(700, 708)),
        controls="The tests of this table are at the trained size. Those on more tokens, fixed before the runs, are "
        "the rows of `evidence/contrasts.csv`, one family. At the trained size counted and normalized coordinates "
        "are the same function of the same weights. Counted: RoPE as trained; FIRE divided by the largest distance of "
        "the trained grid; DINOv3's coordinates at the spacing of the trained grid. Normalized: RoPE with position "
        "interpolation, FIRE and DINOv3 as published. Expected: normalized coordinates keep more where objects grow, "
        "counted ones where there are more objects.",
        follows="TMLR submission 9150 (2026)",
        limits="Digits of 20 pixels, 5 x 5 tokens, 10 epochs; the paper has ImageNet-100 at 224 pixels and images that "
        "grow to 1,024.",
        seconds=60,
        measure=measure,
    )
