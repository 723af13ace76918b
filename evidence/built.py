"""What the choices of the studies are as built: docs/data/study_NAME_arms.csv, and their texts on the pages."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from graticule.lab.studies.arms import Arm, arms_table, read_arms, write_arms
from graticule.lab.studies.plan import check_choices, plan
from graticule.lab.studies.study import load_study


def built_text(arms: Sequence[Arm]) -> tuple[str, dict[str, str]]:
    """Return the facts that all choices share, and choice -> the others."""
    shared, ((_, *names), *rows) = arms_table(arms)
    texts, alone = {}, ("encoding", "joining")
    for choice, *values in rows:
        facts = [(name, value) for name, value in zip(names, values, strict=True) if value not in ("", "default")]
        texts[choice] = ", ".join(value if name in alone else f"{name} {value}" for name, value in facts)
    return shared, texts


def write_built(studies: Path, data: Path, roots: Mapping[str, Path]) -> list[Path]:
    """Build the models of all studies whose data are here, and store what they are; returns the files that changed.

    Args:
        studies: folder of the studies.
        data: folder of the files.
        roots: `folder` of a study -> folder of its data set.
    """
    written = []
    for file in sorted(studies.glob("[!_]*.py")):
        study, table = load_study(file), data / f"study_{file.stem}.csv"
        recipes = study.recipes(data_root=roots.get(study.folder))
        try:
            arms = [*check_choices(study, plan(recipes, study.seeds[:1], data / "none"))[0].values()]
        except FileNotFoundError as error:
            print(f"{file.stem}: {error}", file=sys.stderr)
            continue
        stored = read_arms(table)
        if len(arms) != len(stored) or any(arm.differences(vars(old)) for arm, old in zip(arms, stored, strict=True)):
            written.append(write_arms(table, arms))
    return written
