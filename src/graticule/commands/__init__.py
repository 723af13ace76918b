"""The commands of `graticule`, one per file: its options, and `run`, which takes its arguments."""
