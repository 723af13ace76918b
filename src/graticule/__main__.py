"""`python -m graticule` is the command `graticule`."""

import sys

from graticule.lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
