"""Bugs in which contributions to a gradient are missing, or counted twice."""
