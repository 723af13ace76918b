"""The lab: data, training, tasks, studies, figures, pages and commands.

The library never imports it; `pip install -e ".[lab]"` in the clone installs what it needs.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
