"""Bugs in which gradients are divided by a wrong number."""
