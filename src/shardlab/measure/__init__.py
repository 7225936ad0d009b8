"""Measurement of this machine: seconds of collectives and of the models' layers; fitted, for the simulator."""
