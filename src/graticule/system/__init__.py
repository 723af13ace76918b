"""The machine: files that are written whole or not at all, memory, the terminal, sizes of symbolic shapes.

Nothing here knows what a model is; everything may import it.
"""
