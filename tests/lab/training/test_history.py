"""History, log, progress bar and TensorBoard files of a run; a resumed run has the same as an uninterrupted one."""

import csv
import io
import re

import pytest

from graticule.lab.training.loop import train
from graticule.lab.training.run import Run
from short_runs import RICH, rows, short, stopped

DATED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  (.*)")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Run:
    return train(short(**RICH), tmp_path_factory.mktemp("whole") / "run", progress=False)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Run:
    """Return a run stopped in the middle of both epochs and resumed."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    for step in (1, 4):
        stopped(short(**RICH), folder, step)
    return train(short(**RICH), folder, resume=True, progress=False)


def logged(run: Run) -> list[str]:
    lines = [DATED.fullmatch(line) for line in run.log_file.read_text().splitlines()]
    assert all(lines), run.log_file.read_text()
    return [line[1] for line in lines]


def test_a_plain_log_has_a_line_per_epoch_and_one_where_it_starts(uninterrupted):
    lines = logged(uninterrupted)
    assert lines[0] == "starts on 1 device, cpu" and len(lines) == 3
    for number, line in enumerate(lines[1:], start=1):
        assert re.fullmatch(
            rf"epoch {number} of 2: train_loss \S+, val_loss \S+, val_top1 \S+, lr \S+, seconds \S+", line
        )


def test_the_log_has_the_reason_of_a_stop_and_the_step_of_a_resume(resumed):
    assert [line.partition(":")[0] for line in logged(resumed)] == [
        "starts on 1 device, cpu",
        "stopped by Preempted",
        "resumed after step 2 on 1 device, cpu",
        "epoch 1 of 2",
        "stopped by Preempted",
        "resumed after step 5 on 1 device, cpu",
        "epoch 2 of 2",
    ]


def test_the_history_has_a_row_an_epoch_of_numbers(uninterrupted):
    with uninterrupted.metrics_file.open(newline="") as file:
        history = list(csv.DictReader(file))
    assert list(history[0]) == ["epoch", "train_loss", "val_loss", "val_top1", "lr", "seconds"]
    assert [row["epoch"] for row in history] == ["1", "2"]
    for row in history:
        assert 0 < float(row["train_loss"]) < 10 and 0 <= float(row["val_top1"]) <= 100 and float(row["seconds"]) > 0


def test_an_epoch_that_was_resumed_in_its_middle_has_the_loss_of_a_whole_one(uninterrupted, resumed):
    assert rows(resumed) == rows(uninterrupted)


def test_tensorboard_has_the_same_numbers(uninterrupted):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(uninterrupted.folder / "tensorboard"))
    read.Reload()
    for name in ("train_loss", "val_loss", "val_top1", "lr"):
        values = [event.value for event in read.Scalars(name)]
        assert values == pytest.approx([float(row[name]) for row in rows(uninterrupted)], rel=1e-6)


@pytest.fixture
def bars(monkeypatch):
    """Return the opened bars, drawn at every step."""
    from tqdm import tqdm

    bars, drawing = [], {"disable": False, "mininterval": 0, "miniters": 1, "file": io.StringIO(), "ncols": 200}

    def opened(**options):
        drawn, bar = [], tqdm(**(options | drawing))
        inner = bar.display

        def display(*arguments, **named):
            drawn.append((bar.n, bar.total, str(bar)))
            return inner(*arguments, **named)

        bar.display = display
        bars.append(drawn)
        return bar

    monkeypatch.setattr("graticule.lab.training.progress.progress_bar", opened)
    return bars


def test_the_bar_shows_images_per_second_remaining_time_and_scores(tmp_path, bars):
    train(short(accumulate=2, epochs=3), tmp_path / "run")
    (drawn,) = bars
    images = [n for n, _, _ in drawn]
    assert images == sorted(images) and set(range(20, 181, 20)) <= set(images) and images[-1] == 180
    assert {total for _, total, _ in drawn} == {180}
    texts = [text for _, _, text in drawn]
    assert all("%" in text and "/180" in text for text in texts)
    later = texts[-1]
    assert "best=" in later and "loss=" in later and "top1=" in later and "epoch 3/3" in later
    assert re.search(r"\[\d\d:\d\d<\d\d:\d\d, +[\d.k]+img/s", later)  # elapsed time, remaining time, speed


@pytest.mark.parametrize("stop", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_after_a_resume_the_bar_continues_where_it_was_and_ends_at_its_end(tmp_path, bars, stop):
    folder = tmp_path / "run"
    stopped(short(), folder, stop)
    bars.clear()
    train(short(), folder, resume=True)
    (drawn,) = bars
    images = [n for n, _, _ in drawn]
    assert images[0] >= 20 * (stop + 1) and images == sorted(images) and images[-1] == 120 == drawn[-1][1]
    assert not any("?img/s" in text or "-" in text.partition("img/s")[0][-6:] for _, _, text in drawn[1:])
