"""The commands of `graticule`, one a file: its options, and `run`, which takes its arguments."""
