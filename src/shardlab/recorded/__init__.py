"""Measurements of a real run, in the form that simulation produces, and how the two compare."""
