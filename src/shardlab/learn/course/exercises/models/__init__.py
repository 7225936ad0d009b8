"""Exercises 21 to 24: tensor parallelism, tied embeddings, long sequences, and the choice of a plan."""
