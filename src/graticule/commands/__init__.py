"""The commands of `graticule`, one per file: a dataclass of its options, and `run`, which takes its arguments."""
