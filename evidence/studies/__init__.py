"""Studies of the package, one file per study with a function `study()`; `graticule study` lists them.

They are in the package, as recipes are, so that `graticule study NAME` works wherever the package is installed.
"""
