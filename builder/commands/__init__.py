"""The commands of ``python -m builder``, one module each.

A command's module has ``add(parsers)``, which adds its parser and sets ``run`` on it.
"""
