"""Optimizers of flat slices of parameters, and their settings."""
