"""Measurements on this machine, for the simulator and for comparisons: of collectives, layers and whole programs.

Read collectives.py and layers.py (what is timed), fits.py (the measured points and the lines and rates that are fitted
to them), profile.py (the file that the simulator reads), progress.py and plot.py. side_by_side/ compares a strategy
with PyTorch's implementation, and doctor/ examines hosts and links.
"""
