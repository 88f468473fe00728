"""What can be wrong with the request for a specimen."""

from __future__ import annotations


class SpecimenError(ValueError):
    """A specimen cannot be built from the files beside this module."""


class UnknownFamily(ValueError):
    """There is no specimen of the family asked for."""
