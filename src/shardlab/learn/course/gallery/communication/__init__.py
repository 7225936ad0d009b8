"""Bugs of collectives and messages: who joins, in which order, and how often."""
