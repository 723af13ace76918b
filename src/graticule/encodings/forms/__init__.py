"""Base classes of encodings: absolute tables, biases, rotations, mixing weights, functions of the tokens.

A file is one form in which many methods are written; the methods are in the folder above.
"""
