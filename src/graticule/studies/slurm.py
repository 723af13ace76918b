"""Runs as jobs of SLURM: the executor of submitit, and the script of a job."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

from graticule.names import known_name
from graticule.specs import Spec

#: Arguments of the script that no option sets, and options of submitit that have another name in the script.
_OURS = ("command", "folder", "job_name")
_SHARED = {"timeout_min": "time", "mem_gb": "mem", "tasks_per_node": "ntasks_per_node"}


def slurm_executor(on: str, folder: Path) -> Any:
    """Build the executor of submitit that `slurm(...)` describes; `cluster='local'` needs no SLURM.

    Raises:
        ValueError: for options that submitit does not know.
        ImportError: if submitit is not installed.
    """
    try:
        from submitit import AutoExecutor
    except ModuleNotFoundError:
        raise ImportError(missing_package("slurm", "submitit")) from None
    options = dict(Spec.parse(on, "on").options)
    cluster = options.pop("cluster", "slurm")
    try:
        executor = AutoExecutor(folder / "slurm", cluster=cluster)
        executor.update_parameters(name="graticule", **options)
    except (NameError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"`on` must have options of submitit, got {on!r}: {error}") from None
    return executor


def slurm_script(on: str, folder: Path) -> str:
    """Return the batch script of one run for SLURM, without submitting it.

    Raises:
        ValueError: for options that submitit does not know.
        ImportError: if submitit is not installed.
    """
    try:
        from submitit.slurm.slurm import _make_sbatch_string
    except ModuleNotFoundError:
        raise ImportError(missing_package("slurm", "submitit")) from None

    plain = [name for name in inspect.signature(_make_sbatch_string).parameters if name not in _OURS]
    known = ["cluster", *_SHARED, *plain, *(f"slurm_{name}" for name in plain)]
    options = dict(Spec.parse(on, "on").options)
    for name in options:
        known_name("on", name, known)
    options.pop("cluster", None)
    if "mem_gb" in options:
        options["mem_gb"] = f"{options['mem_gb']}GB"
    named = {_SHARED.get(name, name.removeprefix("slurm_")): value for name, value in options.items()}
    command = f"{sys.executable} -m submitit.core._submit {folder / 'slurm'}"
    script: str = _make_sbatch_string(command=command, folder=str(folder / "slurm"), job_name="graticule", **named)
    return script


def missing_package(kind: str, package: str) -> str:
    """Return the message that `--on` needs a package, with the command that installs it."""
    return f'`on` {kind} must have the package {package}: pip install "graticule[cluster]".'
