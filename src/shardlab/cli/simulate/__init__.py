"""`shardlab simulate`: check a strategy, and simulate one step of it.

Read `step_options.py` first: the options, and the step that they describe. `command.py` simulates it in time units, and
`priced.py` a model on a cluster, in seconds and bytes. `terminal_timeline.py` draws timelines in characters for both.
"""
