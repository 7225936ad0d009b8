"""Bugs in which a weight of the step before is used."""
