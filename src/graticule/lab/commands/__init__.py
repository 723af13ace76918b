"""The commands of `graticule`, one file each."""
