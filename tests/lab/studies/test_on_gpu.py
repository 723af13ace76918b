"""The two runs on a GPU: what is done is kept, and a machine that is not fit is refused before any work."""

import json
import time

import pytest
import torch

from evidence import on_gpu
from evidence.on_gpu import Steps, main


@pytest.mark.parametrize(
    ("available", "memory", "message"),
    [
        (False, 0, "no GPU found; --quick runs the same code on tiny inputs, on the CPU."),
        (True, 3 << 30, "the GPU must have 24 GiB of free memory, got 3.0 GiB."),
    ],
)
def test_a_machine_without_a_gpu_or_memory_is_refused(available, memory, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (memory, 80 << 30))
    with pytest.raises(SystemExit):
        main(["checks", "--output", str(tmp_path / "results")])
    assert message in capsys.readouterr().err and not (tmp_path / "results").exists()


def test_a_step_that_fails_or_hangs_does_not_stop_the_others(tmp_path, monkeypatch):
    states = lambda: json.loads((tmp_path / "on_gpu.json").read_text())["steps"]  # noqa: E731
    steps = Steps(tmp_path, seconds=60.0, quick=True)
    steps.call("fails", ["-c", "raise SystemExit(3)"])
    assert states() == {"fails": steps.states["fails"]}  # written after each, in case that the machine goes away
    steps.until = time.monotonic() + 1.0
    steps.call("hangs", ["-c", "import time; time.sleep(60)"], share=0.5)
    steps.until = time.monotonic()
    steps.call("late", ["-c", ""])
    ends = {"fails": "exit code 3, ", "hangs": "stopped after its 0 s, ", "late": "stopped after its 0 s, "}
    assert list(states()) == list(ends) and all(states()[name].startswith(text) for name, text in ends.items())


def test_trainings_that_fail_are_named_and_the_histories_kept(tmp_path, monkeypatch):
    def failing(arguments):
        raise FileNotFoundError("`data_root` must have the published files")

    monkeypatch.setattr(on_gpu, "train_study", failing)
    monkeypatch.setattr(on_gpu, "TOP", tmp_path)
    (run := tmp_path / "runs/study-lape_table2-quick/default/seed-121").mkdir(parents=True)
    (run / "metrics.csv").write_text("epoch,top1\n1,10\n")
    monkeypatch.chdir(tmp_path)
    main(["trainings", "--quick", "--output", str(tmp_path / "results"), "--data-root", str(tmp_path)])
    states = json.loads((tmp_path / "results/on_gpu.json").read_text())["steps"]
    assert states["trainings"] == "FileNotFoundError: `data_root` must have the published files"
    histories = json.loads((tmp_path / "results/histories.json").read_text())
    assert histories == {"default/seed-121": "epoch,top1\n1,10\n"}
