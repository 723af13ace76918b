"""Tasks on films: answers by hand, exact chance without position, and what an encoding of places cannot do."""

import pytest
import torch

from graticule.lab.gym.base import CELL, TASKS, ListedTask, build_task, generators, glyphs, paint
from graticule.lab.gym.recipe import GymRecipe
from graticule.lab.gym.run import build_model, check_gym, evaluate, standard_tasks, train
from in_turn import in_turn

NAMES = [name for name, kind in TASKS.items() if "film" in kind.surfaces]
LISTED = [name for name in NAMES if issubclass(TASKS[name], ListedTask)]
SIZES = ("embed_dim=48", "depth=2", "num_heads=2")


def solved_by_hand(name, symbols):
    """Return the answers from the cells of the marks, by comparisons one by one."""
    found = []
    for film in symbols:
        marks = {mark: [tuple(cell) for cell in (film == mark).nonzero().tolist()] for mark in (1, 2)}
        (t, y, x), *_ = marks[1]
        if name == "film_place":
            found.append(4 * (t >= film.shape[0] // 2) + 2 * (y >= film.shape[1] // 2) + (x >= film.shape[2] // 2))
            continue
        ((u, v, w),) = marks[2]
        if name == "film_order":
            found.append(0 if t < u else 1)
        elif name == "film_distance":
            found.append(min(abs(u - t), 3) - 1)
        elif name == "film_count":
            found.append(sum(cell[0] == u for cell in marks[1]))
        else:
            steps = {"before": t - u, "after": u - t, "above": y - v, "below": v - y, "left": x - w, "right": w - x}
            found.append(list(steps).index(max(steps, key=steps.get)))
    return torch.tensor(found)


@in_turn("grid", [(6, 6, 6), (7, 6, 8)])
@in_turn("name", NAMES)
def test_answers_follow_from_the_cells_of_the_marks(name, grid):
    task = build_task(f"{name}(density=0.3)", grid, "film")
    examples = task.sample(200, *generators(0, "test"))
    assert examples.images.shape == (200, 1, grid[0], grid[1] * CELL, grid[2] * CELL)
    assert torch.equal(solved_by_hand(name, examples.symbols), examples.target)


@in_turn("name", LISTED)
def test_every_answer_is_equally_probable_and_so_are_its_patches(name):
    task = build_task(name, 6, "film")
    cells, target, weights = task.arrangements()
    assert weights.sum().item() == pytest.approx(1, abs=1e-12) and (cells[:, 0] != cells[:, -1]).all() | (
        cells.shape[1] == 1
    )
    found = torch.zeros(task.answer.outputs, dtype=torch.float64).index_add(0, target, weights)
    torch.testing.assert_close(found, torch.full_like(found, task.answer.chance), rtol=0, atol=1e-12)
    crowded = build_task(f"{name}(density=0.4)", 6, "film")
    one, other = (crowded.sample(20, generators(seed, "train")[0], generators(7, "train")[1]) for seed in (1, 2))
    assert not torch.equal(one.symbols, other.symbols)
    assert torch.equal(one.symbols.flatten(1).sort(1).values, other.symbols.flatten(1).sort(1).values)


def test_a_film_is_painted_frame_by_frame():
    symbols = torch.randint(6, (2, 3, 4, 5))
    films = paint(symbols)
    assert torch.equal(films[:, :, 1], paint(symbols[:, 1]))
    assert torch.equal(films[1, 0, 2, CELL : 2 * CELL, :CELL], glyphs()[symbols[1, 2, 1, 0]])


def drawn(encoding, task):
    model = build_model(GymRecipe(encoding=encoding, surface="film", model_kwargs=SIZES), task, 0).double().eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, dtype=torch.float64)
    return model


@in_turn("name", NAMES)
@torch.no_grad()
def test_without_position_all_arrangements_of_the_patches_have_the_same_answer(name):
    task = build_task(f"{name}(density=0.3)", 6, "film")
    symbols, order = task.sample(3, *generators(0, "test")).symbols, torch.randperm(216)
    moved = symbols.flatten(1)[:, order].view_as(symbols)
    model = drawn("none", task)
    torch.testing.assert_close(model(paint(moved).double()), model(paint(symbols).double()), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_a_tiny_model_learns_the_order_in_time_from_sines_of_three_axes():
    task = build_task("film_order", 6, "film")
    recipe = GymRecipe(encoding="sinusoidal_2d", surface="film", model_kwargs=SIZES, steps=200)
    trained = train(recipe, task, 0)
    assert len(trained.losses) < 200 and evaluate(trained.model, task, 256, 0) > 0.95


def test_films_have_their_own_tasks_and_other_grids_are_refused():
    choices = {"a": GymRecipe(encoding="rope", surface="film", model_kwargs=SIZES)}
    assert (
        standard_tasks(choices)
        == NAMES
        == ["film_place", "film_order", "film_distance", "film_direction", "film_count"]
    )
    check_gym(choices, NAMES, [0], [7])
    with pytest.raises(ValueError, match="`surface` must be film for the task FilmPlace, got 'plane'"):
        build_task("film_place", (6, 6))
    with pytest.raises(ValueError, match="`grid` must have 3 sides for surface 'film', got 6 x 6"):
        build_task("film_place", (6, 6), "film")
    with pytest.raises(ValueError, match="`grid` must have sides of at least 6 cells, got 6 x 6 x 5"):
        build_task("film_place", (6, 6, 5), "film")
