"""Exercises 0 to 12: from one rank to sharded data parallelism on two axes."""
