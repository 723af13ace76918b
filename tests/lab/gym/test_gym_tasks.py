"""The tasks of the gym: exact dependence of their answers on position, over all arrangements."""

import itertools

import pytest
import torch
from hand_built import HandBuilt

from graticule.lab.gym.base import (
    CELL,
    DISTRACTORS,
    TASKS,
    ListedTask,
    build_task,
    displacements,
    generators,
    glyphs,
    paint,
    shift_cells,
)
from in_turn import in_turn

EVERY = [(name, surface) for name, kind in TASKS.items() for surface in kind.surfaces]
LISTED = [(name, surface) for name, surface in EVERY if issubclass(TASKS[name], ListedTask)]
GRIDS = [(6, 6), (6, 9), (9, 7)]


def shares(labels, weights):
    """Return the probability of each label."""
    return torch.zeros(int(labels.max()) + 1, dtype=torch.float64).index_add(0, labels, weights)


@in_turn("grid", GRIDS)
@in_turn(("name", "surface"), EVERY)
def test_a_model_made_by_hand_from_coordinates_solves_every_task(name, surface, grid):
    task = build_task(f"{name}(density=0.3)", grid, surface)
    examples = task.sample(200, *generators(0, "test"))
    answers = HandBuilt(name, grid, surface == "torus")(examples.images)
    assert task.answer.score(answers, examples.target) == pytest.approx(1, abs=1e-6)


@in_turn("grid", GRIDS)
@in_turn(("name", "surface"), LISTED)
def test_every_answer_is_equally_probable_and_every_mark_has_a_cell_of_its_own(name, surface, grid):
    task = build_task(name, grid, surface)
    cells, target, weights = task.arrangements()
    assert weights.sum().item() == pytest.approx(1, abs=1e-12) and (weights > 0).all()
    assert ((cells >= 0) & (cells < task.cells)).all() and cells.shape[1] == len(task.symbols)
    assert all(len(set(row)) == len(row) for row in cells.tolist())
    if task.answer.measure == "accuracy" and not task.answer.per_token:
        expected = torch.full((task.answer.outputs,), 1 / task.answer.outputs, dtype=torch.float64)
        torch.testing.assert_close(shares(target, weights), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["region", "neighbors"])
def test_counts_are_drawn_before_their_marks_and_equally_often(name):
    task = build_task(name, (6, 6))
    cells, target = task.draw(4000, generators(0, "train")[0])
    assert all(len(set(row)) == len(row) for row in cells.tolist())
    expected = 4000 / task.answer.outputs
    chi2 = ((torch.bincount(target, minlength=task.answer.outputs) - expected) ** 2 / expected).sum()
    assert chi2 < 18.5  # 99.9 % of uniform draws of five classes


@in_turn(("name", "surface"), EVERY)
def test_the_multiset_of_patches_is_independent_of_the_arrangement(name, surface):
    task = build_task(f"{name}(density=0.4)", (6, 8), surface)
    first, other = (task.sample(50, generators(seed, "train")[0], generators(7, "train")[1]) for seed in (1, 2))
    assert not torch.equal(first.symbols, other.symbols)
    torch.testing.assert_close(first.symbols.flatten(1).sort(1).values, other.symbols.flatten(1).sort(1).values)


def orbits(cells, grid, alike):
    """Return a number per arrangement, equal for all its shifts on the torus; marks in `alike` are interchangeable."""
    every = torch.stack([shift_cells(cells, by, grid) for by in itertools.product(*map(range, grid))])  # (N, P, marks)
    every = every.sort(2).values if alike else every
    return (every * (grid[0] * grid[1]) ** torch.arange(cells.shape[1])).sum(2).amin(0)


@pytest.mark.parametrize(
    "name", [name for name, surface in LISTED if surface == "torus" and name not in ("shift", "column")]
)
def test_shifts_around_the_torus_show_every_answer_of_absolute_tasks_alike_and_one_of_relative_tasks(name):
    task = build_task(name, (6, 6), "torus")
    cells, target, weights = task.arrangements()
    numbers, inverse = orbits(cells, task.grid, len(set(task.symbols)) == 1).unique(return_inverse=True)
    counts = torch.zeros(len(numbers), task.answer.outputs, dtype=torch.float64)
    counts.index_put_((inverse, target), weights, accumulate=True)
    if task.frame == "absolute":
        frequencies = counts / counts.sum(1, keepdim=True)
        torch.testing.assert_close(frequencies, torch.full_like(frequencies, task.answer.chance), rtol=0, atol=1e-12)
    else:
        assert ((counts > 0).sum(1) == 1).all()


@pytest.mark.parametrize("name", ["shift", "column"])
def test_the_cells_that_are_asked_for_shift_with_the_mark(name):
    grid = (6, 7)
    task = build_task(name, grid, "torus")
    cells, target, _ = task.arrangements()
    of_mark = {int(cell): wanted for cell, wanted in zip(cells[:, 0], target, strict=True)}
    for by in ((0, 1), (1, 0), (2, 3)):
        for cell, wanted in of_mark.items():
            there = of_mark[int(shift_cells(torch.tensor(cell), by, grid))]
            if name == "shift":
                assert there == shift_cells(wanted, by, grid)
            else:
                torch.testing.assert_close(there, wanted.view(grid).roll(by, (0, 1)).flatten())


def test_displacement_alone_says_nothing_of_symmetry():
    for surface in ("plane", "torus"):
        cells, target, weights = build_task("symmetry", (6, 8), surface).arrangements()
        _, dx = displacements(cells[:, 0], cells[:, 1], (6, 8), surface == "torus")
        for distance in dx.abs().unique():
            chosen = dx.abs() == distance
            mirrored, other = (weights[chosen & (target == label)].sum() for label in (1, 0))
            assert mirrored == pytest.approx(float(other), abs=1e-12)


def test_images_show_each_symbol_as_a_glyph_and_glyphs_are_orthogonal():
    symbols = torch.tensor([[[0, 1, 2], [3, 4, 5]]])
    images = paint(symbols)
    assert images.shape == (1, 1, 2 * CELL, 3 * CELL)
    for (y, x), symbol in zip(itertools.product(range(2), range(3)), symbols.flatten().tolist(), strict=True):
        cell = images[0, 0, y * CELL : (y + 1) * CELL, x * CELL : (x + 1) * CELL]
        torch.testing.assert_close(cell, glyphs()[symbol])
    gram = glyphs().flatten(1) @ glyphs().flatten(1).T
    torch.testing.assert_close(gram, torch.diag(torch.tensor([0.0, 16, 16, 16, 16, 16])))


def test_density_is_the_share_of_the_other_cells_that_show_a_distractor():
    for density in (0, 0.3, 1):
        symbols = build_task(f"place(density={density})", (9, 9)).sample(400, *generators(0, "train")).symbols
        share = torch.isin(symbols, torch.tensor(DISTRACTORS)).double().mean().item()
        assert share == pytest.approx(density * 80 / 81, abs=0.01)


def test_images_follow_from_seed_and_stream():
    task = build_task("order(density=0.2)", (6, 6))
    first, again, other, test = (
        task.sample(20, *generators(seed, stream)).symbols
        for seed, stream in ((0, "train"), (0, "train"), (1, "train"), (0, "test"))
    )
    assert torch.equal(first, again) and not torch.equal(first, other) and not torch.equal(first, test)


def test_invalid_tasks_are_refused():
    cases = [
        ("plaice", (6, 6), "plane", "did you mean 'place'"),
        ("place(denstiy=1)", (6, 6), "plane", "did you mean 'density'"),
        ("place(density=2)", (6, 6), "plane", "`density` must be in [0, 1], got 2.0."),
        ("place", (5, 6), "plane", "`grid` must have sides of at least 6 cells, got 5 x 6."),
        ("border", (6, 6), "torus", "`surface` must be plane for the task Border, got 'torus'."),
        ("shift(steps=6)", (6, 6), "plane", "`steps` must be from 1 to 5"),
        ("place + border", (6, 6), "plane", "`tasks` must be single names, not combined"),
    ]
    for name, grid, surface, message in cases:
        with pytest.raises(ValueError) as refused:
            build_task(name, grid, surface)
        assert message in str(refused.value), name
