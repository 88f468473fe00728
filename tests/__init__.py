"""Bestiary's tests: `make test` runs them all."""
