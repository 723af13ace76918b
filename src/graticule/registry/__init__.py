"""Names: specs as `name(option=value)`, registries with their options, plugins, and checks of values.

A file here reads or checks something that a user wrote.
"""
