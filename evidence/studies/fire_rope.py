"""FIRE against RoPE on more tokens: objects that grow or more of them, coordinates that are normalized or counted."""

from collections.abc import Iterator
from typing import Any

from evidence.studies import Measured, Study

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


def set_coordinates(model: Any, counted: bool, moved: int = 0) -> None:
    """Count coordinates in patches of the trained grid, or normalize them by the image; there both are the same.

    Coordinates of rotations are also moved, by patches.
    """
    import torch

    from graticule.encodings.fire import Fire
    from graticule.encodings.rope import Rope

    for part in model.modules():
        if isinstance(part, Fire) and counted:  # the largest distance, R, is of the trained grid

            def share(distance: Any, _: Any, reference: Any, part: Fire = part) -> Any:
                return Fire._share(part, distance, reference, reference)

            vars(part)["_share"] = share
        elif isinstance(part, Rope):
            power, known = counted - part.coordinates.in_patches, part.coordinates

            def changed(grid: Any, device: Any, built: Any, power: int = power, known: Any = known) -> Any:
                ratio = (torch.tensor(grid.shape) / torch.tensor(built.shape)).double()
                unit = 1 if known.in_patches else 2 / built.height
                return known(grid, device, built) * ratio**power + moved * unit

            vars(part)["coordinates"] = changed


def measure(run: Any) -> Iterator[Measured]:
    """Measure top-1 of the last weights, and the share of that at the trained size that is kept, chance subtracted."""
    import torch

    data, home = run.data(), run.result()["last_top1"]
    small, labels = (torch.cat(parts) for parts in zip(*data.eval_dataloader(data.size), strict=True))
    crowded = list(zip(mosaics(small, labels).split(100), labels.split(100), strict=True))
    for coordinates in ("counted", "normalized", "moved"):
        model = run.model(data, "last").eval()
        moved = 0 if coordinates != "moved" else -3 if run.recipe().encoding == "rope" else 3
        set_coordinates(model, coordinates != "normalized", moved)
        for mode, side in CONDITIONS if not moved else (("mosaic", 44),):
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
        controls="Objects grow with the image (zoom), keep their size on an empty canvas, or there are 2 x 2 "
        "objects of one class (mosaic). With counted coordinates, RoPE is as trained, FIRE is divided by the "
        "largest distance of the trained grid, and DINOv3's RoPE has the spacing of the trained grid. With "
        "normalized coordinates, RoPE has position interpolation, and FIRE and DINOv3 are as published. At the "
        "trained size both are equal. For the last statement, counted coordinates are shifted by 3 patches; this "
        "condition was added when the scores of four seeds were known.",
        follows="TMLR submission 9150 (2026)",
        limits="The paper trains on ImageNet-100 at 224 pixels and enlarges images to 4.57 times the side: FIRE has "
        "63.1 %, RoPE 18.9 %.",
        decimals=1,
        seconds=60,
        expects={"grid": "5 x 5", "layers": 4},
        measure=measure,
    )
