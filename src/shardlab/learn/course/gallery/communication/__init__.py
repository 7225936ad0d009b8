"""Bugs of collectives and messages: missing ranks, wrong order, unnecessary calls."""
