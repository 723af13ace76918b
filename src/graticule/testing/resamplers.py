"""The contract of resamplers."""

from __future__ import annotations

from typing import Literal

import torch

from graticule.resampling import RESAMPLERS, build_resampler

_TABLES: tuple[Literal["positions", "displacements"], ...] = ("positions", "displacements")
#: Sides of grids before and after. Tables of displacements have odd sides.
_SIZES = (((7, 5), (7, 5)), ((7, 5), (13, 9)), ((13, 9), (5, 7)), ((7, 5), (3, 11)))


def check_resampler(resampler: str) -> None:
    """Check the contract of resamplers, for each kind of table that the resampler takes.

    Args:
        resampler: its name with options, such as 'bicubic(antialias=False)'.

    Raises:
        AssertionError: naming the law that does not hold.
    """
    (spec,) = RESAMPLERS.specs(resampler)
    takes = RESAMPLERS[spec.name].takes
    assert takes and takes <= set(_TABLES), f"`takes` must be of positions, displacements, got {takes}"
    for table in _TABLES:
        if table not in takes:
            continue
        one = build_resampler(spec, table)
        again = build_resampler(str(one), table)
        for old, new in _SIZES:
            where = f"from {old} to {new}"
            matrices = one.matrices(old, new)
            for matrix, shape, same in zip(
                matrices, ((new[0], old[0]), (new[1], old[1])), again.matrices(old, new), strict=True
            ):
                found = tuple(matrix.shape)
                assert found == shape, f"the matrix of an axis must be (new, old) = {shape} {where}, got {found}"
                assert matrix.dtype == torch.float64, f"the matrix of an axis must be float64, got {matrix.dtype}"
                ones = torch.ones(shape[0], dtype=matrix.dtype)
                error = (matrix.sum(1) - ones).abs().max().item()
                assert error < 1e-9, f"rows must sum to one {where}, the largest difference is {error:.1e}"
                assert torch.equal(matrix, same), f"{one} must give the same resampler as {spec}: keep every option"
            image = torch.randn(2, *old, dtype=torch.float64, requires_grad=True)
            made = one(image, new)
            assert tuple(made.shape) == (2, *new), f"a map {where} must be {(2, *new)}, got {tuple(made.shape)}"
            if old == new:
                assert torch.equal(made, image), "a map must be unchanged at its own size"
            made.square().sum().backward()
            assert image.grad is not None and image.grad.any(), f"a gradient must reach the map {where}"
