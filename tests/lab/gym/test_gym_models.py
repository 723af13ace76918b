"""Limits of models: chance without position, and on a torus for absolute tasks if they are shift-invariant."""

import pytest
import torch

from graticule.lab.commands.choices import parse_choices
from graticule.lab.gym.base import CELL, TASKS, ListedTask, build_task, generators, paint
from graticule.lab.gym.recipe import GymRecipe
from graticule.lab.gym.run import build_model, evaluate, standard_choices, train
from in_turn import in_turn

ALL_TASKS = list(TASKS)
LISTED = [name for name in ALL_TASKS if issubclass(TASKS[name], ListedTask)]
#: Encodings without a border or any other absolute position, and a model that supports them.
WRAPPED = [
    GymRecipe(encoding="none"),
    GymRecipe(encoding="peg(padding='circular')"),
    GymRecipe(encoding="convolutional_projection(padding='circular')"),
    GymRecipe(
        model="gmlp_nano_patch4_28", model_kwargs=("embed_dim=16", "num_blocks=2"), encoding="global_filter(bias=False)"
    ),
]


def drawn(recipe, task):
    """Return a model in float64 with all parameters drawn, including norms and biases."""
    model = build_model(recipe, task, 0).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64))
    return model


def all_images(task):
    """Return the images of all arrangements, without distractors."""
    cells, target, weights = task.arrangements()
    symbols = torch.zeros(len(cells), task.cells, dtype=torch.long)
    symbols.scatter_(1, cells, torch.tensor(task.symbols).expand(len(cells), -1))
    return paint(symbols.unflatten(1, task.grid)).double(), target, weights


@torch.no_grad()
def answers_of(model, images):
    """Return the answers rounded to eleven digits, so that rounding errors vanish."""
    return torch.cat([model(part) for part in images.split(400)]).round(decimals=11)


@in_turn("name", ALL_TASKS)
def test_without_position_answers_do_not_depend_on_the_arrangement(name):
    task = build_task(f"{name}(density=0.4)", (6, 6))
    images = task.sample(3, *generators(0, "test")).images.double()
    model = drawn(GymRecipe(encoding="none"), task)
    order = torch.randperm(task.cells)
    cells = images.unfold(2, CELL, CELL).unfold(3, CELL, CELL).flatten(2, 3)  # (3, 1, N, 4, 4)
    moved = cells[:, :, order].unflatten(2, (6, 6)).permute(0, 1, 2, 4, 3, 5).flatten(4, 5).flatten(2, 3)
    before, after = answers_of(model, images), answers_of(model, moved)
    torch.testing.assert_close(after, before[:, order] if task.answer.per_token else before, rtol=0, atol=1e-9)


@in_turn("name", LISTED)
def test_without_position_a_model_is_exactly_at_chance_over_all_arrangements(name):
    task = build_task(name, (6, 6))
    images, target, weights = all_images(task)
    answers = answers_of(drawn(GymRecipe(encoding="none"), task), images)
    score = expected_score(task, answers, target, weights)
    if name == "shift":  # with one sign, the lowest logit is that of the mark's cell, which is never correct
        score = max(score, expected_score(task, -answers, target, weights))
    if task.answer.measure == "accuracy":
        assert score == pytest.approx(task.answer.chance, abs=1e-7)
    else:
        assert score <= 0  # only the mean would have 0


def expected_score(task, answers, target, weights):
    """Return the mean score over arrangements, weighted by their probabilities."""
    scores = [task.answer.score(answers[i : i + 1], target[i : i + 1]) for i in range(len(answers))]
    return float(torch.tensor(scores, dtype=torch.float64) @ weights)


@pytest.mark.parametrize("name", ["box", "column"])
def test_the_best_answer_without_position_has_a_score_of_zero(name):
    task = build_task(name, (6, 8))
    _, target, _ = task.arrangements()
    if name == "box":
        constant = target.mean(0).expand_as(target)
    else:
        constant = torch.full(target.shape, 5 / 47, dtype=torch.float64).logit()
    assert task.answer.score(constant, target) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("recipe", WRAPPED, ids=lambda recipe: recipe.encoding)
@pytest.mark.parametrize("name", ["place", "symmetry"])
def test_a_shift_invariant_model_is_at_chance_on_a_torus(name, recipe):
    task = build_task(name, (6, 6), "torus")
    images, target, weights = all_images(task)
    model = drawn(recipe, task)
    answers = answers_of(model, images)
    for by in ((1, 0), (0, 1), (2, 3)):
        shifted = images.roll([CELL * step for step in by], (2, 3))
        torch.testing.assert_close(answers_of(model, shifted), answers, rtol=0, atol=1e-9)
    right = (answers.argmax(1) == target).double()
    assert float(right @ weights) == pytest.approx(task.answer.chance, abs=1e-12)


def test_scores_by_hand():
    classes, cell = build_task("place", (6, 6)).answer, build_task("shift", (6, 6)).answer
    logits = torch.eye(9)[[0, 1, 2, 3]]
    assert classes.score(logits, torch.tensor([0, 1, 5, 3])) == 0.75
    assert classes.normalize(0.75) == pytest.approx((0.75 - 1 / 9) / (8 / 9))
    tied = torch.zeros(2, 36)
    tied[:, :4] = 1  # four cells share the first place
    assert cell.score(tied, torch.tensor([2, 7])) == 0.125
    assert cell.chance == 1 / 35
    mask = build_task("column", (6, 6)).answer
    target = torch.tensor([[1, 0, -1]])
    error = ((1 - 0.5) ** 2 + 0.5**2) / 2  # the third cell is not part of the question
    assert mask.score(torch.zeros(1, 3), target) == pytest.approx(1 - error / (5 / 35 * 30 / 35))
    box = build_task("box", (6, 6)).answer
    target = torch.tensor([[0.0, 0.0, 0.5, 0.5]])
    off = (0.1**2 / box.variance).mean().item()
    assert box.score(target + 0.1, target) == pytest.approx(1 - off, abs=1e-6)


def test_the_variances_of_a_box_are_those_of_all_rectangles():
    # top of two different rows of six: the smaller of a pair, P(top = t) = (5 - t) / 15
    share = torch.arange(5, 0, -1).double() / 15
    top = torch.arange(5).double() / 6
    expected = share @ top.square() - (share @ top).square()
    assert build_task("box", (6, 6)).answer.variance[0].item() == pytest.approx(expected.item(), abs=1e-9)


def test_the_choices_of_a_profile_can_all_be_built():
    choices = parse_choices(GymRecipe(), standard_choices(), "gym")
    tasks = [build_task(name, (6, 6)) for name in ("place", "shift")]
    for number, recipe in enumerate(choices.values()):
        build_model(recipe, tasks[number % 2], 0)
    assert "encoding=learnable(std=1)" in choices and "encoding=sinusoidal_2d,joining=lape" in choices


def test_training_finds_a_border_and_ends_early():
    recipe = GymRecipe(encoding="peg", steps=150, batch_size=32, solved_loss=0.1)
    task = build_task("border", (6, 6))
    model, losses = train(recipe, task, 0)
    assert len(losses) < 150 and evaluate(model, task, 256, 0) > 0.95
    assert evaluate(model, build_task("border", (9, 9)), 64, 0) > 0.5


def test_a_seed_repeats_a_training():
    recipe, task = GymRecipe(encoding="rope", steps=3, batch_size=8), build_task("order(density=0.2)", (6, 6))
    first, again, other = (train(recipe, task, seed)[1] for seed in (0, 0, 1))
    assert first == again != other


def test_models_that_cannot_answer_per_cell_are_refused():
    recipe = GymRecipe(model="swin_tiny_patch4_window7_224", model_kwargs=("window_size=3", "embed_dim=12"), side=12)
    with pytest.raises(ValueError, match="`model` must have a token for each cell for tasks on cells"):
        build_model(recipe, build_task("shift", (12, 12)), 0)
