"""Bugs of the gradient norm by which gradients are clipped."""
