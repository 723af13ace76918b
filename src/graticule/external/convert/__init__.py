"""Conversion of models of timm and transformers into backbones of this library, and back.

One file per group of families reads its models; `parts.py` has the code that they share.
"""
