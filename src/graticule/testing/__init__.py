"""The contract of encodings, joinings, resamplers, backbones and tasks, for tests of your own.

    import graticule.testing, my_methods

    def test_my_encoding():
        graticule.testing.check_encoding("my_encoding(hidden=8)")

Each function raises an AssertionError that names the law which does not hold.
"""

from typing import TYPE_CHECKING

from graticule.lazy import lazy_names

if TYPE_CHECKING:
    from graticule.testing.methods import check_backbone, check_encoding, check_joining, check_model
    from graticule.testing.resamplers import check_resampler
    from graticule.testing.tasks import check_task

__all__ = ["check_backbone", "check_encoding", "check_joining", "check_model", "check_resampler", "check_task"]

_HOMES = dict.fromkeys(__all__, "methods") | {"check_resampler": "resamplers", "check_task": "tasks"}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
