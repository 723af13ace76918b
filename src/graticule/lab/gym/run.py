"""Run of a gym: every choice is trained on every task with every seed; finished trainings are not repeated.

A tiny model is trained in a plain loop: starting a run of the engine would take as long again.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.encodings.forms.mixing import TokenMixing
from graticule.lab.figures.save import save_figures
from graticule.lab.gym.base import CELL, LEAST, TASKS, Answer, GymTask, build_task, generators
from graticule.lab.gym.profile import Profile, ProfileRow, heat_map, read_profile, write_profile
from graticule.lab.gym.recipe import GymRecipe
from graticule.lab.studies.execution import outcomes
from graticule.lab.tasks.classification import Recipe
from graticule.lab.tasks.parts.models import build_backbone
from graticule.lab.terminal import Lines
from graticule.lab.terminal import bar as progress_bar
from graticule.lab.training.run import surroundings
from graticule.lab.training.run_folder import lock_folder
from graticule.position.position import ENCODINGS
from graticule.registry.plugins import load_plugin, loaded_plugins
from graticule.system.files import make_folder, write_json, write_text

#: A gated MLP about as small as the default model, for the encodings that mix tokens.
_GATED = "model=gmlp_nano_patch4_28,model_kwargs=embed_dim=32 num_blocks=2"


class GymRun(NamedTuple):
    """One training: a choice, a task and a seed."""

    choice: str
    task: str
    seed: int


def gym(
    choices: Mapping[str, GymRecipe],
    folder: str | Path,
    *,
    tasks: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    sides: Sequence[int] = (),
    progress: bool = True,
    command: str = "",
    executor: Executor | None = None,
) -> Profile:
    """Train every choice on every task with every seed, and write the profile to `folder`.

    `gym.csv` is written after every training, so an interrupted gym resumes where it stopped; seeds are trained one
    after the other, so an interruption leaves complete tables. `gym.md`, `gym.png` (.pdf, .svg) and `gym.json` are
    written at the end.

    Args:
        choices: text -> recipe.
        folder: of the files.
        tasks: names with options; by default all tasks that are defined on the surface of the choices.
        seeds: of weights and images, the same for all choices.
        sides: cells per side of further grids that the models are tested on.
        progress: whether to show a bar on a terminal, or else print a line for each training.
        command: recorded in `gym.json`.
        executor: runs the trainings, as in `graticule.lab.studies.compare`; this process by default.

    Raises:
        ValueError: before any training, if a choice or a task cannot be built, or `folder` has scores of other recipes.
    """
    folder = Path(folder)
    tasks = list(tasks) or standard_tasks(choices)
    check_gym(choices, tasks, seeds, sides)
    make_folder(folder)
    with lock_folder(folder) as free:
        if not free:
            raise ValueError(f"`folder` must not be in use by another process, got {str(folder)!r}, which is.")
        profile = read_profile(folder / "gym.csv")
        for row in profile.rows:
            if row.choice in choices and row.recipe != choices[row.choice].hash:
                raise ValueError(
                    f"`folder` must have no scores of another recipe, got {str(folder)!r}, where {row.choice!r} was "
                    "trained with other values or another version of its plugin; choose another folder."
                )
        cells = [GymRun(choice, task, seed) for seed in seeds for task in tasks for choice in choices]
        order: dict[tuple[str, str, int], int] = {cell: number for number, cell in enumerate(cells)}
        scored = {(row.cell, row.side) for row in profile.rows}
        left = [cell for cell in cells if not {(cell, side) for side in (choices[cell.choice].side, *sides)} <= scored]
        plugins = loaded_plugins() if executor is not None else ()
        with progress_bar(total=len(left), unit="training", wanted=progress, dynamic_ncols=True) as bar:
            ended = outcomes(
                left, lambda cell: (train_cell, cell, choices[cell.choice], tuple(sides), plugins), executor
            )
            for number, (cell, rows) in enumerate(ended, 1):
                if isinstance(rows, BaseException):
                    raise rows
                rows = [*(row for row in profile.rows if row.cell != cell), *rows]
                rows.sort(key=lambda row: (order.get(row.cell, len(order)), row.side))
                profile = Profile(tuple(rows))
                write_profile(folder / "gym.csv", profile)
                bar.update()
                if progress and isinstance(bar, Lines):  # no terminal: print a line for each training
                    score = round(profile.scores(cell.choice, cell.task, choices[cell.choice].side)[-1])
                    line = f"{number} of {len(left)}: {cell.task}, {cell.choice}, seed {cell.seed}: {score} %"
                    print(line, file=sys.stderr, flush=True)
        profile = profile.select(list(choices), tasks)
        write_text(folder / "gym.md", profile.markdown() + "\n")
        save_figures(heat_map(profile), folder / "gym")
        record = {
            "command": command,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **surroundings(),
            "tasks": profile.tasks,
            "seeds": profile.seeds,
            "sides": profile.sides,
            "recipes": {choice: recipe.to_dict() for choice, recipe in choices.items()},
        }
        write_json(folder / "gym.json", record)
    return profile


def standard_choices() -> list[str]:
    """Return the texts of the choices, as on the command line.

    They are every registered encoding by itself, absolute ones also joined by LaPE, and, as a control, a learnable
    table that starts with the amplitude that LaPE's norm gives it.
    """
    mixing = [name for name, kind in ENCODINGS.items() if issubclass(kind, TokenMixing)]
    alone = [name for name in ENCODINGS if name not in mixing]
    absolute = [name for name in alone if ENCODINGS[name].joined == "table"]
    choices = ["encoding=none"]
    for name in absolute:
        control = ["encoding=learnable(std=1)"] * (name == "learnable")
        choices += [f"encoding={name}", *control, f"encoding={name},joining=lape"]
    choices += [f"encoding={name}" for name in alone if name != "none" and name not in absolute]
    return [*choices, *(f"encoding={name},{_GATED}" for name in mixing)]


def standard_tasks(choices: Mapping[str, GymRecipe]) -> list[str]:
    """Return the names of the tasks that are defined on the surfaces of all choices."""
    surfaces = {recipe.surface for recipe in choices.values()}
    return [name for name, kind in TASKS.items() if surfaces <= set(kind.surfaces)]


def check_gym(
    choices: Mapping[str, GymRecipe], tasks: Sequence[str], seeds: Sequence[int], sides: Sequence[int]
) -> None:
    """Build every task at every size, and every choice for every kind of answer."""
    for name, items in (("choices", list(choices)), ("tasks", tasks), ("seeds", seeds)):
        if not items or len(set(items)) < len(items):
            raise ValueError(f"`{name}` must not be empty or have duplicates, got {list(items)}.")
    for field in ("surface", "side"):
        if len(values := {getattr(recipe, field) for recipe in choices.values()}) > 1:
            raise ValueError(f"`{field}` must be the same for all choices, got {', '.join(map(str, sorted(values)))}.")
    first = next(iter(choices.values()))
    for side in (first.side, *sides):
        if side < LEAST:
            raise ValueError(f"`{'side' if side == first.side else 'sizes'}` must be at least {LEAST}, got {side}.")
    kinds: dict[tuple[bool, int], GymTask] = {}
    for task in tasks:
        for side in (first.side, *sides):
            built = build_task(task, side, first.surface)
        kinds.setdefault((built.answer.per_token, built.answer.outputs), built)
    for choice, recipe in choices.items():
        for built in kinds.values():
            try:
                build_model(recipe, built, 0)
            except ValueError as error:
                raise ValueError(f"`choices` must be models that can be built, got {choice!r}: {error}") from None


def train_cell(cell: GymRun, recipe: GymRecipe, sides: Sequence[int], plugins: Sequence[str]) -> list[ProfileRow]:
    """Train once, and return the scores at every size.

    Args:
        cell: the training.
        recipe: of the choice.
        sides: cells per side of further grids.
        plugins: imported first, for another process.
    """
    for plugin in plugins:
        load_plugin(plugin)
    start = time.perf_counter()
    tasks = {side: build_task(cell.task, side, recipe.surface) for side in (recipe.side, *sides)}
    model, losses = train(recipe, tasks[recipe.side], cell.seed)
    scores = {side: evaluate(model, task, recipe.test, cell.seed) for side, task in tasks.items()}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    training = (len(losses), round(time.perf_counter() - start, 2), parameters, recipe.hash)
    rows = []
    for side, score in scores.items():
        answer = tasks[side].answer
        numbers = (round(value, 6) for value in (score, answer.chance, answer.normalize(score)))
        values: Any = (cell.choice, cell.task, recipe.surface, cell.seed, recipe.side, side, *numbers, *training)
        rows.append(ProfileRow(*values))
    return rows


#: Share of the steps in which the learning rate rises.
_WARMUP = 0.1
#: Steps whose mean loss decides that a task is solved.
_WINDOW = 20
#: Images per batch of an evaluation.
_BATCH = 256


class GymModel(nn.Module):
    """A backbone whose patches are the cells, with mean pooling and a head, or with a head for each token.

    Linear layers are initialized by Xavier's rule, as in the first ViT: with the usual standard deviation of 0.02,
    which suits hundreds of channels, the output of attention with 32 channels starts near zero, and about a hundred
    steps pass before it grows. Parameters of the position are initialized by their encodings.
    """

    def __init__(self, recipe: GymRecipe, answer: Answer) -> None:
        super().__init__()
        values = ("model", "encoding", "joining", "model_kwargs")
        chosen = Recipe(**{name: getattr(recipe, name) for name in values})
        size, outputs = (recipe.side * CELL, recipe.side * CELL), 0 if answer.per_token else answer.outputs
        self.backbone: Backbone = build_backbone(chosen, outputs, 1, size, CELL, "avg")
        if answer.per_token and set(self.backbone.position_grids(self.backbone.grid)[-1].shape) != {recipe.side}:
            raise ValueError(f"`model` must have a token for each cell for tasks on cells, got {recipe.model}.")
        for name, module in self.backbone.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith("position.") and module.out_features:
                nn.init.xavier_uniform_(module.weight)
        self.head: nn.Linear | None = None
        if answer.per_token:
            self.backbone.reset_classifier(0, "")  # returns all tokens
            self.head = nn.Linear(self.backbone.num_features, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return answers for images (count, 1, height, width): (count, outputs), or one per cell, (count, N)."""
        answers: Tensor = self.backbone(images)
        return answers if self.head is None else self.head(answers[:, self.backbone.num_prefix_tokens :])[..., 0]


def build_model(recipe: GymRecipe, task: GymTask, seed: int) -> GymModel:
    """Build the model of a recipe for a task; the same seed results in the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GymModel(recipe, task.answer)


def train(recipe: GymRecipe, task: GymTask, seed: int) -> tuple[GymModel, list[float]]:
    """Train a model on a task; returns the model, and the loss of each step.

    The images depend on the seed and not on the model, so all choices see the same ones. Training ends early when the
    mean loss of 20 steps is below `recipe.solved_loss`.

    Args:
        recipe: of the model and the training.
        task: at the training size.
        seed: of the weights and the images.
    """
    model = build_model(recipe, task, seed).train()
    undecayed = {f"backbone.{name}" for name in model.backbone.no_weight_decay()}
    optimizer = torch.optim.AdamW(
        param_groups_weight_decay(model, recipe.weight_decay, no_weight_decay_list=undecayed),
        lr=recipe.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    streams, parameters = generators(seed, "train"), list(model.parameters())
    losses = []
    for step in range(recipe.steps):
        share = (step + 1) / recipe.steps
        decay = 0.5 * (1 + math.cos(math.pi * (share - _WARMUP) / (1 - _WARMUP)))
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * (share / _WARMUP if share < _WARMUP else decay)
        examples = task.sample(recipe.batch_size, *streams)
        loss = task.answer.loss(model(examples.images), examples.target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if len(losses) >= _WINDOW and fmean(losses[-_WINDOW:]) < recipe.solved_loss:
            break
    return model.eval(), losses


@torch.no_grad()
def evaluate(model: nn.Module, task: GymTask, count: int, seed: int) -> float:
    """Return the score of a model on `count` held-out images of a task, at any size."""
    examples = task.sample(count, *generators(seed, "test"))
    answers = torch.cat([model(images) for images in examples.images.split(_BATCH)])
    return task.answer.score(answers, examples.target)
