"""`shardlab simulate`: check a strategy, and simulate one step of it.

Read `command.py` first: the options, and the simulation in unit costs. `priced.py` simulates a model on a cluster, in
seconds and bytes. `terminal_timeline.py` draws timelines in characters for both.
"""
