"""Proof by running: the ranks of a strategy beside one device."""
