"""Position encodings for vision backbones: encodings, joinings, backbones, and analyses of position in every layer.

A name is imported when it is first used, so that `import graticule` costs milliseconds. `import graticule.backbones`
registers the models with timm, as `graticule_...`.
"""

from typing import Any

import lazy_loader

__version__ = "0.1.0"
_import, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _import(name)
    except ModuleNotFoundError as error:
        from graticule.registry.checks import install

        error.add_note(f"graticule.{name} needs more packages: {install('lab')}.")
        raise
