"""Kill and resume runs repeatedly, and check that their weights equal those of uninterrupted runs, bit for bit.

    python benchmarks/kills.py --kills 100 --seed 0 --folder FOLDER

Six kinds of commands on the CPU, among them a comparison, a study, and runs of two processes; each is run once
without interruption and once killed (SIGKILL, to all its processes) at random times, sometimes while a checkpoint is
being written, and restarted each time by the same command (train with --auto-resume). Then the final weights of every
run, the last weights (both the moving average and the current weights), and the history except for
its seconds are compared bit by bit. The table is printed and written to FOLDER as kills.md and kills.json.

A kill counts as "while writing" if it left a partially written checkpoint, `.step-*.tmp`. Faults of links and disks are
in faults.py.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from graticule.checkpoints.read import read_checkpoint
from graticule.lab.studies.runs import find_runs
from graticule.lab.training.run import Run

COMMON = "--accelerator cpu --joining lape --checkpoint-steps 3 --keep 2"
DIGITS = "digits_quick --limit-test 100 --batch-size 20 --warmup-epochs 1 --model-kwargs depth=2"
SCENES = """
    scenes_detection --limit-train 12 --limit-test 4 --batch-size 2 --epochs 2 --patch-size 16
    --model-kwargs depth=1 embed_dim=24 num_heads=3
"""
RANDOM = """
    --drop-path-rate 0.2 --mixing.mixup 0.5 --mixing.cutmix 0.5 --augmentation.random-crop-padding 2
"""
#: The values of all runs of a comparison and of a study.
SET = """
    --seeds 0 1 --epochs 3 --set limit_train=400 limit_test=100 batch_size=20 warmup_epochs=1 checkpoint_steps=3 keep=2
    model_kwargs=depth=2 accelerator=cpu ema_decay=0.95 mixing.mixup=0.5
"""
STUDY = """
from graticule.lab.studies.study import Study


def study():
    choices = {"default": {"joining": "default"}, "lape": {"joining": "lape"}}
    return Study(question="Is a study resumed?", recipe="digits_quick", choices=choices, seconds=5)
"""
#: Description and command of each kind.
KINDS = {
    "a": ("mixup, drop path, crops, EMA", f"train {DIGITS} {RANDOM} --limit-train 800 --epochs 6 --ema-decay 0.95"),
    "b": (
        "packed images, 2 workers, 3 repeats, EMA",
        f"train {DIGITS} --dataset hugging_face --data-root {{packed}} --workers 2 --aug-repeats 3 --ema-decay 0.95 "
        "--epochs 6 --augmentation.erasing 0.3 --augmentation.random-crop-padding 2",
    ),
    "c": (
        "2 processes (DDP), 2 micro-batches, EMA",
        f"train {DIGITS} {RANDOM} --limit-train 600 --epochs 4 --batch-size 24 --devices 2 --accumulate 2 "
        "--ema-decay 0.95",
    ),
    "e": (
        "Mask R-CNN, drop path, flips",
        f"train {SCENES} --head mask_rcnn(most=5) --neck simple_pyramid(channels=8) --drop-path-rate 0.2 "
        "--augmentation.hflip 0.5",
    ),
    "f": ("compare, 2 choices, 2 seeds", f"compare digits_quick --choices joining=default joining=lape {SET}"),
    "g": ("study, 2 choices, 2 seeds", f"study {{study}} {SET}"),
}


@dataclass
class Found:
    """Results of a kind."""

    kind: str
    about: str
    kills: int = 0
    while_writing: int = 0
    before_first: int = 0
    ended_before_the_kill: int = 0
    steps: int = 0
    equal: bool = False
    difference: str = ""
    seconds: float = 0.0


def main() -> int:
    """Kill, compare and report; returns 1 if any run differs or could not be killed as often as requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25, help="total number of kills, divided among the kinds")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the times of the kills, as far as they do not depend on the clock"
    )
    parser.add_argument(
        "--folder", type=Path, default=None, help="where runs and tables are written (default: a new one)"
    )
    parser.add_argument("--kinds", default="abcefg", help="which of the kinds (default: all)")
    parser.add_argument("--at-once", type=int, default=1, help="number of kinds that run at the same time")
    given = parser.parse_args()
    if not given.kinds or set(given.kinds) - set(KINDS) or given.kills < len(given.kinds):
        parser.error(f"--kills must be at least the number of kinds, got {given.kills} for {given.kinds}")
    folder = given.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    packed = pack_digits(folder / "packed") if "b" in given.kinds else folder
    study = folder / "study.py"
    study.write_text(STUDY)
    share = [given.kills * index // len(given.kinds) for index in range(len(given.kinds) + 1)]

    def one(index: int) -> Found:
        kind = given.kinds[index]
        about, words = KINDS[kind]
        command = words.format(packed=packed, study=study).split()
        moments = random.Random(f"{given.seed} {kind}")
        found = one_kind(folder / kind, kind, about, command, share[index + 1] - share[index], moments)
        print(rows([found])[0], flush=True)
        return found

    with ThreadPoolExecutor(given.at_once) as pool:
        found = list(pool.map(one, range(len(given.kinds))))
    report(folder, found)
    return 0 if all(each.equal for each in found) and sum(each.kills for each in found) == given.kills else 1


def pack_digits(folder: Path) -> Path:
    """Write the digits as an image folder of PNGs, and this as Arrow files; returns the folder of these."""
    import datasets
    from torchvision.transforms.functional import to_pil_image

    from graticule.lab.data.sets.mnist import digits

    if (folder / "packed").exists():
        return folder / "packed"
    for split, name, most in (("train", "train", 800), ("test", "val", 100)):
        images, _ = digits(split)
        for index in range(min(most, len(images))):
            image, label = images[index * len(images) // min(most, len(images))]
            path = folder / "pictures" / name / str(int(label))
            path.mkdir(parents=True, exist_ok=True)
            (to_pil_image(image) if isinstance(image, torch.Tensor) else image).save(path / f"{index}.png")
    pictures = datasets.load_dataset("imagefolder", data_dir=str(folder / "pictures"), cache_dir=str(folder / "cache"))
    pictures.save_to_disk(str(folder / "packed"))
    return folder / "packed"


def start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start or resume a command that writes to `folder`, in a new process group."""
    resumable = [*COMMON.split(), "--auto-resume"] if command[0] == "train" else []
    with (folder.parent / "said.txt").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "graticule", *command, *resumable, "--output", str(folder)],
            stdout=said,
            stderr=said,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )


def finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for a command to end; raises an error if it failed."""
    if process.wait(timeout=900):
        raise RuntimeError(f"{folder} ended with {process.returncode}: see {folder.parent / 'said.txt'}")


def runs_in(folder: Path) -> list[Run]:
    """Return the runs in a folder, which may be one itself."""
    return [Run(path) for path in find_runs(folder)] if folder.is_dir() else []


def starts(folder: Path) -> int:
    """Count how often training started or was resumed."""
    texts = [run.log_file.read_text() for run in runs_in(folder) if run.log_file.exists()]
    return sum("  starts" in line or "  resumed after" in line for text in texts for line in text.splitlines())


def half_written(folder: Path) -> bool:
    """Return whether a checkpoint is being written, or was when its process was killed."""
    try:
        return any(folder.rglob("checkpoints/.step-*.tmp"))
    except FileNotFoundError:  # renamed in between
        return False


def one_kind(folder: Path, kind: str, about: str, command: list[str], kills: int, moments: random.Random) -> Found:
    """Run a command once without interruption and once with `kills` kills, and compare."""
    began = time.perf_counter()
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    whole, killed = folder / "whole", folder / "killed"
    process = start(command, whole)
    launched = time.perf_counter()
    while not starts(whole):
        if process.poll() is not None:
            raise RuntimeError(f"{whole} was not trained: see {folder / 'said.txt'}")
        time.sleep(0.01)
    until_training = time.perf_counter() - launched
    finish(process, whole)
    training = time.perf_counter() - launched - until_training
    # one while a checkpoint is written, one during startup, the others at any time during training
    plan = ["writing", "starting"][:kills] + ["training"] * (kills - 2)
    moments.shuffle(plan)
    found = Found(kind, about)
    for moment in plan:
        first = not any(run.last for run in runs_in(killed))
        before = starts(killed)
        process = start(command, killed)
        if moment == "starting":
            wait(process, moments.uniform(0.2, until_training + 0.3))
        else:
            while starts(killed) == before and process.poll() is None:
                time.sleep(0.005)
            wait(process, moments.uniform(0, training / (kills + 1)))
        if moment == "writing":
            while not half_written(killed) and process.poll() is None:
                pass  # busy wait, for the shortest delay
        if process.poll() is not None:
            found.ended_before_the_kill += 1
            finish(process, killed)
            continue
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        found.kills += 1
        found.while_writing += half_written(killed)
        found.before_first += first and not any(run.last for run in runs_in(killed))
    finish(start(command, killed), killed)
    pairs = list(zip(runs_in(whole), runs_in(killed), strict=True))
    found.difference = next(filter(None, (difference(*pair) for pair in pairs)), "")
    found.equal = not found.difference
    found.steps = sum(int(run.last.name[5:14]) for run, _ in pairs if run.last)
    found.seconds = time.perf_counter() - began
    return found


def wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait `seconds`, or until the process ends."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and process.poll() is None:
        time.sleep(0.002)


def history(run: Run) -> list[dict[str, str]]:
    """Read the rows of a history."""
    with run.metrics_file.open(newline="") as file:
        return list(csv.DictReader(file))


def difference(whole: Run, killed: Run) -> str:
    """Describe the first difference between two runs; returns "" if they are equal."""
    pairs: dict[str, tuple[Any, Any]] = {
        "weights.safetensors": (load_file(whole.weights), load_file(killed.weights)),
        "last weights": (
            whole.model(checkpoint="last").state_dict(),
            killed.model(checkpoint="last").state_dict(),
        ),
    }
    if whole.last is not None and whole.last.is_file() and killed.last is not None:
        ends = [read_checkpoint(whole.last), read_checkpoint(killed.last)]
        if "current_model_state" in ends[0]:  # with a moving average
            pairs["averaged"] = (ends[0]["current_model_state"], ends[1]["current_model_state"])
        for index, state in ends[0]["optimizer_states"][0]["state"].items():
            pairs[f"optimizer, {index}"] = (state, ends[1]["optimizer_states"][0]["state"][index])
    for name, (ours, theirs) in pairs.items():
        if ours.keys() != theirs.keys():
            return f"{name}: different names"
        if unequal := [key for key in ours if not torch.equal(ours[key], theirs[key])]:
            return f"{name}: {len(unequal)} of {len(ours)} tensors differ, e.g. {unequal[0]}"
    rows = [[{k: v for k, v in row.items() if k != "seconds"} for row in history(run)] for run in (whole, killed)]
    return "" if rows[0] == rows[1] else "metrics.csv"


HEADER = "| kind | runs | steps | kills | while writing | before the first checkpoint | final weights equal | seconds |"


def rows(found: list[Found]) -> list[str]:
    """Write a row of the table for each kind."""
    return [
        f"| {each.kind} | {each.about} | {each.steps} | {each.kills} | {each.while_writing} | {each.before_first} | "
        f"{'yes' if each.equal else f'no ({each.difference})'} | {each.seconds:.0f} |"
        for each in found
    ]


def report(folder: Path, found: list[Found]) -> None:
    """Print the table and write it to files."""
    total = sum(each.kills for each in found)
    good = sum(each.kills for each in found if each.equal)
    lines = [HEADER, "|---|---|---:|---:|---:|---:|---|---:|", *rows(found)]
    lines += ["", f"{good} of {total} kills were in runs that ended with the same weights, bit for bit."]
    print("\n".join(["", *lines]))
    (folder / "kills.md").write_text("\n".join(lines) + "\n")
    (folder / "kills.json").write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
