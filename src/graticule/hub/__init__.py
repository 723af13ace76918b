"""Published models: config.json, files and cards, and the kinds of models that can be opened again.

A kind is registered by the file that builds it.
"""
