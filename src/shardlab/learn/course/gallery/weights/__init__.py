"""Bugs in which a weight of the previous step is used."""
