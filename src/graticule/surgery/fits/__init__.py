"""Fits of the parameters of a new position, so that the outputs of a model change little.

One file per group of fits; `registry.py` has the table of old and new kinds with their fits.
"""

from graticule.surgery.fits.contributions import Contribution, table_contributions
from graticule.surgery.fits.registry import FITS, Fit, fit_position, register_fit

__all__ = ["FITS", "Contribution", "Fit", "fit_position", "register_fit", "table_contributions"]
