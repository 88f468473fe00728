"""Finding where a built model computes each standard value, by following its data."""
