"""Several runs compared. Names are imported when they are first used, for listing runs needs no PyTorch."""

from typing import TYPE_CHECKING

from graticule.lazy import lazy_names

if TYPE_CHECKING:
    from graticule.studies.comparison import Comparison
    from graticule.studies.comparison_runs import compare, plan, planned_rows, train_part
    from graticule.studies.execution import executor_of, slurm_script, train_runs
    from graticule.studies.resamplers import ResamplerStudy, try_resamplers
    from graticule.studies.resolution import Resolutions, resolutions
    from graticule.studies.text_lengths import Lengths, lengths

__all__ = [
    "Comparison",
    "Lengths",
    "ResamplerStudy",
    "Resolutions",
    "compare",
    "executor_of",
    "lengths",
    "plan",
    "planned_rows",
    "resolutions",
    "slurm_script",
    "train_part",
    "train_runs",
    "try_resamplers",
]

_HOMES = {
    "Comparison": "comparison",
    "Lengths": "text_lengths",
    "ResamplerStudy": "resamplers",
    "Resolutions": "resolution",
    "compare": "comparison_runs",
    "executor_of": "execution",
    "lengths": "text_lengths",
    "plan": "comparison_runs",
    "planned_rows": "comparison_runs",
    "resolutions": "resolution",
    "slurm_script": "execution",
    "train_part": "comparison_runs",
    "train_runs": "execution",
    "try_resamplers": "resamplers",
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
