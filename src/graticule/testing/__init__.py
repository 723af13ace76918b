"""Contracts and laws that methods and models have to pass, for your own tests.

For example::

    def test_my_encoding():
        graticule.testing.check_encoding("my_encoding(hidden=8)")

Each function raises an AssertionError that names the laws which do not hold.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
