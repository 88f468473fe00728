"""Measurements: what the parts cost, as ratios taken in one run or as a browser sees it.

Each section is a module with a function ``measure(settings)`` that yields `Figure`s; the aims
beside them are printed, not enforced. `builder.commands.bench` runs them.
"""
