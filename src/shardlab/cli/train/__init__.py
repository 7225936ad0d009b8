"""`shardlab train`, and `shardlab.train` for Python.

Read `command.py` first: it merges the settings, and leads a run from its start to its summary. Before the ranks start,
`auto_plan.py` chooses a plan for --plan auto, and `choose_passes.py` the passes. `before_ranks.py` checks the program
and reports ranks that fail. `this_machine.py` finds the free memory, the peak speed and the predicted step time of this
machine. `from_python.py` has the Python function.
"""
