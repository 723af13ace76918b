"""`graticule study`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.choices import RunOptions, folder_suffix, show_results, study_with
from graticule.lab.commands.options import output_folder, parse
from graticule.lab.pages.report import run_page
from graticule.lab.studies.arms import FACTS
from graticule.lab.studies.execution import executor_of, parse_on
from graticule.lab.studies.plan import planned_rows
from graticule.lab.studies.results import Results
from graticule.lab.studies.study import Study, list_studies, load_study, read_table
from graticule.lab.studies.study_runs import missing_runs, run_study
from graticule.registry.checks import known_name


@dataclass
class StudyOptions(RunOptions):
    """Run a study: train and measure the missing runs of its table, then write its tables, tests, figure and text.

        graticule study my_study.py --quick
        graticule study my_study.py --plan
        graticule study my_study.py --epochs 3 --precision bf16-mixed
        graticule study evidence/studies

    The studies of a folder are listed. All results are in one table, a CSV file with a row per score.
    """

    study: Positional[str]
    """a Python file with a function `study()`, or a folder of such files"""
    seeds: list[int] = dataclasses.field(default_factory=list)
    """run only these seeds (default: those of the study)"""
    choices: list[str] = dataclasses.field(default_factory=list)
    """run only these choices"""
    variants: list[str] = dataclasses.field(default_factory=list)
    """run only these variants"""
    output: Path | None = None
    """folder of the runs and the results (default: runs/study-NAME, followed by changed values)"""
    table: Rare[Path | None] = None
    """CSV file of the results (default: study_NAME.csv in the folder)"""
    data_root: Rare[Path | None] = None
    """folder of the data set"""
    plan: bool = False
    """print the power of every test to find the margin, and the seeds and hours that it needs; train nothing"""
    quick: bool = False
    """only a few steps per run and one seed, to check that everything works"""


def run(arguments: list[str]) -> int:
    """Run a study, or list them."""
    options = parse(StudyOptions, "study", arguments)
    parse_on(options.on)
    if Path(options.study).is_dir():
        studies = list_studies(options.study)
        if not studies:
            raise ValueError(f"`study` must be a folder with studies (NAME.py), got {options.study!r}, which has none.")
        options.say(*(f"{file}  {question}" for file, question in studies.items()))
        return options.finish(studies)
    study = load_study(options.study)
    name = Path(options.study).stem
    suffix = "-quick" * options.quick + folder_suffix(options)
    if suffix and options.table is not None:
        raise ValueError(
            "`table` must be left out with --quick, --epochs, --precision and --set: they are not the results of the "
            f"study, got {str(options.table)!r}."
        )
    study = study_with(study, options)
    folder = output_folder(options.output, Path("runs") / f"study-{name}{suffix}")
    table = options.table or folder / f"study_{name}.csv"
    selected = _select(study, options)
    chosen: dict[str, Any] = {"quick": options.quick, "data_root": options.data_root}
    if options.plan:
        return options.finish({"tests": options.print_table(*Results(name, selected, read_table(table)).power())})
    if options.list_:
        missing = missing_runs(selected, read_table(table), folder, **chosen)
        records = options.print_table(*planned_rows(missing)) if missing else []
        measured = len(selected.cells) * len(selected.seeds) - len(missing)
        options.say(f"{len(missing)} runs to train, {measured} in {table}")
        return options.finish({"runs": records, "kept": measured})
    with executor_of(options.on) as executor:
        run_study(selected, folder, table, executor=executor, progress=not options.json, **chosen)
    written = [table]
    results = Results.of_table(f"study_{name}", study, table)
    options.say(study.question)
    tables = show_results(results, options)
    written += results.write(folder)
    if runs := dataclasses.replace(results, folder=folder).runs:
        written.append(run_page(runs, results).write(folder / "report.html"))
    return options.finish({"question": study.question, **tables, "interim": results.interim()}, *written)


def _select(study: Study, options: StudyOptions) -> Study:
    choices = options.choices or list(study.choices)
    variants = options.variants or list(study.variants)
    for argument, names, known in (("choices", choices, study.choices), ("variants", variants, study.variants)):
        for name in names:
            known_name(argument, name, known)
    seeds = options.seeds or list(study.seeds)
    return dataclasses.replace(
        study,
        choices={choice: study.choices[choice] for choice in choices},
        variants={variant: study.variants[variant] for variant in variants},
        without=tuple(cell for cell in study.without if cell[0] in choices and cell[1] in variants),
        seeds=tuple(seeds[:1] if options.quick else seeds),
        tests=tuple(pair for pair in study.tested if set(pair) <= set(choices)),
        interactions=tuple(four for four in study.interactions if set(four) <= set(choices)),
        expects={key: facts for key, facts in study.expects.items() if key in (*FACTS, *choices, *variants)},
    )
