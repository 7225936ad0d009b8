"""`shardlab train`, and `shardlab.train` for Python.

Read `command.py` first: where the settings come from, and the run from its start to its summary. Before the ranks
start, `auto_plan.py` chooses a plan for --plan auto, and `choose_passes.py` the passes. `before_ranks.py` checks the
program and reports ranks that fail. `this_machine.py` knows the machine: its memory, peak and predicted step time.
`from_python.py` is the function call.
"""
