"""Comparisons of several runs. Names are imported when they are first used, since listing runs needs no PyTorch."""

from typing import TYPE_CHECKING

from graticule.lazy import lazy_names

if TYPE_CHECKING:
    from graticule.studies.comparison import Comparison
    from graticule.studies.comparison_runs import compare, plan, planned_rows, train_part
    from graticule.studies.execution import executor_of, train_runs
    from graticule.studies.resamplers import ResamplerStudy, try_resamplers
    from graticule.studies.resolution import Resolutions, resolutions
    from graticule.studies.slurm import slurm_script
    from graticule.studies.study import Endpoint, Study, list_studies, load_study
    from graticule.studies.study_report import StudyReport
    from graticule.studies.study_runs import run_study, write_report
    from graticule.studies.text_lengths import Lengths, lengths

__all__ = [
    "Comparison",
    "Endpoint",
    "Lengths",
    "ResamplerStudy",
    "Resolutions",
    "Study",
    "StudyReport",
    "compare",
    "executor_of",
    "lengths",
    "list_studies",
    "load_study",
    "plan",
    "planned_rows",
    "resolutions",
    "run_study",
    "slurm_script",
    "train_part",
    "train_runs",
    "try_resamplers",
    "write_report",
]

_HOMES = {
    "Comparison": "comparison",
    "Endpoint": "study",
    "Lengths": "text_lengths",
    "ResamplerStudy": "resamplers",
    "Resolutions": "resolution",
    "Study": "study",
    "StudyReport": "study_report",
    "compare": "comparison_runs",
    "executor_of": "execution",
    "lengths": "text_lengths",
    "list_studies": "study",
    "load_study": "study",
    "plan": "comparison_runs",
    "planned_rows": "comparison_runs",
    "resolutions": "resolution",
    "run_study": "study_runs",
    "slurm_script": "slurm",
    "train_part": "comparison_runs",
    "train_runs": "execution",
    "try_resamplers": "resamplers",
    "write_report": "study_runs",
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
