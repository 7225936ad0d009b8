"""`shardlab explain`: what a configuration of another framework will do, and what to change.

`command.py` reads the options and makes the step, `report.py` prints it.
"""
