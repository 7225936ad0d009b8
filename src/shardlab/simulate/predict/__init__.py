"""Predictions for a model on a cluster: a step's seconds and bytes, and advice where it does not fit."""
