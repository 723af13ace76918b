"""The studies of the package, a file each with a function `study()`; `graticule study` lists them.

They lie in the package, as recipes do, so that `graticule study NAME` works wherever the package is installed.
"""
