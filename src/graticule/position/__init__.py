"""What a layer receives: grids, `LayerPosition` and its parts, joinings, and the interface `Position`.

A file is one idea of the mathematics; it needs PyTorch alone.
"""
