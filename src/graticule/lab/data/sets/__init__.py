"""Data sets and texts, with the readers of their files; each file registers what it defines."""
