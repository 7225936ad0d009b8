"""Predictions for a model on a cluster: the seconds and bytes of a step, and advice if it does not fit."""
