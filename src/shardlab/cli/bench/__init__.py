"""`shardlab bench`: measure this machine, and compare Shardlab's strategies with PyTorch's.

Read `command.py` first, which measures the profile. `strategies.py` times strategies side by side, and `passes.py`
measures the gain of each pass. `report.py` prints the results of all three.
"""
